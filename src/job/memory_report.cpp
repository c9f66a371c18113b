// [Note: who has the memory]
// What is there all the time: this rank's parts of parameters, gradients and the optimizer's state, and the
// buffers of its modules, whole. What
// comes and goes with the layers: parameters gathered for use and whole gradients on their way to their
// shards, of two layers at a time, or of all of a rank's where a schedule or reshard_after_forward = "never"
// keeps them. What grows with the batch: activations, of as many micro-batches as are under way.

#include "job/memory_report.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <functional>
#include <map>
#include <new>
#include <numeric>
#include <set>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include "core/process_stats.h"
#include "dist/device_backend.h"
#include "job/dry_run.h"
#include "job/memory_table.h"
#include "job/module_costs.h"
#include "job/pipeline/stages.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/nn/containers.h"
#include "titan/nn/layers.h"

namespace titan::train {

namespace {

constexpr double kLayersInUse = 2;  // the one that computes, and the next or last one on the wire

double element_size(const std::string& dtype) {
  return static_cast<double>(c10::elementSize(scalar_type(dtype)));
}

// Of the modules in a model's sequence, in the order of their calls.
std::vector<std::string> sequence_names(const JobConfig& config) {
  const auto model = config.spec().build(
      config.args(), {.construct = deferred(at::kMeta), .seq_len = config.training.seq_len});
  const nn::LayerSequence* sequence = nn::layer_sequence(model->root());
  TITAN_CHECK(sequence, "the model ", config.model.name, " doesn't name its layers (nn::LayerSequence)");
  return sequence->layer_names().all();
}

// Registered ones, and the tables of rotations, which aren't.
std::vector<NamedBytes> buffers_of(const torch::nn::Module& root) {
  std::vector<NamedBytes> bytes;
  for (const auto& buffer : root.named_buffers())
    bytes.push_back({buffer.key(), static_cast<double>(buffer.value().nbytes())});
  for (const auto& module : root.named_modules())
    if (const auto* rotary = dynamic_cast<const nn::RotaryEmbeddingImpl*>(module.value().get()))
      bytes.push_back({module.key(), static_cast<double>(rotary->table().nbytes())});
  return bytes;
}

class Estimate {
 public:
  Estimate(const JobConfig& config, int world_size, int rank)
      : config_(config), run_(config, world_size, rank), dims_(dims_of(config, world_size)) {
    for (const int stage : run_.stages()) {
      const auto& modules = run_.plan().modules[static_cast<size_t>(stage)];
      modules_.insert(modules.begin(), modules.end());
    }
    for (const auto& model : run_.models()) {
      for (const Parameter& parameter : parameters(model->root())) count(parameter);
      const std::vector<NamedBytes> buffers = buffers_of(model->root().module());
      buffers_.insert(buffers_.end(), buffers.begin(), buffers.end());
    }
    num_under_way_ = most_under_way(config, run_.plan(), dims_.pp, run_.meshes().pp.rank());
  }

  double shard_elements() const { return shard_elements_; }
  double shard_bytes() const { return shard_elements_ * element_size(config_.training.dtype); }
  bool gathers() const {
    return dims_.dp_shard * dims_.row_degree() > 1 ||
           config_.training.mixed_precision_param != config_.training.dtype;
  }
  double gathered_bytes() const {
    if (!gathers()) return 0;
    return elements_in_use(reshards()) * element_size(config_.training.mixed_precision_param);
  }
  double unreduced_bytes() const {
    if (!gathers()) return 0;
    const bool kept = !config_.parallelism.fsdp_reduce_every_micro_batch || dims_.pp > 1;
    return elements_in_use(!kept || run_.num_micro_batches() == 1) *
           element_size(config_.training.mixed_precision_reduce);
  }
  const std::vector<NamedBytes>& buffers() const { return buffers_; }
  int num_under_way() const { return num_under_way_; }
  bool reshards() const {
    return dims_.pp == 1 && reshard_policy(config_.parallelism.fsdp_reshard_after_forward).kind !=
                                ReshardAfterForward::Kind::Never;
  }
  const DryRun& run() const { return run_; }
  const ParallelDims& dims() const { return dims_; }

  // Of this rank's modules, under settings that may differ from the run's.
  std::vector<NamedBytes> activations(JobConfig config) const {
    // Costs are those of a micro-batch.
    if (dims_.pp == 1)
      config.parallelism.pipeline_parallel_microbatch_size = config.training.local_batch_size;
    const std::vector<std::string> names = sequence_names(config);
    const auto costs = computed_costs(config, dims_);
    const double each = static_cast<double>(num_under_way_) / static_cast<double>(run_.stages().size());
    std::vector<NamedBytes> bytes;
    for (size_t i = 0; i < names.size(); ++i)
      if (modules_.empty() || modules_.count(names[i]) > 0)
        bytes.push_back({names[i], each * costs[i].activation_bytes});
    return bytes;
  }

