#include "train/policies/late_values.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

namespace titan::train {

LateValues::LateValues(int64_t step, const at::Tensor& loss, const at::Tensor& flag,
                       optim::LaunchedGradNorm norm)
    : step_(step), norm_(std::move(norm)) {
  const at::Tensor values = at::cat({loss.detach().to(at::kDouble).view({1}), flag.view({1}), norm_.squares});
  const bool on_device = !values.is_cpu();
  host_ = at::empty(values.sizes(), values.options().device(at::kCPU).pinned_memory(on_device));
  host_.copy_(values, /*non_blocking=*/on_device);
  copied_ = dist::Stream::current(values.device()).record();
}

StepValues LateValues::read() {
  copied_.synchronize();
  const double* values = host_.const_data_ptr<double>();
  return {.step = step_, .local_loss = values[0], .loss_rank = -1, .grad_norm = norm_.read(values + 2)};
}

double LateValues::loss_flag() const { return host_.const_data_ptr<double>()[1]; }

}  // namespace titan::train
