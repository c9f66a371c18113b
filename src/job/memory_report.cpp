// [Note: what uses the memory]
// Always allocated: this rank's shards of parameters, gradients and optimizer state, and the buffers of its
// modules, which aren't sharded. Allocated layer by layer: gathered parameters, and whole gradients before
// their reduction. Two layers at a time have them, or all the rank's layers if a schedule or
// reshard_after_forward = "never" keeps them. Growing with the batch: the activations of all micro-batches in
// flight.

#include <algorithm>
#include <cctype>
#include <functional>
#include <iomanip>
#include <map>
#include <new>
#include <set>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include "core/process.h"
#include "core/units.h"
#include "dist/device_backend.h"
#include "job/dry_run.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/nn/containers.h"
#include "titan/nn/layers.h"
#include "titan/train/trainer.h"

namespace titan::train {

namespace {

constexpr double kSavingWorthShowing = 1 << 20;
constexpr double kLayersInUse = 2;  // the one that computes, and one in communication

// Small sizes get enough digits to differ.
std::string gib(double bytes) {
  return str(std::fixed, std::setprecision(bytes < 0.1 * kGiB ? 4 : 2), bytes / kGiB);
}

double element_size(const std::string& dtype) {
  return static_cast<double>(c10::elementSize(scalar_type(dtype)));
}

// The modules of a model's sequence, in call order.
std::vector<std::string> sequence_names(const JobConfig& config) {
  const auto model = config.spec().build(
      config.args(), {.construct = deferred(at::kMeta), .seq_len = config.training.seq_len});
  const nn::LayerSequence* sequence = nn::layer_sequence(model->root());
  TITAN_CHECK(sequence, "the model ", config.model.name, " does not name its layers (nn::LayerSequence)");
  return sequence->layer_names().all();
}

// Registered buffers, and the rotation tables, which aren't registered.
std::vector<NamedBytes> buffers_of(const torch::nn::Module& root) {
  std::vector<NamedBytes> bytes;
  for (const auto& buffer : root.named_buffers())
    bytes.push_back({buffer.key(), static_cast<double>(buffer.value().nbytes())});
  for (const auto& module : root.named_modules())
    if (const auto* rotary = dynamic_cast<const nn::RotaryEmbeddingImpl*>(module.value().get()))
      bytes.push_back({module.key(), static_cast<double>(rotary->table().nbytes())});
  return bytes;
}

// The sizes of one rank's part of the job.
struct Estimate {
  Estimate(const JobConfig& job, int world_size, int rank)
      : config(job), run(job, world_size, rank), dims(resolve_parallel_dims(job.parallelism, world_size)) {
    for (const int stage : run.stages()) {
      const auto& names = run.plan().modules[static_cast<size_t>(stage)];
      modules.insert(names.begin(), names.end());
    }
    for (const auto& model : run.models()) {
      for (const Parameter& parameter : parameters(model->root())) count(parameter);
      const std::vector<NamedBytes> found = buffers_of(model->root().module());
      buffers.insert(buffers.end(), found.begin(), found.end());
    }
    num_under_way = most_under_way(config, run.plan(), run.meshes().pp.rank());
  }

  void count(const Parameter& parameter) {
    shard_elements += static_cast<double>(parameter.data.local.numel());
    const auto whole = static_cast<double>(parameter.compute.numel());
    all_elements += whole;
    // "layers.3.attention.wq.weight" belongs to the group "layers.3".
    const size_t first = parameter.name.find('.'), second = parameter.name.find('.', first + 1);
    double& group = group_elements[parameter.name.substr(0, second)];
    group += whole;
    largest_group = std::max(largest_group, group);
  }

  double shard_bytes() const { return shard_elements * element_size(config.training.dtype); }
  const std::string& state_dtype() const {
    return config.optimizer.state_dtype ? *config.optimizer.state_dtype : config.training.dtype;
  }
  bool gathers() const {
    return dims.dp_shard * dims.row_degree() > 1 ||
           config.training.mixed_precision_param != config.training.dtype;
  }
  double elements_in_use(bool some_layers) const {
    return some_layers ? std::min(all_elements, kLayersInUse * largest_group) : all_elements;
  }
  double gathered_bytes() const {
    if (!gathers()) return 0;
    return elements_in_use(reshards()) * element_size(config.training.mixed_precision_param);
  }
  double unreduced_bytes() const {
    if (!gathers()) return 0;
    const bool kept = !config.parallelism.fsdp_reduce_every_micro_batch || dims.pp > 1;
    return elements_in_use(!kept || run.num_micro_batches() == 1) *
           element_size(config.training.mixed_precision_reduce);
  }
  bool reshards() const {
    return dims.pp == 1 && reshard_policy(config.parallelism.fsdp_reshard_after_forward).kind !=
                               ReshardAfterForward::Kind::Never;
  }

