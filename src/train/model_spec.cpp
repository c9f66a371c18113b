#include "titan/train/model_spec.h"

#include "titan/nn/hooks.h"

namespace titan::train {

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

}  // namespace titan::train