 private:
  static ParallelDims dims_of(const JobConfig& config, int world_size) {
    std::vector<std::string> checked_before;
    return resolve_parallel_dims(config.parallelism, world_size, checked_before);
  }

  void count(const Parameter& parameter) {
    shard_elements_ += static_cast<double>(parameter.data.local.numel());
    const auto whole = static_cast<double>(parameter.compute.numel());
    all_elements_ += whole;
    // "layers.3.attention.wq.weight" is of the group "layers.3".
    const size_t first = parameter.name.find('.'), second = parameter.name.find('.', first + 1);
    double& group = group_elements_[parameter.name.substr(0, second)];
    group += whole;
    largest_group_ = std::max(largest_group_, group);
  }

  double elements_in_use(bool some_layers) const {
    return some_layers ? std::min(all_elements_, kLayersInUse * largest_group_) : all_elements_;
  }

  const JobConfig& config_;
  DryRun run_;
  ParallelDims dims_;
  std::set<std::string> modules_;  // of this rank's stages; empty: all
  double shard_elements_ = 0, all_elements_ = 0, largest_group_ = 0;
  std::map<std::string, double> group_elements_;
  std::vector<NamedBytes> buffers_;
  int num_under_way_ = 1;
};

double sum_of(const std::vector<NamedBytes>& list) {
  return std::accumulate(list.begin(), list.end(), 0.0,
                         [](double sum, const NamedBytes& each) { return sum + each.bytes; });
}

std::vector<MemoryOwner> owners_of(const JobConfig& config, const Estimate& estimate) {
  const TrainingSettings& training = config.training;
  const auto activations = estimate.activations(config);
  const std::string shards =
      str(static_cast<int64_t>(estimate.shard_elements()), " parameters of this rank, ", training.dtype);
  const std::string layers = estimate.reshards() ? "two layers at a time" : "all layers";
  return {
      {"activations", sum_of(activations),
       str(estimate.num_under_way(), " micro-batch(es) of ", estimate.run().micro_batch_rows(), " x ",
           training.seq_len, " tokens: ", list_of(activations))},
      {"optimizer state", 2 * estimate.shard_bytes(), "two moments each of " + shards},
      {"parameters", estimate.shard_bytes(), shards},
      {"gradients", estimate.shard_bytes(), shards},
      {"buffers", sum_of(estimate.buffers()), list_of(estimate.buffers())},
      {"gathered parameters", estimate.gathered_bytes(), str(layers, ", ", training.mixed_precision_param)},
      {"whole gradients before their reduction", estimate.unreduced_bytes(),
       training.mixed_precision_reduce}};
}

bool passes_check(const JobConfig& config, int num_ranks) {
  try {
    check_job(config, {}, num_ranks, JobFiles::Ignore);
    return true;
  } catch (const ConfigError&) {
    return false;
  }
}

// What of the settings could be otherwise, and what each comes to.
class Savings {
 public:
  Savings(const JobConfig& config, const Estimate& estimate, c10::Device device)
      : config_(config), estimate_(estimate), activations_(sum_of(estimate.activations(config))) {
    by_activations();
    by_sharding();
    if (device.is_cuda() && !config.training.enable_cpu_offload)
      add("training.enable_cpu_offload = true", 4 * estimate.shard_bytes());
  }

  std::vector<MemorySaving> largest_first() && {
    std::erase_if(list_, [](const MemorySaving& saving) { return saving.bytes < kWorthTelling; });
    std::stable_sort(list_.begin(), list_.end(),
                     [](const MemorySaving& a, const MemorySaving& b) { return a.bytes > b.bytes; });
    return std::move(list_);
  }

 private:
  static constexpr double kWorthTelling = 1 << 20;

  void add(const std::string& setting, double bytes) { list_.push_back({setting, bytes}); }

  void add_activations(const std::string& setting, const std::function<void(JobConfig&)>& change) {
    JobConfig changed = config_;
    change(changed);
    add(setting, activations_ - sum_of(estimate_.activations(changed)));
  }

  void by_activations() {
    if (config_.activation_checkpoint.mode != "full" && config_.activation_checkpoint.mode != "offload")
      add_activations("activation_checkpoint.mode = \"full\"",
                      [](JobConfig& job) { job.activation_checkpoint.mode = "full"; });
    if (config_.training.mixed_precision_param == "float32")
      add_activations("training.mixed_precision_param = \"bfloat16\"",
                      [](JobConfig& job) { job.training.mixed_precision_param = "bfloat16"; });
    const bool pipeline = config_.parallelism.pipeline_parallel_degree > 1;
    const int64_t rows = estimate_.run().micro_batch_rows();
    if (rows > 1)
      add(str(pipeline ? "parallelism.pipeline_parallel_microbatch_size = " : "training.local_batch_size = ",
              rows / 2),
          activations_ * (1 - static_cast<double>(rows / 2) / static_cast<double>(rows)));
    by_sequence();
  }

