// The costs of the modules in a model's sequence. Each module is built and run on its own.

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>

#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <c10/util/accumulate.h>
#include <torch/nn/module.h>

#include "core/units.h"
#include "dist/stream.h"
#include "job/pipeline_stages.h"
#include "parallel/activation_checkpoint/budget.h"
#include "titan/core/error.h"
#include "titan/nn/containers.h"
#include "titan/nn/layers.h"
#include "titan/parallel/parameters.h"

namespace titan::train {

namespace {

using pipeline::ModuleCost;

// One module of a sequence, as a pipeline stage of its own.
struct Probe {
  std::unique_ptr<TrainableModel> stage;
  bool is_last = false;
  at::Tensor input = {}, labels = {};

  // The last module returns the loss.
  at::Tensor forward() const {
    return is_last ? stage->loss(input, labels, labels.numel()) : stage->hidden(input);
  }
};

// The cost of a module, and the type of its output.
struct Finding {
  ModuleCost cost;
  TensorType output;
};

// Sizes that determine the work per token.
struct Work {
  double product_elements = 0;    // elements of parameters in matrix products
  double embedding_elements = 0;  // elements of parameters in lookups
  double attention_width = 0;     // heads x head size, summed over the module's attentions
};

Work work_of(const torch::nn::Module& module) {
  Work work;
  const auto add = [&](const torch::nn::Module& each) {
    const bool looks_up = dynamic_cast<const nn::EmbeddingImpl*>(&each) != nullptr;
    for (const at::Tensor& parameter : each.parameters(/*recurse=*/false))
      if (parameter.dim() >= 2)
        (looks_up ? work.embedding_elements : work.product_elements) +=
            static_cast<double>(parameter.numel());
    if (const auto* attention = dynamic_cast<const nn::AttentionImpl*>(&each))
      work.attention_width += static_cast<double>(attention->wq->weight.size(0));
  };
  add(module);
  for (const auto& each : module.modules(/*include_self=*/false)) add(*each);
  return work;
}

double num_elements(const TensorType& type) {
  return static_cast<double>(c10::multiply_integers(type.sizes));
}

// The share of layer `number`'s forward that activation checkpointing recomputes.
double recomputed_share(const ActivationCheckpointSettings& settings, int64_t number) {
  if (settings.mode == "full") return 1;
  if (settings.mode != "selective") return 0;
  if (settings.selective_ac_option == "op") return 0.5;
  return (number + 1) % std::stoll(settings.selective_ac_option) == 0 ? 1 : 0;
}

// Walks a model's sequence module by module.
class Walk {
 public:
  using Measure = std::function<Finding(const Probe&)>;

  Walk(const JobConfig& config, at::Device device, const ParallelDims& dims)
      : config_(config), device_(device), dims_(dims) {}

  std::vector<ModuleCost> run(const Measure& measure) {
    const auto whole = config_.spec().build(config_.args(), options(at::kMeta));
    const nn::LayerSequence* sequence = nn::layer_sequence(whole->root());
    TITAN_CHECK(sequence, "the model ", config_.model.name, " does not name its layers (nn::LayerSequence)");
    const auto names = sequence->layer_names();
    const std::vector<std::string> all = names.all();
    TensorType input{{config_.parallelism.pipeline_parallel_microbatch_size, config_.training.seq_len},
                     at::kLong};
    std::vector<ModuleCost> costs;
    for (const std::string& name : all) {
      const bool is_last = name == all.back();
      const Finding& found = find(whole->root().module(), name, input, is_last, measure);
      const auto layer = std::find(names.layers.begin(), names.layers.end(), name);
      costs.push_back(layer == names.layers.end()
                          ? found.cost
                          : checkpointed(found.cost, input, layer - names.layers.begin()));
      input = found.output;
    }
    return costs;
  }

  at::Device device() const { return device_; }
  at::ScalarType compute_dtype() const { return scalar_type(config_.training.mixed_precision_param); }

  double fixed_bytes(const torch::nn::Module& module) const {
    double elements = 0;
    for (const at::Tensor& parameter : module.parameters())
      elements += static_cast<double>(parameter.numel());
    elements /= dims_.tp;
    const auto trained = static_cast<double>(c10::elementSize(scalar_type(config_.training.dtype)));
    return elements * (4 * trained / (dims_.dp_shard * dims_.row_degree()) +
                       static_cast<double>(c10::elementSize(compute_dtype())));
  }
  // One rank's share of a micro-batch's activations.
  double rank_share() const { return 1.0 / (dims_.tp * dims_.row_degree()); }

 private:
  BuildOptions options(at::Device device) const {
    return {.construct = deferred(device, compute_dtype()), .seq_len = config_.training.seq_len};
  }

  // Modules with equal parameters and equal inputs cost the same.
  const Finding& find(torch::nn::Module& whole, const std::string& name, const TensorType& input,
                      bool is_last, const Measure& measure) {
    std::string key = titan::str(is_last ? "last" : "", at::IntArrayRef(input.sizes), input.dtype);
    const auto module = whole.named_modules(/*name_prefix=*/"", /*include_self=*/false)[name];
    key += module->name();
    for (const auto& parameter : module->named_parameters())
      key += titan::str(" ", parameter.key(), parameter.value().sizes());
    const auto known = findings_.find(key);
    if (known != findings_.end()) return known->second;
    return findings_.emplace(key, measure(make_probe(name, input, is_last))).first->second;
  }

