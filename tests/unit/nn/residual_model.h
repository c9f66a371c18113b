#pragma once

// A small model besides Llama that names its sequence of layers.

#include <ATen/ATen.h>

#include "titan/nn/containers.h"
#include "titan/nn/layers.h"

namespace titan::nn {

struct ResidualSizes {
  int64_t dim = 12;
  int64_t vocab_size = 20;
  int64_t num_layers = 5;
  bool tied = false;
};

/// x + down(tanh(up x)).
class ResidualBlockImpl : public Module {
 public:
  ResidualBlockImpl(int64_t dim, const Construct& construct)
      : up(dim, 2 * dim, LinearOptions{.bias = true, .construct = construct}),
        down(2 * dim, dim, LinearOptions{.construct = construct}) {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    check_entered_through_ref();
    return x + down(at::tanh(up(x)));
  }
  Linear up, down;
};
TITAN_MODULE(ResidualBlock);

/// Embedding, blocks, norm, and a head that computes the loss.
class ResidualImpl : public Module, public LayerSequence {
 public:
  explicit ResidualImpl(const ResidualSizes& sizes, const Construct& construct = {})
      : embedding(sizes.vocab_size, sizes.dim, construct),
        norm(sizes.dim, 1e-5, construct),
        head(sizes.dim, sizes.vocab_size,
             LossHeadOptions{.init = Init::normal(0, 0.3),
                             .tied_weight = sizes.tied ? embedding->weight : at::Tensor(),
                             .construct = construct}) {
    register_module("embedding", embedding);
    for (int64_t i = 0; i < sizes.num_layers; ++i) blocks.push_back(ResidualBlock(sizes.dim, construct));
    register_module("blocks", blocks.ptr());
    register_module("norm", norm);
    register_module("head", head);
    call_in_order(
        {part("embedding", embedding), part("blocks", blocks), part("norm", norm), part("head", head)});
  }

  at::Tensor forward(const at::Tensor& input) {
    check_entered_through_ref();
    const at::Tensor h = hidden(input);
    return head ? head(h) : h;
  }
  at::Tensor forward(const at::Tensor& input, const at::Tensor& labels,
                     const ops::ValidTokens& global_valid_tokens) {
    check_entered_through_ref();
    return head(hidden(input), labels, global_valid_tokens);
  }

  Embedding embedding;
  ModuleList<ResidualBlock> blocks;
  RMSNorm norm;
  LinearCrossEntropy head;

 private:
  at::Tensor hidden(const at::Tensor& input) {
    at::Tensor h = embedding ? embedding(input) : input;
    for (const ResidualBlock& block : blocks) h = block(h);
    return norm ? norm(h) : h;
  }
};
TITAN_MODULE(Residual);

}  // namespace titan::nn
