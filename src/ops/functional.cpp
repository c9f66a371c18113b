#include "titan/ops/functional.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/zeros.h>

#include "ops/autograd_node.h"
#include "ops/operators.h"

namespace titan::ops {

namespace {

// ---- embedding

// The weight's rows that tokens look up, and the backward's inputs.
struct Lookup {
  at::Tensor rows;     // int64, with the tokens' shape
  at::Tensor foreign;  // true if another part has the row, and `rows` is 0; undefined: false everywhere
  int64_t num_rows = 0;

  Lookup(const at::Tensor& tokens, const VocabularyPart& part, int64_t num_rows)
      : rows(tokens), num_rows(num_rows) {
    if (!part.parts) return;
    const at::Tensor wrong = tokens.lt(0) | tokens.ge(part.size);
    if (tokens.is_cuda()) at::_assert_async(wrong.any().logical_not());
    if (tokens.is_cpu() && tokens.numel() > 0) {
      TITAN_CHECK(!wrong.any().item<bool>(), "embedding: token ",
                  tokens.masked_select(wrong)[0].item<int64_t>(), " isn't in a vocabulary of ", part.size);
    }
    rows = tokens - part.first;
    foreign = rows.lt(0) | rows.ge(num_rows);
    rows = rows.masked_fill(foreign, 0);
  }

  at::Tensor forward(const at::Tensor& weight) const {
    std::vector<int64_t> sizes = rows.sizes().vec();
    sizes.push_back(weight.size(1));
    at::Tensor out = num_rows > 0 ? at::embedding(weight, rows) : at::zeros(sizes, weight.options());
    return foreign.defined() ? out.masked_fill_(foreign.unsqueeze(-1), 0) : out;
  }

  at::Tensor weight_gradient(const at::Tensor& grad) const {
    static const auto op =
        find_operator<decltype(composite::embedding_backward)>("titan::embedding_backward");
    if (num_rows == 0)
      return at::zeros({0, grad.size(-1)}, grad.options().dtype(composite::accumulate_type(grad)));
    return op.call(foreign.defined() ? grad.masked_fill(foreign.unsqueeze(-1), 0) : grad, rows, num_rows);
  }
};

struct EmbeddingBackward final : BackwardNode {
  std::optional<Lookup> lookup;
  at::ScalarType dtype = at::kFloat;
  std::shared_ptr<GradSink> weight_sink;

  variable_list backward(const at::Tensor& grad) override {
    TITAN_CHECK(lookup, "embedding: second backward through the same graph");
    if (!weight_sink) return {lookup->weight_gradient(grad).to(dtype)};
    weight_sink->accept({.compute = [grad, lookup = *lookup] { return lookup.weight_gradient(grad); },
                         .reads = {grad, lookup->rows, lookup->foreign}});
    return {at::Tensor()};
  }
  void release_variables() override { lookup.reset(); }
  std::string name() const override { return "titan::embedding backward"; }
};

// ---- RMS norm

// Serves rms_norm, whose output is the norm, and add_rms_norm, whose second output is the normed sum, or x itself.
struct RmsNormBackward final : torch::autograd::Node {
  enum Input : size_t { X, Added, Weight };
  enum Output : size_t { Normed, Sum };
  SavedVariable sum, weight, rstd;
  std::shared_ptr<GradSink> weight_sink;

  variable_list apply(variable_list&& grads) override {
    refuse_second_derivative(*this);
    const at::Tensor grad_sum = grads.size() > Sum ? grads[Sum] : at::Tensor();
    variable_list results(num_outputs());
    results[X] = grads[Normed].defined() ? backward(grads[Normed], grad_sum, results[Weight]) : grad_sum;
    results[Added] = results[X];
    for (const Input each : {X, Added})
      if (!task_should_compute_output(each)) results[each].reset();
    return results;
  }
  void release_variables() override {
    for (SavedVariable* saved : {&sum, &weight, &rstd}) saved->reset_data();
  }
  std::string name() const override { return "titan::rms_norm backward"; }