  // A sequence is cut into equal parts, of which not every length and model has as many.
  void by_sequence() {
    const int num_ranks = estimate_.run().meshes().world.size();
    const auto may_be = [&](int factor, const std::function<void(JobConfig&)>& change) {
      JobConfig changed = config_;
      change(changed);
      return passes_check(changed, factor * num_ranks) || !passes_check(config_, num_ranks);
    };
    const int64_t half = config_.training.seq_len / 2;
    if (may_be(1, [&](JobConfig& job) { job.training.seq_len = half; }))
      add(str("training.seq_len = ", half), activations_ / 2);
    const auto twice = 2 * config_.parallelism.context.degree;
    if (may_be(2, [&](JobConfig& job) { job.parallelism.context.degree = twice; }))
      add(str("parallelism.context_parallel_degree = ", twice, ", on twice as many ranks"), activations_ / 2);
  }

  void by_sharding() {
    add(str("parallelism.data_parallel_shard_degree = ", 2 * estimate_.dims().dp_shard,
            ", on twice as many ranks"),
        4 * estimate_.shard_bytes() / 2);
    const ParallelismSettings& parallelism = config_.parallelism;
    if (!estimate_.reshards() && parallelism.pipeline_parallel_degree == 1)
      add_parameters("parallelism.fsdp_reshard_after_forward = \"always\"",
                     [](JobConfig& job) { job.parallelism.fsdp_reshard_after_forward = "always"; });
    if (!parallelism.fsdp_reduce_every_micro_batch && parallelism.pipeline_parallel_degree == 1)
      add_parameters("parallelism.fsdp_reduce_every_micro_batch = true",
                     [](JobConfig& job) { job.parallelism.fsdp_reduce_every_micro_batch = true; });
  }

  void add_parameters(const std::string& setting, const std::function<void(JobConfig&)>& change) {
    JobConfig changed = config_;
    change(changed);
    const auto& world = estimate_.run().meshes().world;
    const Estimate other(changed, world.size(), world.rank());
    add(setting, estimate_.gathered_bytes() + estimate_.unreduced_bytes() - other.gathered_bytes() -
                     other.unreduced_bytes());
  }

  const JobConfig& config_;
  const Estimate& estimate_;
  double activations_;
  std::vector<MemorySaving> list_;
};

}  // namespace

double MemoryReport::total_bytes() const {
  return std::accumulate(owners.begin(), owners.end(), 0.0,
                         [](double sum, const MemoryOwner& owner) { return sum + owner.bytes; });
}

MemoryReport memory_report(const JobConfig& config, int world_size, int rank, c10::Device device) {
  const Estimate estimate(config, world_size, rank);
  MemoryReport report{owners_of(config, estimate), Savings(config, estimate, device).largest_first()};
  std::erase_if(report.owners, [](const MemoryOwner& owner) { return owner.bytes == 0; });
  std::stable_sort(report.owners.begin(), report.owners.end(),
                   [](const MemoryOwner& a, const MemoryOwner& b) { return a.bytes > b.bytes; });
  return report;
}

namespace {

std::string in_use(c10::Device device) {
  auto* backend = dist::device_backend();
  if (device.is_cpu() || !backend)
    return str(gib(peak_resident_gib() * kGib), " GiB were resident at most so far, of the machine's ",
               gib(machine_memory_gib() * kGib), " GiB");
  const dist::DeviceMemory memory = backend->memory(device.index());
  return str(gib(static_cast<double>(memory.peak_allocated_bytes)),
             " GiB were in tensors at most since the last logged step, ",
             gib(static_cast<double>(memory.peak_reserved_bytes)),
             " GiB taken from the driver, of the device's ", gib(static_cast<double>(memory.total_bytes)),
             " GiB");
}

}  // namespace

// A pipeline's errors have lost their type. What they tell of the rank that failed first isn't this one's.
bool is_out_of_memory(const std::exception& error) {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) || dynamic_cast<const std::bad_alloc*>(&error))
    return true;
  std::string text = error.what();
  text.resize(std::min(text.size(), text.find("first to fail")));
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  constexpr std::array kWords = {"out of memory", "can't allocate memory", "std::bad_alloc"};
  return std::any_of(kWords.begin(), kWords.end(),
                     [&](const char* words) { return text.find(words) != std::string::npos; });
}

std::string explain_out_of_memory(const JobConfig& config, const dist::World& world) {
  try {
    const MemoryReport report = memory_report(config, world.size(), world.rank(), world.device());
    return str("out of memory on ", world.device().str(), ". ", in_use(world.device()), ". What rank ",
               world.rank(), " keeps at the fullest moment of a step, computed from sizes:\n",
               table_of(report));
  } catch (const std::exception& error) {
    log::warning(str("what has the memory can't be told: ", error.what()));
    return "";
  }
}

}  // namespace titan::train
