#include "train/recorded_step.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "parallel/fsdp/fsdp_state.h"
#include "titan/core/error.h"

namespace titan::train {

namespace {

template <class Record>
void try_to_record(const char* what, int64_t step, const Record& record) {
  try {
    record();
  } catch (const std::exception& error) {
    throw Error(
        str(what, " ", step, " can't be recorded as a CUDA graph (compile.enable): ", reason_of(error)));
  }
}

}  // namespace

void reshard(const std::vector<std::unique_ptr<TrainableModel>>& models) {
  for (const auto& model : models) fsdp::reshard_all(model->root().module());
}

RecordedStep::RecordedStep(at::Device device, const dist::Stream& copies,
                           const std::vector<std::unique_ptr<TrainableModel>>& models,
                           const std::vector<Parameter>& parameters)
    : device_(device),
      models_(models),
      parameters_(parameters),
      copies_(copies),
      inverse_tokens_(at::empty({}, at::dtype(at::kDouble).device(device))),
      graph_(device),
      update_(device) {}

void RecordedStep::record(int64_t step, const std::vector<data::Batch>& batches, const Work& work) {
  const at::NoGradGuard no_grad;
  const auto on_device = [&](const at::Tensor& tensor) { return at::empty_like(tensor, device_); };
  for (const data::Batch& batch : batches)
    batches_.push_back({on_device(batch.input_BS), on_device(batch.labels_BS), batch.valid_tokens});
  reshard(models_);
  // The graph has to compute casts and scales of the weights again, although those of these weights exist.
  for (const Parameter& parameter : parameters_) parameter.data.local.unsafeGetTensorImpl()->bump_version();
  try_to_record("step", step, [&] {
    graph_.record([&] {
      const at::AutoGradMode with_gradients(true);
      work(batches_, ops::ValidTokens::on_device(inverse_tokens_));
    });
  });
  for (const Parameter& parameter : parameters_)
    if (parameter.data.local.grad().defined())
      gradients_.emplace_back(parameter.data.local, parameter.data.local.grad());
}

bool RecordedStep::fits(const std::vector<data::Batch>& batches) const {
  return std::ranges::equal(batches_, batches, [](const data::Batch& a, const data::Batch& b) {
    return a.input_BS.sizes() == b.input_BS.sizes() && a.labels_BS.sizes() == b.labels_BS.sizes();
  });
}

void RecordedStep::launch(const std::vector<data::Batch>& batches, int64_t global_valid_tokens) {
  const at::NoGradGuard no_grad;
  reshard(models_);
  const dist::Stream current = dist::Stream::current(device_);
  copies_.wait(current);  // the launch before reads the same tensors
  {
    const dist::StreamGuard on_copies(copies_);
    for (size_t i = 0; i < batches.size(); ++i) {
      batches_[i].input_BS.copy_(batches[i].input_BS, /*non_blocking=*/true);
      batches_[i].labels_BS.copy_(batches[i].labels_BS, /*non_blocking=*/true);
    }
  }
  current.wait(copies_);
  inverse_tokens_.fill_(1.0 / static_cast<double>(global_valid_tokens));
  graph_.launch();
  for (auto& [parameter, gradient] : gradients_) parameter.mutable_grad() = gradient;
}

void RecordedStep::update_weights(int64_t step, optim::Optimizer& optimizer, const at::Tensor& skip,
                                  const at::Tensor& factor) {
  optimizer.write_lrs();
  if (!std::exchange(has_update_, true))
    try_to_record("the optimizer's part of step", step,
                  [&] { update_.record([&] { optimizer.record_step_unless(skip, factor); }); });
  update_.launch();
  // Sharding and caches of casts have to notice.
  for (const auto& [parameter, gradient] : gradients_) parameter.unsafeGetTensorImpl()->bump_version();
}

}  // namespace titan::train
