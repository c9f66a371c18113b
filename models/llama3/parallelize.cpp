#include "titan/core/error.h"
#include "titan/models/llama3.h"
#include "titan/train/parallel_dims.h"

namespace titan::models {

TensorPlan llama3_tp_plan(const TensorParallelOptions& options) {
  using Layout = ActivationLayout;
  TITAN_CHECK(!options.overlap || options.sequence_parallel,
              "llama3: asynchronous tensor parallelism needs sequence parallelism: products overlap the "
              "exchange of sequence parts");
  // The layout of activations between products: parts of the sequence, or whole.
  const Layout stream = options.sequence_parallel ? Layout::shard(1) : Layout::invariant();
  const Layout logits = options.loss_parallel ? Layout::shard(-1) : Layout::invariant();
  // One all-gather serves wq, wk and wv, and one w1 and w3.
  const PrepareInput gathered{stream, Layout::replicate()};
  const Colwise columns{.input = options.overlap ? stream : Layout::replicate(), .overlap = options.overlap};
  const Rowwise rows{.output = stream, .overlap = options.overlap};
  TensorPlan plan = {
      {"tok_embeddings", Rowwise{.output = stream}},
      {"layers.*.attention.wq", columns},
      {"layers.*.attention.wk", columns},
      {"layers.*.attention.wv", columns},
      {"layers.*.attention.wo", rows},
      {"layers.*.feed_forward.w1", columns},
      {"layers.*.feed_forward.w3", columns},
      {"layers.*.feed_forward.w2", rows},
      {"output", Colwise{.input = stream, .output = logits}},
  };
  if (!options.overlap)
    for (const char* user : {"layers.*.attention", "layers.*.feed_forward"}) plan.push_back({user, gathered});
  if (options.sequence_parallel)
    for (const char* norm : {"layers.*.attention_norm", "layers.*.ffn_norm", "norm"})
      plan.push_back({norm, SequenceParallel{}});
  return plan;
}

namespace {

// Norm and head run one after the other, so they form one group; a stage may have only one of them.
void shard_tail(const Llama3& model, const FsdpOptions& options) {
  if (model->norm && model->output) {
    fully_shard({model->norm, model->output}, options);
  } else if (model->norm) {
    fully_shard(model->norm, options);
  } else if (model->output) {
    fully_shard(model->output, options);
  }
}

}  // namespace

// The model may be a pipeline stage, which has some of the modules.
void parallelize_llama3(const Llama3& model, const train::ParallelPlan& plan) {
  parallelize(model, plan.meshes.tp, llama3_tp_plan(plan.tensor), plan.tensor.transport);
  apply_parallelisms(model, plan.parallelisms, plan.meshes.world);
  apply_activation_checkpoint({model->layers.begin(), model->layers.end()}, plan.activations,
                              model->layers.first_number());

  const FsdpOptions& blocks = plan.fsdp;

  // The head's backward comes right after its forward, so freeing its parameters in between would gather them
  // twice in a row.
  FsdpOptions tail = plan.fsdp;
  if (tail.reshard_after_forward.kind == ReshardAfterForward::Kind::Default)
    tail.reshard_after_forward = ReshardAfterForward::never();

  // A tied matrix is used at both ends, so its group spans the model, and its gradient is summed before the
  // single reduction. If the ends are in two stages, each stage has its own matrix.
  const bool tied = model->args().tie_embeddings && model->is_whole();
  if (!tied && model->tok_embeddings) fully_shard(model->tok_embeddings, blocks);
  for (const TransformerBlock& layer : model->layers) fully_shard(layer, blocks);
  if (tied) {
    fully_shard({model->tok_embeddings, model->norm, model->output}, tail);
  } else {
    shard_tail(model, tail);
  }
  fully_shard(model, plan.fsdp);
}

}  // namespace titan::models
