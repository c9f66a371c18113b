#pragma once

// A small network that is hard to shard: it has rows that no number of ranks divides, an unused parameter, a
// frozen one, a tied one, and residual connections.

#include <ATen/core/Tensor.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/tanh.h>

#include <stdexcept>

#include "distributed/world.h"
#include "titan/nn/module.h"

namespace titan::testing {

/// y = x + B tanh(A x), with A: [hidden, dim], B: [dim, hidden].
class BlockImpl : public nn::Module {
 public:
  BlockImpl(int64_t dim, int64_t hidden, at::ScalarType dtype) {
    const auto options = options_of(dtype);
    up = register_parameter("up", values({hidden, dim}, options));
    down = register_parameter("down", values({dim, hidden}, options));
    bias = register_parameter("bias", values({dim}, options));
  }
  at::Tensor forward(const at::Tensor& x) {
    check_entered_through_ref();
    return x + at::linear(at::tanh(at::linear(x, up)), down, bias);
  }
  /// Fixed values without a generator, so that all ranks and layouts start equal.
  static at::Tensor values(at::IntArrayRef sizes, const at::TensorOptions& options) {
    const int64_t numel = c10::multiply_integers(sizes);
    const at::Tensor index = at::arange(numel, at::TensorOptions().dtype(at::kDouble));
    return at::sin(index * 12.9898 + static_cast<double>(numel))
        .mul(0.5)
        .view(sizes)
        .to(options.device(), c10::typeMetaToScalarType(options.dtype()));
  }
  at::Tensor up, down, bias;
};
TITAN_MODULE(Block);

struct ToyOptions {
  int64_t dim = 6;
  int64_t hidden = 7;
  int64_t num_blocks = 3;
  bool freeze_first = false;
  bool extra_unused = false;
};

/// The path of a forward.
struct ToyPath {
  int64_t skipped = -1;           // a block that isn't called
  int64_t detached = -1;          // a block whose output is used without its gradient
  int64_t failing = -1;           // the forward throws before this block
  int64_t failing_backward = -1;  // the backward throws after this block
};

class ToyImpl : public nn::Module {
 public:
  ToyImpl(const ToyOptions& options, at::ScalarType dtype) {
    for (int64_t i = 0; i < options.num_blocks; ++i) {
      blocks.emplace_back(options.dim, options.hidden, dtype);
      register_module("block" + std::to_string(i), blocks.back());
    }
    scale = register_parameter("scale", BlockImpl::values({options.dim}, options_of(dtype)));
    if (options.extra_unused)
      unused = register_parameter("unused", BlockImpl::values({5, 3}, options_of(dtype)));
    if (options.freeze_first) blocks[0]->up.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = x;
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto index = static_cast<int64_t>(i);
      if (index == path.failing) throw std::runtime_error("the toy fails");
      if (index == path.skipped) continue;
      const at::Tensor y = blocks[i](h);
      if (index == path.failing_backward)
        y.register_hook([](const at::Tensor&) { throw std::runtime_error("the toy's backward fails"); });
      h = index == path.detached ? h + y.detach() - h.detach() : y;
    }
    return h * scale;
  }
  ToyPath path;
  std::vector<Block> blocks;
  at::Tensor scale, unused;
};
TITAN_MODULE(Toy);

}  // namespace titan::testing
