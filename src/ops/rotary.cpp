#include "titan/ops/rotary.h"

#include "ops/autograd_node.h"
#include "ops/operators.h"

namespace titan::ops {

namespace {

at::Tensor rotate(const at::Tensor& x, const at::Tensor& table, const at::Tensor& positions, bool inverse) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, bool);
  static const auto op = find_operator<Signature>("titan::rotary");
  return op.call(x, table, positions.defined() ? std::optional(positions) : std::nullopt, inverse);
}

// A rotation's transpose is the rotation back.
struct RotaryBackward final : BackwardNode {
  at::Tensor table, positions;  // neither is differentiable, nor written to between forward and backward

  variable_list backward(const at::Tensor& grad) override {
    return {rotate(grad, table, positions, /*inverse=*/true)};
  }
  void release_variables() override {
    table.reset();
    positions.reset();
  }
  std::string name() const override { return "titan::rotary backward"; }
};

void check_shapes(const at::Tensor& x, const at::Tensor& table, const at::Tensor& positions) {
  TITAN_CHECK(x.dim() == 4 && x.size(3) % 2 == 0,
              "rotary: expected x of [batch, sequence, heads, an even size], got ", x.sizes());
  TITAN_CHECK(table.dim() == 2 && table.size(1) == x.size(3) &&
                  (table.scalar_type() == at::kFloat || table.scalar_type() == at::kDouble),
              "rotary: expected a fp32 or float64 table of [positions, ", x.size(3), "], got ",
              table.scalar_type(), " ", table.sizes());
  if (!positions.defined()) {
    TITAN_CHECK(x.size(1) <= table.size(0), "rotary: a sequence of ", x.size(1),
                " tokens is longer than the table of ", table.size(0));
    return;
  }
  const bool fits = (positions.dim() == 1 ||
                     (positions.dim() == 2 && (positions.size(0) == x.size(0) || positions.size(0) == 1))) &&
                    positions.size(-1) == x.size(1) && positions.scalar_type() == at::kLong;
  TITAN_CHECK(fits, "rotary: expected int64 positions of [", x.size(1), "] or [", x.size(0), ", ", x.size(1),
              "], got ", positions.scalar_type(), " ", positions.sizes());
}

}  // namespace

at::Tensor rotary(const at::Tensor& x_BSHD, const at::Tensor& table_PD, const at::Tensor& positions) {
  check_shapes(x_BSHD, table_PD, positions);
  at::Tensor out;
  {
    BelowAutograd guard;
    out = rotate(x_BSHD, table_PD, positions, /*inverse=*/false);
  }
  if (!compute_requires_grad(x_BSHD)) return out;
  const auto node = record<RotaryBackward>(out, x_BSHD);
  node->table = table_PD;
  node->positions = positions;
  return out;
}

}  // namespace titan::ops
