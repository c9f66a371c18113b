#pragma once

// One input of several layers: what is cast of it in a forward, and what is kept for the backward.

#include <memory>
#include <optional>
#include <vector>

#include "ops/saved_input.h"

namespace titan::ops {

/// [Note: an input of several layers]
/// Layers whose products join share the scale and each cast of their input. For the backward the one form is
/// kept that their weights' gradients multiply. Where layers don't join (one stays in high precision, or each
/// has a delayed scale of its own) a form for each would come to more than the input itself. So the input is
/// kept, once, and of each form the scale, where it has one for the whole; the backward casts again, once for
/// all who share.

using ProductsOfEach = std::vector<std::shared_ptr<const Products>>;

/// In a forward. Rows [N, I] come with each call, as they may be on their way until the first one.
class JointInput {
 public:
  /// `keeps`: of each layer, whether a backward will want its weight's gradient.
  JointInput(const ProductsOfEach& products, const std::vector<bool>& keeps);

  /// Whether one form serves all layers.
  bool alike() const;
  /// For layer i, with the scale that its casts share.
  const Operand& scaled(size_t i, const Operand& rows);
  /// As layer i multiplies it.
  const Operand& cast(size_t i, const Operand& rows);

 private:
  friend class KeptJointInput;
  struct Form {
    bool keeps = false;  // a backward will ask for it
    bool is_cast = false;
    std::optional<Operand> operand;
  };
  const ProductsOfEach& products_;
  std::vector<size_t> leaders_;  // for each layer the first one whose casts are its too
  std::vector<Form> forms_;      // of leaders
  bool trains_;
};

/// Between forward and backward, and in the latter.
class KeptJointInput {
 public:
  /// `x`: what autograd knows of the rows; undefined where they are the operation's own.
  void save(const at::Tensor& x, const Operand& rows, JointInput& input);
  void reset_data();

  /// All that was saved, at once: with checkpointing this may run the layer again. Then of(), until
  /// forget_unpacked().
  void unpack();
  /// As the gradient of layer i's weight multiplies it.
  const Operand& of(size_t i, const ProductsOfEach& products);
  void forget_unpacked();

 private:
  struct Unpacked {
    Operand rows;
    std::vector<at::Tensor> scales;
    std::vector<std::optional<Operand>> forms;  // of leaders
  };
  std::vector<size_t> leaders_;
  SavedInput saved_;
  std::vector<SavedVariable> scales_;  // of leaders, where the input itself is kept for several
  std::optional<Unpacked> unpacked_;
};

}  // namespace titan::ops
