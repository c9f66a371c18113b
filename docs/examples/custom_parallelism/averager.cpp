// A language model without attention, and a plan that spreads it over tensor-parallel ranks and over ranks
// that each have a slice of every sequence (slices.cpp). docs/adding_a_parallelism.md walks through it.
//
// A block averages the positions so far: y_t = x_t + out(mean(gelu(value(norm(x_1))), ...,
// gelu(value(norm(x_t))))).
#include <ATen/ATen.h>

#include "slices.h"
#include "titan/nn/containers.h"
#include "titan/nn/layers.h"
#include "titan/parallel/tensor_parallel.h"
#include "titan/train/model_spec.h"
#include "titan/train/parallel_dims.h"

namespace {

using namespace titan::train;
using titan::nn::Construct;
using titan::nn::Init;

struct AveragerArgs {
  int64_t vocab_size = 258;
  int64_t dim = 64;
  int64_t hidden = 250;
  int64_t num_blocks = 2;

  int64_t num_params() const { return 2 * vocab_size * dim + num_blocks * (2 * dim * hidden + dim) + dim; }
};

void describe(titan::config::Table<AveragerArgs>& table) {
  table.field("vocab_size", &AveragerArgs::vocab_size, "rows of the embedding", titan::config::at_least(1));
  table.field("dim", &AveragerArgs::dim, "width between the blocks", titan::config::at_least(1));
  table.field("hidden", &AveragerArgs::hidden, "width of the averaged features", titan::config::at_least(1));
  table.field("num_blocks", &AveragerArgs::num_blocks, "number of blocks", titan::config::at_least(1));
}

// ---- the model, which doesn't know about ranks. B batch, S sequence, D dim, H hidden.

titan::nn::Linear linear(int64_t in, int64_t out, const Construct& construct) {
  return titan::nn::Linear(in, out,
                           titan::nn::LinearOptions{.init = Init::normal(0, 0.05), .construct = construct});
}

class BlockImpl : public titan::nn::Module, public EarlierTokensUser {
 public:
  BlockImpl(const AveragerArgs& args, const Construct& construct)
      : norm_(args.dim, 1e-5, construct),
        value_(linear(args.dim, args.hidden, construct)),
        out_(linear(args.hidden, args.dim, construct)) {
    register_module("norm", norm_);
    register_module("value", value_);
    register_module("out", out_);
  }

  at::Tensor forward(const at::Tensor& x_BSD) {
    check_entered_through_ref();
    const at::Tensor value_BSH = at::gelu(value_(norm_(x_BSD)));
    const int64_t num_tokens = value_BSH.size(1), before = earlier_ ? earlier_->count(num_tokens) : 0;
    const at::Tensor count_S1 =
        at::arange(before + 1, before + num_tokens + 1, value_BSH.options()).unsqueeze(1);
    at::Tensor sum_BSH = at::cumsum(value_BSH, 1);
    if (earlier_) sum_BSH = sum_BSH + earlier_->sum(value_BSH.sum(1)).unsqueeze(1);
    return x_BSD + out_(sum_BSH / count_S1);
  }

  void set_earlier_tokens(std::shared_ptr<EarlierTokens> earlier) override { earlier_ = std::move(earlier); }

 private:
  titan::nn::RMSNorm norm_;
  titan::nn::Linear value_, out_;
  std::shared_ptr<EarlierTokens> earlier_;  // null: this rank has whole sequences
};
TITAN_MODULE(Block);

class AveragerImpl : public titan::nn::Module {
 public:
  AveragerImpl(const AveragerArgs& args, const Construct& construct)
      : embedding_(args.vocab_size, args.dim, construct),
        norm_(args.dim, 1e-5, construct),
        head_(args.dim, args.vocab_size,
              titan::nn::LossHeadOptions{.init = Init::normal(0, 0.05), .construct = construct}) {
    register_module("embedding", embedding_);
    register_module("blocks", blocks.ptr());
    for (int64_t i = 0; i < args.num_blocks; ++i) blocks.push_back(Block(args, construct));
    register_module("norm", norm_);
    register_module("head", head_);
  }

  at::Tensor forward(const at::Tensor& tokens_BS, const at::Tensor& labels_BS,
                     const titan::ops::ValidTokens& global_valid_tokens) {
    check_entered_through_ref();
    at::Tensor x_BSD = embedding_(tokens_BS);
    for (const Block& block : blocks) x_BSD = block(x_BSD);
    return head_(norm_(x_BSD), labels_BS, global_valid_tokens);
  }

  titan::nn::ModuleList<Block> blocks;

 private:
  titan::nn::Embedding embedding_;
  titan::nn::RMSNorm norm_;
  titan::nn::LinearCrossEntropy head_;
};
TITAN_MODULE(Averager);

class AveragerModel : public TrainableModel {
 public:
  AveragerModel(const AveragerArgs& args, const Construct& construct) : model(args, construct) {}
  titan::nn::AnyRef root() override { return model; }
  at::Tensor loss(const at::Tensor& tokens_BS, const at::Tensor& labels_BS,
                  const titan::ops::ValidTokens& global_valid_tokens) override {
    return model(tokens_BS, labels_BS, global_valid_tokens);
  }
  Averager model;
};

// ---- the plan

// Each rank averages some of the features, over the whole sequence. Between the blocks it keeps a part of the
// sequence or, without sequence parallelism, all of it.
titan::TensorPlan features(const titan::TensorParallelOptions& options) {
  using Layout = titan::ActivationLayout;
  const Layout stream = options.sequence_parallel ? Layout::shard(1) : Layout::invariant();
  const Layout logits = options.loss_parallel ? Layout::shard(-1) : Layout::invariant();
  titan::TensorPlan plan = {
      {"embedding", titan::Rowwise{.output = stream}},
      {"blocks.*.value", titan::Colwise{.input = stream}},
      {"blocks.*.out", titan::Rowwise{.output = stream}},
      {"head", titan::Colwise{.input = stream, .output = logits}},
  };
  if (options.sequence_parallel)
    for (const char* norm : {"blocks.*.norm", "norm"}) plan.push_back({norm, titan::SequenceParallel{}});
  return plan;
}

void spread_features(TrainableModel& trainable, const ParallelPlan& plan) {
  const Averager& model = dynamic_cast<AveragerModel&>(trainable).model;
  titan::parallelize(model, plan.meshes.tp, features(plan.tensor));        // first: layers become parts
  titan::apply_parallelisms(model, plan.parallelisms, plan.meshes.world);  // slices
  for (const Block& block : model->blocks)
    titan::fully_shard(block, plan.fsdp);  // then the parts are sharded
  titan::fully_shard(model, plan.fsdp);
}

}  // namespace

extern "C" void titan_register() {
  register_slices();
  parallel_plans().add("spread_features", spread_features);
  register_model<AveragerArgs>(
      "averager",
      {.flavors = {{"small", {}}},
       .sizes = [](const AveragerArgs& args) -> ModelSizes {
         return {
             .num_layers = args.num_blocks, .vocab_size = args.vocab_size, .num_params = args.num_params()};
       },
       .build =
           [](const AveragerArgs& args, const BuildOptions& options) {
             return std::make_unique<AveragerModel>(args, options.construct);
           },
       .parallelize = [](TrainableModel& model,
                         const ParallelPlan& plan) { titan::fully_shard(model.root(), plan.fsdp); }});
}
