// Your own optimizer: Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023). Its state is
// one tensor per parameter, which is saved, loaded and resharded with the rest of the run.
//
//   titan train config.toml --experimental.custom_import ./liblion.so --optimizer.name lion
//     --optimizer.lr 1e-4

#include <ATen/ATen.h>

#include "titan/optim/optimizer.h"

namespace {

// [optimizer.args]
struct LionArgs {
  double beta1 = 0.9;  ///< weight of the average in the direction
  double beta2 = 0.99;
  double weight_decay = 0.1;
};

void describe(titan::config::Table<LionArgs>& table) {
  table.field("beta1", &LionArgs::beta1, "weight of the average in the direction",
              titan::config::in_range_below(0, 1));
  table.field("beta2", &LionArgs::beta2, "decay of the gradient's average",
              titan::config::in_range_below(0, 1));
  table.field("weight_decay", &LionArgs::weight_decay, "subtracted from the parameter, as in AdamW",
              titan::config::finite_at_least(0));
}

// Each element moves by the learning rate, against the sign of its averaged gradient.
void lion_step(const LionArgs& args, const titan::optim::Update& update) {
  for (size_t i = 0; i < update.params.size(); ++i) {
    at::Tensor param = update.params[i], exp_avg = update.state[0][i];
    const at::Tensor& grad = update.grads[i];
    const at::Tensor direction = at::lerp(exp_avg, grad, 1 - args.beta1).sign_();
    param.mul_(1 - update.lr * args.weight_decay).sub_(direction, update.lr);
    exp_avg.lerp_(grad, 1 - args.beta2);
  }
}

}  // namespace

extern "C" void titan_register() {
  titan::optim::optimizers().add(
      "lion", titan::optim::OptimizerRule<LionArgs>{.state = {"exp_avg"}, .step = lion_step});
}
