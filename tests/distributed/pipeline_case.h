#pragma once

// A small Llama cut into the stages of a schedule.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "distributed/outcome.h"
#include "parallel/pipeline/split.h"
#include "titan/core/error.h"
#include "titan/parallel/pipeline_schedule.h"
#include "train/pipeline/pipeline_runner.h"

namespace titan::testing {

struct Checkpointing {
  const char* name;
  std::optional<LayersPolicy> policy;
};
inline const Checkpointing kCheckpointing[] = {
    {"none", {}}, {"full", FullRecompute{}}, {"op", SelectiveOp{}}};

struct TensorForm {
  const char* name;
  TensorParallelOptions options;
};
inline const TensorForm kTensorForms[] = {{"", {}},
                                          {" without sequence parallel", {.sequence_parallel = false}},
                                          {" without loss parallel", {.loss_parallel = false}},
                                          {" overlapped", {.overlap = true}}};

struct Variant {
  train::ParallelDims dims;
  std::string schedule;
  int stages = 1;  // total number on all ranks
  int micro_batches = 1;
  int repeats = 1;           // repetitions of the schedule, for accumulation
  size_t checkpointing = 0;  // index into kCheckpointing
  size_t tensor = 0;         // index into kTensorForms

  int num_micro_batches() const { return micro_batches * repeats; }
  const TensorParallelOptions& tensor_options() const { return kTensorForms[tensor].options; }
};

inline std::string name_of(const Variant& variant) {
  const train::ParallelDims& dims = variant.dims;
  return str(variant.schedule, " pp ", dims.pp, " stages ", variant.stages, " micro-batches ",
             variant.repeats, " x ", variant.micro_batches, " dp_replicate ", dims.dp_replicate, " dp_shard ",
             dims.dp_shard, " cp ", dims.row_degree(), " tp ", dims.tp, kTensorForms[variant.tensor].name,
             " checkpointing ", kCheckpointing[variant.checkpointing].name);
}

inline pipeline::ModuleSequence sequence_of(const LlamaCase& llama) {
  pipeline::ModuleSequence sequence{{"tok_embeddings"}, {}, {"norm", "output"}};
  for (int64_t layer = 0; layer < std::get<int64_t>(llama.args.at("n_layers")); ++layer)
    sequence.layers.push_back(str("layers.", layer));
  return sequence;
}

struct StageOptions {
  pipeline::EndWeights ends = {};
  TensorParallelOptions tensor = {};
  bool register_buffers = false;
  std::function<void(torch::nn::Module&)> convert = {};  ///< applied to each stage before it is parallelized
};

// The stages of this rank.
class Stages {
 public:
  Stages(const LlamaCase& llama, const Precision& precision, const Variant& variant,
         const train::Meshes& meshes, const StageOptions& options = {})
      : schedule_(schedule_of(variant)) {
    const auto modules = pipeline::split_evenly(sequence_of(llama), variant.stages, options.ends);
    for (int stage = 0; stage < variant.stages; ++stage) {
      if (schedule_.rank_of_stage[static_cast<size_t>(stage)] != meshes.pp.rank()) continue;
      auto model = build_llama(llama, precision.dtype, modules[static_cast<size_t>(stage)]);
      if (options.convert) options.convert(model->root().module());
      FsdpOptions fsdp = fsdp_options(precision);
      fsdp.mesh = meshes.fsdp;
      fsdp.register_buffers = options.register_buffers;
      train::apply_parallel_plan(llama_spec(), "", *model,
                                 {.meshes = meshes,
                                  .fsdp = fsdp,
                                  .tensor = options.tensor,
                                  .activations = {kCheckpointing[variant.checkpointing].policy, {}}});
      materialize(model->root(), kSeed);
      for (const Parameter& parameter : titan::parameters(model->root())) parameters_.push_back(parameter);
      stages_.push_back({model.get(), stage});
      models_.push_back(std::move(model));
    }
  }

  const pipeline::Schedule& schedule() const { return schedule_; }
  const std::vector<train::Stage>& stages() const { return stages_; }
  std::vector<torch::nn::Module*> roots() const {
    std::vector<torch::nn::Module*> roots;
    for (const auto& model : models_) roots.push_back(&model->root().module());
    return roots;
  }
  std::vector<Parameter>& parameters() { return parameters_; }

 private:
  static pipeline::Schedule schedule_of(const Variant& variant) {
    const auto schedule = pipeline::repeat(
        pipeline::make_schedule(variant.schedule, variant.dims.pp, variant.stages, variant.micro_batches),
        variant.repeats);
    return pipeline::with_parameter_actions(pipeline::with_communication(schedule));
  }

  pipeline::Schedule schedule_;
  std::vector<std::unique_ptr<train::TrainableModel>> models_;
  std::vector<train::Stage> stages_;
  std::vector<Parameter> parameters_;
};

inline std::vector<data::Batch> micro_batches_of(const Batch& batch, int count) {
  std::vector<data::Batch> result;
  for (int m = 0; m < count; ++m) {
    const Batch part = batch.rows(m, count);
    result.push_back({part.tokens, part.labels, part.num_valid(), part.document_end});
  }
  return result;
}

inline std::vector<train::TensorType> boundaries_of(const LlamaCase& llama, const Precision& precision,
                                                    const Variant& variant, int64_t rows) {
  const int64_t cuts = variant.tensor_options().sequence_parallel ? variant.dims.tp : 1;
  const int64_t positions = llama.seq_len / variant.dims.row_degree() / cuts;
  const train::TensorType hidden{{rows, positions, std::get<int64_t>(llama.args.at("dim"))},
                                 precision.compute};
  return std::vector<train::TensorType>(static_cast<size_t>(variant.stages), hidden);
}

}  // namespace titan::testing
