#pragma once

// An input that an operation keeps for its backward: itself, or what makes it again.

#include <memory>

#include "ops/autograd_node.h"

namespace titan::ops {

/// [Note: outputs made again]
/// A product's weight gradient needs its input, and an elementwise operation before it needs its own inputs:
/// kept, the operation's output is memory for something that costs one pass over its inputs. (SwiGLU's is a
/// sixth of what a Llama block keeps.) So the product keeps the operation's node instead, which it holds
/// anyway, and asks that for the output again: the same bits, and the node can't have given up its inputs
/// yet, as its backward waits for the product's.
class RemakingNode : public BackwardNode {
 public:
  /// The output once more, from what the node saved. It holds on to that until its own backward: under
  /// activation checkpointing asking twice would compute it twice.
  virtual at::Tensor remake() = 0;
};

class SavedInput {
 public:
  SavedInput() = default;
  explicit SavedInput(const at::Tensor& input) {
    maker_ = std::dynamic_pointer_cast<RemakingNode>(input.grad_fn());
    if (!maker_) saved_ = save_input(input);
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
