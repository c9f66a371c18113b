#include "titan/models/llama3_spec.h"

namespace titan::models {

void parallelize_llama3(const Llama3& model, const train::ParallelPlan& plan) {
  const FsdpOptions& blocks = plan.fsdp;

  // The head's backward comes right after its forward: freeing it in between would gather it twice at once.
  FsdpOptions tail = plan.fsdp;
  if (tail.reshard_after_forward.kind == ReshardAfterForward::Kind::Default)
    tail.reshard_after_forward = ReshardAfterForward::never();

  // A tied matrix is used at both ends, so its group spans the model; its gradient is summed before the one
  // reduction.
  const bool tied = model->args().tie_embeddings;
  if (!tied) fully_shard(model->tok_embeddings, blocks);
  for (const TransformerBlock& layer : model->layers) fully_shard(layer, blocks);
  if (tied) {
    fully_shard({model->tok_embeddings, model->norm, model->output}, tail);
  } else {
    fully_shard({model->norm, model->output}, tail);
  }
  fully_shard(model, plan.fsdp);
}

}  // namespace titan::models