 private:
  // Returns x's gradient.
  at::Tensor backward(const at::Tensor& grad, const at::Tensor& grad_sum, at::Tensor& result_of_weight) {
    const at::Tensor scales = weight.unpack();
    auto [grad_x, grad_weight] = run(grad, grad_sum, sum.unpack(getptr()), scales, rstd.unpack());
    if (!task_should_compute_output(Weight)) return grad_x;
    if (weight_sink) {
      // Computed already, but passed as a DueGradient so that it is delayed like other weight gradients.
      weight_sink->accept(
          {.compute = [grad_weight = grad_weight] { return grad_weight; }, .reads = {grad_weight}});
    } else {
      result_of_weight = grad_weight.to(scales.scalar_type());
    }
    return grad_x;
  }
  static std::tuple<at::Tensor, at::Tensor> run(const at::Tensor& grad, const at::Tensor& grad_sum,
                                                const at::Tensor& x, const at::Tensor& scales,
                                                const at::Tensor& rstd) {
    static const auto op = find_operator<decltype(composite::rms_norm_backward)>("titan::rms_norm_backward");
    static const auto adding_op =
        find_operator<decltype(composite::add_rms_norm_backward)>("titan::add_rms_norm_backward");
    if (!grad_sum.defined()) return op.call(grad, x, scales, rstd);
    return adding_op.call(grad, grad_sum, x, scales, rstd);
  }
};

void check_norm(const at::Tensor& x, const at::Tensor& weight_D) {
  TITAN_CHECK(weight_D.dim() == 1 && x.dim() >= 1 && x.size(-1) == weight_D.size(0), "rms_norm: x ",
              x.sizes(), " doesn't fit weight ", weight_D.sizes());
}

std::tuple<at::Tensor, at::Tensor> norm_forward(const at::Tensor& x, const at::Tensor& weight_D, double eps) {
  static const auto op = find_operator<decltype(composite::rms_norm)>("titan::rms_norm");
  return below_autograd([&] { return op.call(x, weight_D, eps); });
}

// ---- rotary positions

std::vector<at::Tensor> rotate(at::TensorList x, const at::Tensor& table, const at::Tensor& positions,
                               bool inverse) {
  static const auto op = find_operator<decltype(composite::rotary)>("titan::rotary");
  return op.call(x, table, positions.defined() ? std::optional(positions) : std::nullopt, inverse);
}

// Rotates the gradients of one tensor, or of queries and keys, back: a rotation's transpose is its inverse.
struct RotaryBackward final : torch::autograd::Node {
  at::Tensor table, positions;  // neither is differentiable, nor written to between forward and backward

