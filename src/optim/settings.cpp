#include "titan/optim/optimizer.h"

namespace titan::optim {

void describe(config::Table<OptimizerSettings>& table) {
  table.field("name", &OptimizerSettings::name,
              "Adam adds the weight decay to the gradient, AdamW to the update",
              config::one_of({"Adam", "AdamW"}));
  table.field("lr", &OptimizerSettings::lr, "peak learning rate", config::finite_at_least(0));
  table.field("beta1", &OptimizerSettings::beta1, "decay of the gradient's average",
              config::in_range_below(0, 1));
  table.field("beta2", &OptimizerSettings::beta2, "decay of the squared gradient's average",
              config::in_range_below(0, 1));
  table.field("eps", &OptimizerSettings::eps, "added to the denominator", config::finite_at_least(0));
  table.field("weight_decay", &OptimizerSettings::weight_decay,
              "of every parameter that no group says otherwise for", config::finite_at_least(0));
  table.field("implementation", &OptimizerSettings::implementation,
              "fused is one pass over memory, foreach one call per operation, for-loop the plain formula",
              config::one_of({"for-loop", "foreach", "fused"}));
  table.field("param_groups", &OptimizerSettings::param_groups,
              "settings for parameters by name: \"regex: key=value, ...\" with keys lr, beta1, beta2, eps, "
              "weight_decay; the first match counts, and every regex must match a parameter");
  table.refused("early_step_in_backward", false,
                "an optimizer inside the backward makes clipping meaningless");
}

void describe(config::Table<LrSchedulerSettings>& table) {
  table.field("warmup_steps", &LrSchedulerSettings::warmup_steps, "steps of linear warmup",
              config::at_least(0));
  table.field("total_steps", &LrSchedulerSettings::total_steps,
              "length of the schedule; unset: training.steps", config::at_least(1));
  table.field("decay_ratio", &LrSchedulerSettings::decay_ratio,
              "part of the schedule that decays; unset: everything after the warmup", config::in_range(0, 1));
  table.field("decay_type", &LrSchedulerSettings::decay_type, "shape of the decay",
              config::one_of({"linear", "sqrt", "cosine"}));
  table.field("min_lr_factor", &LrSchedulerSettings::min_lr_factor,
              "floor of the decay as a part of the peak", config::in_range(0, 1));
}

}  // namespace titan::optim