  Probe make_probe(const std::string& name, const TensorType& input, bool is_last) const {
    BuildOptions stage = options(device_);
    stage.stage_modules = {name};
    Probe probe{.stage = config_.spec().build(config_.args(), stage), .is_last = is_last};
    materialize(probe.stage->root(), config_.debug.seed_or_default());
    const auto on_device = at::TensorOptions(device_);
    const int64_t vocab_size = std::max<int64_t>(1, config_.spec().sizes(config_.args()).vocab_size);
    const std::vector<int64_t> tokens = {config_.parallelism.pipeline_parallel_microbatch_size,
                                         config_.training.seq_len};
    probe.input = input.dtype == at::kLong
                      ? at::randint(vocab_size, input.sizes, on_device.dtype(at::kLong))
                      : at::randn(input.sizes, on_device.dtype(input.dtype)).requires_grad_();
    probe.labels = at::randint(vocab_size, tokens, on_device.dtype(at::kLong));
    return probe;
  }

  ModuleCost checkpointed(ModuleCost cost, const TensorType& input, int64_t number) const {
    const double share = recomputed_share(config_.activation_checkpoint, number);
    cost.backward_s += share * cost.forward_s;
    if (share < 1) return cost;
    cost.activation_bytes =
        rank_share() * static_cast<double>(c10::elementSize(input.dtype)) * num_elements(input);
    return cost;
  }

  const JobConfig& config_;
  at::Device device_;
  ParallelDims dims_;
  std::map<std::string, Finding> findings_;
};

// Runs a forward for the sizes of its output and of the tensors that its graph saves.
Finding sizes_of(const Walk& walk, const Probe& probe) {
  const torch::nn::Module& module = probe.stage->root().module();
  activations::SavedBytes saved(module);
  const activations::HooksScope counting(&saved);
  const at::Tensor output = probe.forward();
  Finding found;
  found.output = {output.sizes().vec(), output.scalar_type()};
  found.cost.fixed_bytes = walk.fixed_bytes(module);
  found.cost.activation_bytes = walk.rank_share() * static_cast<double>(saved.total());
  return found;
}

Finding compute(const Walk& walk, const Probe& probe, const DeviceSpeed& speed) {
  Finding found = sizes_of(walk, probe);
  const torch::nn::Module& module = probe.stage->root().module();
  const Work work = work_of(module);
  const auto tokens = static_cast<double>(probe.labels.numel());
  const auto length = static_cast<double>(probe.labels.size(1));
  const auto element = static_cast<double>(c10::elementSize(walk.compute_dtype()));
  // On average a query sees half of the keys, in two products.
  const double flops = tokens * (2 * work.product_elements + 2 * length * work.attention_width);
  const double weights = work.product_elements * element;
  const double passing = static_cast<double>(probe.input.nbytes()) + element * num_elements(found.output) +
                         found.cost.activation_bytes / walk.rank_share();
  found.cost.forward_s = flops / speed.flops + (weights + passing) / speed.bytes;
  found.cost.backward_s =
      2 * flops / speed.flops + (2 * weights + 2 * passing + work.embedding_elements * element) / speed.bytes;
  return found;
}

double seconds_of(at::Device device, const std::function<void()>& call) {
  dist::Stream::current(device).synchronize();
  const auto start = std::chrono::steady_clock::now();
  call();
  dist::Stream::current(device).synchronize();
  return seconds_since(start);
}

Finding measure(const Walk& walk, const Probe& probe, int repeats) {
  Finding found = sizes_of(walk, probe);
  double forward = std::numeric_limits<double>::infinity(), backward = forward;
  for (int i = 0; i <= repeats; ++i) {
    at::Tensor output;
    const double there = seconds_of(walk.device(), [&] { output = probe.forward(); });
    const at::Tensor gradient = at::ones_like(output);
    const double back = seconds_of(walk.device(), [&] { output.backward(gradient); });
    if (i == 0) continue;  // the first run fills caches and allocators
    forward = std::min(forward, there);
    backward = std::min(backward, back);
  }
  found.cost.forward_s = forward;
  found.cost.backward_s = backward;
  return found;
}

}  // namespace

std::vector<ModuleCost> computed_costs(const JobConfig& config, const ParallelDims& dims,
                                       const DeviceSpeed& speed) {
  Walk walk(config, at::kMeta, dims);
  return walk.run([&](const Probe& probe) { return compute(walk, probe, speed); });
}

std::vector<ModuleCost> measured_costs(const JobConfig& config, at::Device device, const ParallelDims& dims,
                                       int repeats) {
  TITAN_CHECK(repeats >= 1, "measured_costs: ", repeats, " repeats");
  Walk walk(config, device, dims);
  return walk.run([&](const Probe& probe) { return measure(walk, probe, repeats); });
}

}  // namespace titan::train
