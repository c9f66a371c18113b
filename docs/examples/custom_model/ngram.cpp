// Your own model and parallelism plan. The model predicts a token from the few tokens before it, without
// attention.
#include "ngram.h"

#include <ATen/ATen.h>

#include "titan/nn/containers.h"
#include "titan/nn/layers.h"
#include "titan/nn/module.h"
#include "titan/train/model_spec.h"

namespace {

using titan::nn::Init;
using namespace titan::train;

constexpr double kInitStd = 0.02;

// The model's sizes: a flavor's, overridden by [model.args].
struct NgramArgs {
  int64_t vocab_size = 2048;
  int64_t context = 4;  ///< number of tokens that predict the next one
  int64_t dim = 64;
  int64_t hidden = 256;
  double dropout = 0;  ///< fraction of the hidden layer that a training step drops

  int64_t num_params() const { return vocab_size * dim + hidden * context * dim + vocab_size * hidden; }
};

void describe(titan::config::Table<NgramArgs>& table) {
  table.field("vocab_size", &NgramArgs::vocab_size, "rows of the embedding", titan::config::at_least(1));
  table.field("context", &NgramArgs::context, "number of tokens that predict the next one",
              titan::config::at_least(1));
  table.field("dim", &NgramArgs::dim, "width of an embedding", titan::config::at_least(1));
  table.field("hidden", &NgramArgs::hidden, "width of the hidden layer", titan::config::at_least(1));
  table.field("dropout", &NgramArgs::dropout, "fraction of the hidden layer that a training step drops",
              titan::config::in_range(0, 1));
}

// B batch, S sequence, D dim, C context, H hidden, V vocabulary.

// Mixes a token with those before it, in one hidden layer.
class MixImpl : public titan::nn::Module {
 public:
  MixImpl(const NgramArgs& args, const titan::nn::Construct& construct)
      : up(args.context * args.dim, args.hidden,
           titan::nn::LinearOptions{.init = Init::normal(0, kInitStd), .construct = construct}),
        context_(args.context),
        dropout_(args.dropout) {
    register_module("up", up);
  }

  at::Tensor forward(const at::Tensor& x_BSD) {
    check_entered_through_ref();
    std::vector<at::Tensor> shifted;  // by 0, 1, ... positions; zeros before the sequence
    for (int64_t by = 0; by < context_; ++by) shifted.push_back(at::constant_pad_nd(x_BSD, {0, 0, by, -by}));
    return at::dropout(at::gelu(up(at::cat(shifted, 2))), dropout_, is_training());
  }

  titan::nn::Linear up;

 private:
  int64_t context_;
  double dropout_;
};
TITAN_MODULE(Mix);

// A pipeline stage has some of the three modules; its other handles are empty.
class NgramImpl : public titan::nn::Module, public titan::nn::LayerSequence {
 public:
  NgramImpl(const NgramArgs& args, const titan::nn::Construct& construct)
      : embedding(args.vocab_size, args.dim, construct),
        mix(args, construct),
        head(args.hidden, args.vocab_size,
             titan::nn::LinearOptions{.init = Init::normal(0, kInitStd), .construct = construct}) {
    register_module("embedding", embedding);
    register_module("mix", mix);
    register_module("head", head);
    call_in_order({part("embedding", embedding), part("mix", mix), part("head", head)});
  }

  at::Tensor forward(const at::Tensor& input) {
    check_entered_through_ref();
    at::Tensor h = embedding ? embedding(input) : input;
    if (mix) h = mix(h);
    return head ? head(h) : h;
  }

  titan::nn::Embedding embedding;
  Mix mix;
  titan::nn::Linear head;
};
TITAN_MODULE(Ngram);

// The model as the trainer sees it.
class NgramModel : public TrainableModel {
 public:
  NgramModel(const NgramArgs& args, const titan::nn::Construct& construct) : model_(args, construct) {}

  titan::nn::AnyRef root() override { return model_; }

  // A pipeline stage passes this to the next.
  at::Tensor hidden(const at::Tensor& input) override { return model_(input); }

  at::Tensor loss(const at::Tensor& input, const at::Tensor& labels_BS,
                  const titan::ops::ValidTokens& global_valid_tokens) override {
    const at::Tensor logits_NV = model_(input).flatten(0, 1).to(at::kFloat);
    const at::Tensor sum =
        at::cross_entropy_loss(logits_NV, labels_BS.flatten(), {}, at::Reduction::Sum, -100);
    return sum / global_valid_tokens;
  }

 private:
  Ngram model_;
};

// A plan for any model: one sharding group, whose parameters are gathered once a step and stay gathered from
// forward to backward.
void keep_gathered(TrainableModel& model, const ParallelPlan& plan) {
  titan::FsdpOptions fsdp = plan.fsdp;
  fsdp.reshard_after_forward = titan::ReshardAfterForward::never();
  titan::fully_shard(model.root(), fsdp);
}

}  // namespace

void register_ngram() {
  parallel_plans().add("keep_gathered", keep_gathered);
  register_model<NgramArgs>(
      "ngram",
      {.flavors = {{"small", {}}, {"wide", {.dim = 256, .hidden = 1024}}},
       .sizes = [](const NgramArgs& args) -> ModelSizes {
         return {.vocab_size = args.vocab_size, .num_params = args.num_params()};
       },
       .build =
           [](const NgramArgs& args, const BuildOptions& options) {
             return std::make_unique<NgramModel>(args, options.construct);
           },
       .parallelize = [](TrainableModel& model,
                         const ParallelPlan& plan) { titan::fully_shard(model.root(), plan.fsdp); }});
}

// experimental.custom_import calls this function.
extern "C" void titan_register() { register_ngram(); }
