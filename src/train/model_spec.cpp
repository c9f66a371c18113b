#include "titan/train/model_spec.h"

#include "titan/nn/containers.h"

namespace titan::train {

at::Tensor TrainableModel::hidden(const at::Tensor& /*input*/) {
  TITAN_CHECK(false,
              "this model can't be a pipeline stage: it doesn't say what a stage passes to the next "
              "(TrainableModel::hidden)");
}

void keep_stage_modules(TrainableModel& model, const std::vector<std::string>& names) {
  nn::LayerSequence* sequence = nn::layer_sequence(model.root());
  if (!sequence)
    throw ConfigError(
        "this model can't be cut into pipeline stages: its root module doesn't name the modules that it "
        "calls in a row (nn::LayerSequence)");
  sequence->keep_layers(names);
}

Registry<std::shared_ptr<const ModelSpec>>& model_specs() {
  static Registry<std::shared_ptr<const ModelSpec>> registry("model");
  return registry;
}

Registry<ParallelPlanFunction>& parallel_plans() {
  static Registry<ParallelPlanFunction> registry("parallelism plan");
  return registry;
}

void apply_parallel_plan(const ModelSpec& spec, const std::string& name, TrainableModel& model,
                         const ParallelPlan& plan) {
  nn::name_modules(model.root().module());  // plans and policies name modules
  if (name.empty()) return spec.parallelize(model, plan);
  parallel_plans().get(name)(model, plan);
}

HfModel hf_model_of_folder(const ModelSpec& spec, const std::filesystem::path& folder) {
  const HfConfig config = read_hf_config(folder);
  try {
    const auto args = spec.args_of_hugging_face(config);
    return spec.hugging_face(args.get()).value();
  } catch (const ConfigError& error) {
    std::vector<std::string> problems;
    for (const std::string& problem : error.problems())
      problems.push_back(str((folder / "config.json").string(), ": ", problem));
    throw ConfigError(std::move(problems));
  }
}

void apply_activation_checkpoint(const std::vector<nn::AnyRef>& layers,
                                 const ActivationCheckpoint& checkpoint, int64_t first_number) {
  if (checkpoint.policy) checkpoint_activations(layers, *checkpoint.policy, checkpoint.options, first_number);
}

}  // namespace titan::train
