#pragma once

// An input that an operation keeps for its backward: itself, or what makes it again.

#include <memory>
#include <utility>

#include <torch/csrc/autograd/engine.h>

#include "ops/autograd_node.h"

namespace titan::ops {

/// [Note: outputs made again]
/// A product's weight gradient needs its input, and an elementwise operation before it needs its own inputs:
/// kept, the operation's output is memory for something that costs one pass over its inputs. (SwiGLU's is a
/// sixth of what a Llama block keeps.) So the product keeps the operation's node instead, which it holds
/// anyway, and asks that for the output again: the same bits, and the node can't have given up its inputs
/// yet, as its backward waits for the product's. Where activation checkpointing decides what becomes of saved
/// tensors, it is asked as always.
class RemakingNode : public BackwardNode {
 public:
  /// The output once more, from what the node saved.
  virtual at::Tensor remake() = 0;
};

class SavedInput {
 public:
  SavedInput() = default;
  explicit SavedInput(const at::Tensor& input) {
    auto maker = std::dynamic_pointer_cast<RemakingNode>(input.grad_fn());
    if (maker && !torch::autograd::Engine::get_default_engine().get_default_saved_variable_hooks()) {
      maker_ = std::move(maker);
    } else {
      saved_ = save_input(input);
    }
  }
  at::Tensor unpack() const { return maker_ ? maker_->remake() : saved_.unpack(); }
  void reset_data() {
    if (!maker_) saved_.reset_data();
  }

 private:
  std::shared_ptr<RemakingNode> maker_;
  SavedVariable saved_;
};

}  // namespace titan::ops
