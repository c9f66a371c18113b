#include "train/whole_model_runner.h"

#include <ATen/ops/zeros.h>

#include "dist/trace_range.h"
#include "titan/core/error.h"
#include "titan/parallel/fsdp.h"

namespace titan::train {

at::Tensor WholeModelRunner::forward_backward(const std::vector<data::Batch>& batches,
                                              const ops::ValidTokens& global_valid_tokens) {
  check_valid_tokens(global_valid_tokens);
  TrainableModel& model = *models_[0].model;
  discard_gradients(model.root());  // left by a failed step
  at::Tensor total = at::zeros({}, at::TensorOptions(device_).dtype(at::kDouble));
  for (size_t i = 0; i < batches.size(); ++i) {
    at::Tensor loss;
    {
      const dist::TraceRange traced([&] { return str("forward ", i); });
      set_documents(batches[i]);
      loss = checked_loss(model, copies_.on_device(batches[i].input_BS),
                          copies_.on_device(batches[i].labels_BS), global_valid_tokens);
      total.add_(loss.detach());
    }
    const dist::TraceRange traced([&] { return str("backward ", i); });
    set_last_micro_batch(model.root(), i + 1 == batches.size());
    if (loss.requires_grad()) loss.backward();
  }
  return total;
}

at::Tensor WholeModelRunner::forward(const data::Batch& batch, const ops::ValidTokens& global_valid_tokens) {
  check_valid_tokens(global_valid_tokens);
  const dist::TraceRange traced([] { return "forward 0"; });
  set_documents(batch);
  const at::Tensor loss = checked_loss(*models_[0].model, copies_.on_device(batch.input_BS),
                                       copies_.on_device(batch.labels_BS), global_valid_tokens);
  return loss.detach().to(at::kDouble);
}

void WholeModelRunner::set_documents(const data::Batch& batch) {
  if (const ops::Documents documents = documents_of(batch, device_))
    models_[0].model->set_documents({copies_.on_device(documents.starts), documents.longest});
}

}  // namespace titan::train