  // The activations of this rank's modules, under settings that may differ from the run's.
  std::vector<NamedBytes> activations(JobConfig changed) const {
    // Costs are per micro-batch.
    if (dims.pp == 1)
      changed.parallelism.pipeline_parallel_microbatch_size = changed.training.local_batch_size;
    const std::vector<std::string> names = sequence_names(changed);
    const auto costs = computed_costs(changed, dims);
    const double each = static_cast<double>(num_under_way) / static_cast<double>(run.stages().size());
    std::vector<NamedBytes> bytes;
    for (size_t i = 0; i < names.size(); ++i)
      if (modules.empty() || modules.contains(names[i]))
        bytes.push_back({names[i], each * costs[i].activation_bytes});
    return bytes;
  }

  const JobConfig& config;
  DryRun run;
  ParallelDims dims;
  std::set<std::string> modules;  // in this rank's stages; empty: all modules
  double shard_elements = 0, all_elements = 0, largest_group = 0;
  std::map<std::string, double> group_elements;
  std::vector<NamedBytes> buffers;
  int num_under_way = 1;
};

template <class List>
double sum_of(const List& list) {
  double sum = 0;
  for (const auto& each : list) sum += each.bytes;
  return sum;
}

// Leaves out entries with fewer than `least` bytes.
template <class List>
List largest_first(List list, double least) {
  std::erase_if(list, [least](const auto& each) { return each.bytes < least; });
  std::ranges::stable_sort(list, std::greater(), [](const auto& each) { return each.bytes; });
  return list;
}

std::vector<MemoryOwner> owners_of(const JobConfig& config, const Estimate& estimate) {
  const TrainingSettings& training = config.training;
  const auto activations = estimate.activations(config);
  const std::string elements =
      str(static_cast<int64_t>(estimate.shard_elements), " parameters of this rank, ");
  const std::string shards = elements + training.dtype;
  const std::string layers = estimate.reshards() ? "two layers at a time" : "all layers";
  return {
      {"activations", sum_of(activations),
       str(estimate.num_under_way, " micro-batch(es) of ", estimate.run.micro_batch_rows(), " x ",
           training.seq_len, " tokens: ", list_of(activations))},
      {"optimizer state", 2 * estimate.shard_elements * element_size(estimate.state_dtype()),
       "two moments each of " + elements + estimate.state_dtype()},
      {"parameters", estimate.shard_bytes(), shards},
      {"gradients", estimate.shard_bytes(), shards},
      {"buffers", sum_of(estimate.buffers), list_of(estimate.buffers)},
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

// Settings that could be changed to save memory, and how much each saves.
class Savings {
 public:
  Savings(const JobConfig& config, const Estimate& estimate, c10::Device device)
      : config_(config), estimate_(estimate), activations_(sum_of(estimate.activations(config))) {
    by_activations();
    by_sharding();
    if (device.is_cuda() && !config.training.enable_cpu_offload)
      add("training.enable_cpu_offload = true", 4 * estimate.shard_bytes());
  }

  const std::vector<NamedBytes>& list() const { return list_; }

 private:
  void add(const std::string& setting, double bytes) { list_.push_back({setting, bytes}); }

  JobConfig changed(const std::function<void(JobConfig&)>& change) const {
    JobConfig config = config_;
    change(config);
    return config;
  }

  void add_activations(const std::string& setting, const std::function<void(JobConfig&)>& change) {
    add(setting, activations_ - sum_of(estimate_.activations(changed(change))));
  }

  void by_activations() {
    if (config_.activation_checkpoint.mode != "full" && config_.activation_checkpoint.mode != "offload")
      add_activations("activation_checkpoint.mode = \"full\"",
                      [](JobConfig& job) { job.activation_checkpoint.mode = "full"; });
    if (config_.training.mixed_precision_param == "float32")
      add_activations("training.mixed_precision_param = \"bfloat16\"",
                      [](JobConfig& job) { job.training.mixed_precision_param = "bfloat16"; });
    const bool pipeline = config_.parallelism.pipeline_parallel_degree > 1;
    const int64_t rows = estimate_.run.micro_batch_rows();
    if (rows > 1)
      add(str(pipeline ? "parallelism.pipeline_parallel_microbatch_size = " : "training.local_batch_size = ",
              rows / 2),
          activations_ * (1 - static_cast<double>(rows / 2) / static_cast<double>(rows)));
    by_sequence();
  }

  // Not every sequence length and model can be split into twice as many equal parts.
  void by_sequence() {
    const int num_ranks = estimate_.run.meshes().world.size();
    const auto may_be = [&](int factor, const std::function<void(JobConfig&)>& change) {
      return passes_check(changed(change), factor * num_ranks) || !passes_check(config_, num_ranks);
    };
    const int64_t half = config_.training.seq_len / 2;
    if (may_be(1, [&](JobConfig& job) { job.training.seq_len = half; }))
      add(str("training.seq_len = ", half), activations_ / 2);
    for (const RowAxis& axis : row_axes(chosen_parallelisms(config_.parallelism))) {
      const int twice = 2 * axis.degree;
      if (may_be(2, [&](JobConfig& job) { job.parallelism.set_degree(axis.kind, twice); }))
        add(str("parallelism.", axis.degree_key, " = ", twice, ", on twice as many ranks"), activations_ / 2);
    }
  }

  void by_sharding() {
    add(str("parallelism.data_parallel_shard_degree = ", 2 * estimate_.dims.dp_shard,
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
    const JobConfig config = changed(change);
    const auto& world = estimate_.run.meshes().world;
    const Estimate other(config, world.size(), world.rank());
    add(setting, estimate_.gathered_bytes() + estimate_.unreduced_bytes() - other.gathered_bytes() -
                     other.unreduced_bytes());
  }

  const JobConfig& config_;
  const Estimate& estimate_;
  double activations_;
  std::vector<NamedBytes> list_;
};

}  // namespace

std::string list_of(const std::vector<NamedBytes>& list) {
  std::string text;
  for (size_t begin = 0; begin < list.size();) {
    size_t end = begin + 1;
    while (end < list.size() && gib(list[end].bytes) == gib(list[begin].bytes)) ++end;
    text += str(text.empty() ? "" : ", ", list[begin].name);
    if (end - begin > 1) text += " to " + list[end - 1].name;
    text += str(" ", gib(list[begin].bytes), end - begin > 1 ? " each" : "");
    begin = end;
  }
  return text;
}

std::string table_of(const MemoryReport& report) {
  const auto cell = [](const std::string& text) { return str(std::right, std::setw(10), text); };
  const auto line = [&](size_t width, const std::string& name, double bytes, const std::string& end) {
    return str("  ", std::left, std::setw(static_cast<int>(width)), name, cell(gib(bytes)), end, "\n");
  };
  size_t width = 0;
  for (const MemoryOwner& owner : report.owners) width = std::max(width, owner.name.size());
  for (const NamedBytes& live : report.live) width = std::max(width, live.name.size());
  const std::string unknown = cell("-") + "    ";
  const auto live_of = [&](const std::string& name) {
    const auto found = std::ranges::find(report.live, name, &NamedBytes::name);
    return found == report.live.end() ? unknown : cell(gib(found->bytes)) + " GiB";
  };
  const auto beside = [&](const std::string& live) { return " GiB" + (report.live.empty() ? "" : live); };
  std::string text;
  if (!report.live.empty())
    text += str("  ", std::string(width, ' '), cell("computed"), "    ", cell("in use"), "\n");
  for (const MemoryOwner& owner : report.owners)
    text += line(width, owner.name, owner.bytes, beside(live_of(owner.name)) + "  " + owner.details);
  for (const NamedBytes& live : report.live)
    if (std::ranges::find(report.owners, live.name, &MemoryOwner::name) == report.owners.end())
      text += str("  ", std::left, std::setw(static_cast<int>(width)), live.name, unknown, live_of(live.name),
                  "\n");
  text += line(width, "all", report.total_bytes(), beside(str(cell(gib(sum_of(report.live))), " GiB")));
  if (report.savings.empty()) return text;
  width = 0;
  for (const NamedBytes& saving : report.savings) width = std::max(width, saving.name.size());
  text += "Settings that would use less, each on its own:\n";
  for (const NamedBytes& saving : report.savings) text += line(width, saving.name, saving.bytes, " GiB less");
  return text;
}

double MemoryReport::total_bytes() const { return sum_of(owners); }

MemoryReport memory_report(const JobConfig& config, int world_size, int rank, c10::Device device) {
  const Estimate estimate(config, world_size, rank);
  return {largest_first(owners_of(config, estimate), 1),
          largest_first(Savings(config, estimate, device).list(), kSavingWorthShowing)};
}

namespace {

std::string in_use(c10::Device device) {
  auto* backend = dist::device_backend();
  if (device.is_cpu() || !backend)
    return str("Peak resident memory: ", gib(peak_resident_gib() * kGiB), " GiB of the machine's ",
               gib(machine_memory_gib() * kGiB), " GiB");
  const dist::DeviceMemory memory = backend->memory(device.index());
  return str("Peak since the last logged step: ", gib(static_cast<double>(memory.peak_allocated_bytes)),
             " GiB in tensors, ", gib(static_cast<double>(memory.peak_reserved_bytes)),
             " GiB taken from the driver, of the device's ", gib(static_cast<double>(memory.total_bytes)),
             " GiB. Page-locked memory of the host: ", gib(static_cast<double>(memory.page_locked_bytes)),
             " GiB");
}

}  // namespace

// A pipeline's errors have lost their type. Their last part is about the rank that failed first, not about
// this one.
bool is_out_of_memory(const std::exception& error) {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) || dynamic_cast<const std::bad_alloc*>(&error))
    return true;
  std::string text = error.what();
  text.resize(std::min(text.size(), text.find("first to fail")));
  for (char& letter : text) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  for (const char* words : {"out of memory", "can't allocate memory", "std::bad_alloc"})
    if (text.find(words) != std::string::npos) return true;
  return false;
}

MemoryWitness::MemoryWitness(c10::Device device) : device_(device) {
  if (!device.is_cuda()) return;
  dist::device_backend()->watch_out_of_memory([this](const dist::OutOfMemory& failure) {
    try {
      see(failure);
    } catch (const std::exception& error) {
      log::warning(str("cannot tell who uses the memory: ", error.what()));
    }
  });
}

MemoryWitness::~MemoryWitness() {
  if (device_.is_cuda()) dist::device_backend()->watch_out_of_memory({});
}

// A block with several tensors of one owner counts once. The rest is what the step computes with.
void MemoryWitness::see(const dist::OutOfMemory& failure) {
  const auto& blocks = failure.blocks;
  std::vector<bool> has_owner(blocks.size(), false);
  live_.clear();
  const auto count = [&](const char* name, const std::vector<at::Tensor>& tensors) {
    double bytes = 0;
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined() || !tensor.has_storage() || tensor.storage().nbytes() == 0) continue;
      const auto address = reinterpret_cast<uintptr_t>(tensor.storage().data());
      const auto after = std::ranges::upper_bound(blocks, address, {}, &dist::OutOfMemory::Block::begin);
      if (after == blocks.begin()) continue;
      const auto index = static_cast<size_t>(after - blocks.begin()) - 1;
      if (address >= blocks[index].begin + static_cast<uintptr_t>(blocks[index].bytes)) continue;
      if (!has_owner[index]) bytes += static_cast<double>(blocks[index].bytes);
      has_owner[index] = true;
    }
    if (bytes > 0) live_.push_back({name, bytes});
  };
  if (trainer_) {
    std::vector<at::Tensor> shards, gradients, gathered, buffers;
    TrainerParts& parts = trainer_->parts();
    for (const Parameter& parameter : parts.parameters) {
      shards.push_back(parameter.data.local);
      gradients.push_back(parameter.data.local.grad());
      gathered.push_back(parameter.compute);
    }
    for (const auto& model : parts.models)
      for (const auto& buffer : model->root().module().buffers()) buffers.push_back(buffer);
    count("parameters", shards);
    count("gradients", gradients);
    count("optimizer state", parts.optimizer.allocated_state());
    count("gathered parameters", gathered);
    count("buffers", buffers);
  }
  double rest = 0;
  for (size_t i = 0; i < blocks.size(); ++i)
    if (!has_owner[i]) rest += static_cast<double>(blocks[i].bytes);
  live_.push_back({"all other blocks", rest});
}

std::string explain_out_of_memory(const JobConfig& config, const dist::World& world,
                                  const MemoryWitness& witness) {
  try {
    MemoryReport report = memory_report(config, world.size(), world.rank(), world.device());
    report.live = witness.live();
    return str("out of memory on ", world.device().str(), ". ", in_use(world.device()), ". Memory of rank ",
               world.rank(), " at the peak of a step, computed from sizes",
               report.live.empty() ? "" : ", and the allocator's blocks when the request failed", ":\n",
               table_of(report));
  } catch (const std::exception& error) {
    log::warning(str("cannot report memory use: ", error.what()));
    return "";
  }
}

}  // namespace titan::train