  variable_list apply(variable_list&& grads) override {
    refuse_second_derivative(*this);
    variable_list given;
    for (const at::Tensor& grad : grads)
      if (grad.defined()) given.push_back(grad);
    if (given.empty()) return variable_list(num_outputs());
    variable_list rotated = rotate(given, table, positions, /*inverse=*/true);
    for (size_t i = 0, next = 0; i < grads.size(); ++i)
      if (grads[i].defined()) grads[i] = std::move(rotated[next++]);
    return std::move(grads);
  }
  void release_variables() override {
    table.reset();
    positions.reset();
  }
  std::string name() const override { return "titan::rotary backward"; }
};

void check_rotary(const at::Tensor& x, const at::Tensor& table, const at::Tensor& positions) {
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

// ---- SwiGLU

using GateAndUp = std::pair<at::Tensor, at::Tensor>;

at::Tensor swiglu_forward(const GateAndUp& in) {
  static const auto op = find_operator<decltype(composite::swiglu)>("titan::swiglu");
  return below_autograd([&] { return op.call(in.first, in.second); });
}

struct SwigluBackward final : RecomputingNode {
  SavedVariable gate, up;

  void unpack_inputs() override {
    if (!unpacked_) unpacked_ = {gate.unpack(), up.unpack()};
  }
  at::Tensor recompute() override {
    unpack_inputs();
    return swiglu_forward(*unpacked_);
  }
  at::Tensor recompute_with_backward(const at::Tensor& grad) override {
    static const auto op =
        find_operator<decltype(composite::swiglu_with_backward)>("titan::swiglu_with_backward");
    unpack_inputs();
    auto [out, grad_gate, grad_up] = op.call(grad, unpacked_->first, unpacked_->second);
    ahead_ = Ahead{grad, grad._version(), {std::move(grad_gate), std::move(grad_up)}};
    return out;
  }
  variable_list backward(const at::Tensor& grad) override {
    static const auto op = find_operator<decltype(composite::swiglu_backward)>("titan::swiglu_backward");
    const auto ahead = std::exchange(ahead_, std::nullopt);
    if (ahead && ahead->grad.is_same(grad) && ahead->version == grad._version()) {
      unpacked_.reset();
      return ahead->results;
    }
    unpack_inputs();
    const GateAndUp in = *std::exchange(unpacked_, std::nullopt);
    auto [grad_gate, grad_up] = op.call(grad, in.first, in.second);
    return {std::move(grad_gate), std::move(grad_up)};
  }
  void release_variables() override {
    unpacked_.reset();
    ahead_.reset();
    gate.reset_data();
    up.reset_data();
  }
  std::string name() const override { return "titan::swiglu backward"; }

 private:
  // A backward that recompute_with_backward() has computed.
  struct Ahead {
    at::Tensor grad;  // held, so that the engine adds no other gradient in its place
    int64_t version;
    variable_list results;
  };
  std::optional<GateAndUp> unpacked_;
  std::optional<Ahead> ahead_;
};

}  // namespace

at::Tensor embedding(const at::Tensor& weight_VD, const at::Tensor& tokens,
                     const std::shared_ptr<GradSink>& weight_sink, const VocabularyPart& part) {
  TITAN_CHECK(weight_VD.dim() == 2, "embedding: expected a weight of [vocabulary, size], got ",
              weight_VD.sizes());
  TITAN_CHECK(tokens.scalar_type() == at::kLong, "embedding: expected int64 tokens, got ",
              tokens.scalar_type());
  Lookup lookup = below_autograd([&] { return Lookup(tokens, part, weight_VD.size(0)); });
  const at::Tensor out = below_autograd([&] { return lookup.forward(weight_VD); });
  if (!compute_requires_grad(weight_VD)) return out;
  const auto node = record<EmbeddingBackward>(out, weight_VD);
  node->lookup = std::move(lookup);
  node->dtype = weight_VD.scalar_type();
  node->weight_sink = weight_sink;
  return out;
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight_D, double eps,
                    const std::shared_ptr<GradSink>& weight_sink) {
  check_norm(x, weight_D);
  const auto [y, rstd] = norm_forward(x, weight_D, eps);
  if (!compute_requires_grad(x, weight_D)) return y;
  const auto node = record<RmsNormBackward>(y, x, at::Tensor(), weight_D);
  node->sum = save_input(x);
  node->weight = save_input(weight_D);
  node->rstd = save_input(rstd);
  node->weight_sink = weight_sink;
  return y;
}

NormedSum add_rms_norm(const at::Tensor& x, const at::Tensor& added, const at::Tensor& weight_D, double eps,
                       const std::shared_ptr<GradSink>& weight_sink) {
  check_norm(x, weight_D);
  TITAN_CHECK(!added.defined() || (x.sizes() == added.sizes() && x.scalar_type() == added.scalar_type()),
              "add_rms_norm: expected two tensors of one shape and dtype, got ", x.scalar_type(), " ",
              x.sizes(), " and ", added.scalar_type(), " ", added.sizes());
  static const auto op = find_operator<decltype(composite::add_rms_norm)>("titan::add_rms_norm");
  NormedSum result;
  at::Tensor rstd;
  if (added.defined()) {
    std::tie(result.normed, rstd, result.sum) =
        below_autograd([&] { return op.call(x, added, weight_D, eps); });
  } else {
    std::tie(result.normed, rstd) = norm_forward(x, weight_D, eps);
    result.sum = x.detach();
  }
  if (!compute_requires_grad(x, added, weight_D)) return result;
  const auto node = record<RmsNormBackward>(result.normed, x, added, weight_D);
  if (compute_requires_grad(x, added)) set_history(result.sum, node);
  node->sum = added.defined() ? SavedVariable(result.sum, /*is_output=*/true) : save_input(x);
  node->weight = save_input(weight_D);
  node->rstd = save_input(rstd);
  node->weight_sink = weight_sink;
  return result;
}

at::Tensor rotary(const at::Tensor& x_BSHD, const at::Tensor& table_PD, const at::Tensor& positions) {
  check_rotary(x_BSHD, table_PD, positions);
  const at::Tensor out =
      below_autograd([&] { return rotate(x_BSHD, table_PD, positions, /*inverse=*/false)[0]; });
  if (!compute_requires_grad(x_BSHD)) return out;
  const auto node = record<RotaryBackward>(out, x_BSHD);
  node->table = table_PD;
  node->positions = positions;
  return out;
}

std::pair<at::Tensor, at::Tensor> joint_rotary(const at::Tensor& q_BSHD, const at::Tensor& k_BSKD,
                                               const at::Tensor& table_PD, const at::Tensor& positions) {
  for (const at::Tensor& x : {q_BSHD, k_BSKD}) check_rotary(x, table_PD, positions);
  TITAN_CHECK(q_BSHD.sizes().slice(0, 2) == k_BSKD.sizes().slice(0, 2) &&
                  q_BSHD.scalar_type() == k_BSKD.scalar_type(),
              "joint_rotary: expected queries and keys of the same tokens and dtype, got ",
              q_BSHD.scalar_type(), " ", q_BSHD.sizes(), " and ", k_BSKD.scalar_type(), " ", k_BSKD.sizes());
  const variable_list out = below_autograd([&] {
    return rotate({q_BSHD, k_BSKD}, table_PD, positions, /*inverse=*/false);
  });
  if (compute_requires_grad(q_BSHD, k_BSKD)) {
    const auto node = make_node<RotaryBackward>(q_BSHD, k_BSKD);
    set_history(out, node);
    node->table = table_PD;
    node->positions = positions;
  }
  return {out[0], out[1]};
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  TITAN_CHECK(gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(),
              "swiglu: expected two tensors of one shape and dtype, got ", gate.scalar_type(), " ",
              gate.sizes(), " and ", up.scalar_type(), " ", up.sizes());
  if (!compute_requires_grad(gate, up)) return swiglu_forward({gate, up});
  // The inputs are saved first: if a recomputation needs no more, it doesn't compute the output.
  const auto node = make_node<SwigluBackward>(gate, up);
  node->gate = save_input(gate);
  node->up = save_input(up);
  const at::Tensor out = swiglu_forward({gate, up});
  set_history(out, node);
  return out;
}

}  // namespace titan::ops
