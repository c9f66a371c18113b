// The costs of the modules in a model's sequence. Each module is built and run on its own.

#include <algorithm>
#include <map>

#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <c10/util/accumulate.h>
#include <torch/nn/module.h>

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
  Walk(const JobConfig& config, const ParallelDims& dims, const DeviceSpeed& speed)
      : config_(config), dims_(dims), speed_(speed) {}

  std::vector<ModuleCost> run() {
    const auto whole = config_.spec().build(config_.args(), options());
    const nn::LayerSequence* sequence = nn::layer_sequence(whole->root());
    TITAN_CHECK(sequence, "the model ", config_.model.name, " does not name its layers (nn::LayerSequence)");
    const auto names = sequence->layer_names();
    const std::vector<std::string> all = names.all();
    TensorType input{{config_.parallelism.pipeline_parallel_microbatch_size, config_.training.seq_len},
                     at::kLong};
    std::vector<ModuleCost> costs;
    for (const std::string& name : all) {
      const bool is_last = name == all.back();
      const Finding& found = find(whole->root().module(), name, input, is_last);
      const auto layer = std::find(names.layers.begin(), names.layers.end(), name);
      costs.push_back(layer == names.layers.end()
                          ? found.cost
                          : checkpointed(found.cost, input, layer - names.layers.begin()));
      input = found.output;
    }
    return costs;
  }

 private:
  at::ScalarType compute_dtype() const { return scalar_type(config_.training.mixed_precision_param); }

  double fixed_bytes(const torch::nn::Module& module) const {
    double elements = 0;
    for (const at::Tensor& parameter : module.parameters())
      elements += static_cast<double>(parameter.numel());
    elements /= dims_.tp;
    const auto trained = static_cast<double>(c10::elementSize(scalar_type(config_.training.dtype)));
    const auto& state_dtype = config_.optimizer.state_dtype;
    const auto state =
        state_dtype ? static_cast<double>(c10::elementSize(scalar_type(*state_dtype))) : trained;
    return elements * (2 * (trained + state) / (dims_.dp_shard * dims_.row_degree()) +
                       static_cast<double>(c10::elementSize(compute_dtype())));
  }
  // One rank's share of a micro-batch's activations.
  double rank_share() const { return 1.0 / (dims_.tp * dims_.row_degree()); }

  BuildOptions options() const {
    return {.construct = deferred(at::kMeta, compute_dtype()), .seq_len = config_.training.seq_len};
  }

  // Modules with equal parameters and equal inputs cost the same.
  const Finding& find(torch::nn::Module& whole, const std::string& name, const TensorType& input,
                      bool is_last) {
    std::string key = titan::str(is_last ? "last" : "", at::IntArrayRef(input.sizes), input.dtype);
    const auto module = whole.named_modules(/*name_prefix=*/"", /*include_self=*/false)[name];
    key += module->name();
    for (const auto& parameter : module->named_parameters())
      key += titan::str(" ", parameter.key(), parameter.value().sizes());
    const auto known = findings_.find(key);
    if (known != findings_.end()) return known->second;
    return findings_.emplace(key, compute(make_probe(name, input, is_last))).first->second;
  }

  Probe make_probe(const std::string& name, const TensorType& input, bool is_last) const {
    BuildOptions stage = options();
    stage.stage_modules = {name};
    Probe probe{.stage = config_.spec().build(config_.args(), stage), .is_last = is_last};
    materialize(probe.stage->root(), config_.debug.seed_or_default());
    const auto meta = at::TensorOptions(at::kMeta);
    const int64_t vocab_size = std::max<int64_t>(1, config_.spec().sizes(config_.args()).vocab_size);
    const std::vector<int64_t> tokens = {config_.parallelism.pipeline_parallel_microbatch_size,
                                         config_.training.seq_len};
    probe.input = input.dtype == at::kLong ? at::randint(vocab_size, input.sizes, meta.dtype(at::kLong))
                                           : at::randn(input.sizes, meta.dtype(input.dtype)).requires_grad_();
    probe.labels = at::randint(vocab_size, tokens, meta.dtype(at::kLong));
    return probe;
  }

  // Runs a forward for the sizes of its output and of the tensors that its graph saves.
  Finding compute(const Probe& probe) const {
    const torch::nn::Module& module = probe.stage->root().module();
    activations::SavedBytes saved(module);
    const activations::HooksScope counting(&saved);
    const at::Tensor output = probe.forward();
    const auto saved_bytes = static_cast<double>(saved.total());
    const Work work = work_of(module);
    const auto tokens = static_cast<double>(probe.labels.numel());
    const auto length = static_cast<double>(probe.labels.size(1));
    const auto element = static_cast<double>(c10::elementSize(compute_dtype()));
    // On average a query sees half of the keys, in two products.
    const double flops = tokens * (2 * work.product_elements + 2 * length * work.attention_width);
    const double weights = work.product_elements * element;
    const double passing = static_cast<double>(probe.input.nbytes()) +
                           element * static_cast<double>(output.numel()) + saved_bytes;
    Finding found;
    found.output = {output.sizes().vec(), output.scalar_type()};
    found.cost.fixed_bytes = fixed_bytes(module);
    found.cost.activation_bytes = rank_share() * saved_bytes;
    found.cost.forward_s = flops / speed_.flops + (weights + passing) / speed_.bytes;
    found.cost.backward_s = 2 * flops / speed_.flops +
                            (2 * weights + 2 * passing + work.embedding_elements * element) / speed_.bytes;
    return found;
  }

  ModuleCost checkpointed(ModuleCost cost, const TensorType& input, int64_t number) const {
    const double share = recomputed_share(config_.activation_checkpoint, number);
    cost.backward_s += share * cost.forward_s;
    if (share < 1) return cost;
    cost.activation_bytes = rank_share() * static_cast<double>(c10::elementSize(input.dtype)) *
                            static_cast<double>(c10::multiply_integers(input.sizes));
    return cost;
  }

  const JobConfig& config_;
  ParallelDims dims_;
  DeviceSpeed speed_;
  std::map<std::string, Finding> findings_;
};

}  // namespace

std::vector<ModuleCost> computed_costs(const JobConfig& config, const ParallelDims& dims,
                                       const DeviceSpeed& speed) {
  return Walk(config, dims, speed).run();
}

}  // namespace titan::train
