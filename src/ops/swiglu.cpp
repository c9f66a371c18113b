#include "titan/ops/swiglu.h"

#include <optional>
#include <utility>

#include "ops/operators.h"
#include "ops/saved_input.h"

namespace titan::ops {

namespace {

at::Tensor forward(const at::Tensor& gate, const at::Tensor& up) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&);
  static const auto op = find_operator<Signature>("titan::swiglu");
  BelowAutograd guard;
  return op.call(gate, up);
}

struct SwigluBackward final : RemakingNode {
  SavedVariable gate, up;

  at::Tensor remake() override {
    unpacked_ = {gate.unpack(), up.unpack()};
    return forward(unpacked_->first, unpacked_->second);
  }

  variable_list backward(const at::Tensor& grad) override {
    using Signature =
        std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&);
    static const auto op = find_operator<Signature>("titan::swiglu_backward");
    if (!unpacked_) unpacked_ = {gate.unpack(), up.unpack()};
    const auto [of_gate, of_up] = *std::exchange(unpacked_, std::nullopt);
    auto [grad_gate, grad_up] = op.call(grad, of_gate, of_up);
    return {std::move(grad_gate), std::move(grad_up)};
  }
  void release_variables() override {
    unpacked_.reset();
    gate.reset_data();
    up.reset_data();
  }
  std::string name() const override { return "titan::swiglu backward"; }

 private:
  std::optional<std::pair<at::Tensor, at::Tensor>> unpacked_;
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  TITAN_CHECK(gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(),
              "swiglu: expected two tensors of one shape and dtype, got ", gate.scalar_type(), " ",
              gate.sizes(), " and ", up.scalar_type(), " ", up.sizes());
  at::Tensor out = forward(gate, up);
  if (!compute_requires_grad(gate, up)) return out;
  const auto node = record<SwigluBackward>(out, gate, up);
  node->gate = save_input(gate);
  node->up = save_input(up);
  return out;
}

}  // namespace titan::ops
