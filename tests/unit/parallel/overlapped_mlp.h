#pragma once

// y = (tanh(x Up^T) * (x Gate^T)) Down^T and its loss, on one rank and as rank r's part with overlapped
// products.

#include <memory>
#include <vector>

#include <ATen/ATen.h>

#include "titan/ops/linear.h"

namespace titan::testing {

struct MlpTensors {
  at::Tensor x;       // [B, S, I]
  at::Tensor up;      // [H, I]
  at::Tensor gate;    // [H, I]
  at::Tensor down;    // [O, H]
  at::Tensor factor;  // [B, S, O], weights of the outputs in the loss

  std::vector<at::Tensor> leaves() const { return {x, up, gate, down}; }
};

/// Filled with values of a sine, the same on every rank.
inline MlpTensors whole_mlp(int64_t sequence, const at::TensorOptions& options, int64_t batch = 2) {
  constexpr int64_t in = 5, hidden = 24, out = 7;
  double phase = 0;
  const auto wave = [&](at::IntArrayRef sizes) {
    phase += 1;
    const int64_t numel = c10::multiply_integers(sizes);
    const at::Tensor steps = at::arange(numel, at::kDouble) * (0.7 + 0.1 * phase) + phase;
    return at::sin(steps).view(sizes).to(options).requires_grad_();
  };
  MlpTensors mlp;
  mlp.x = wave({batch, sequence, in});
  mlp.up = wave({hidden, in});
  mlp.gate = wave({hidden, in});
  mlp.down = wave({out, hidden});
  mlp.factor = wave({batch, sequence, out}).detach();
  return mlp;
}

/// Copies that are autograd leaves.
inline MlpTensors part_of(const MlpTensors& whole, int rank, int count) {
  const auto part = [&](const at::Tensor& tensor, int64_t dim) {
    return tensor.detach().chunk(count, dim)[static_cast<size_t>(rank)].clone().requires_grad_();
  };
  MlpTensors mlp;
  mlp.x = part(whole.x, 1);
  mlp.up = part(whole.up, 0);
  mlp.gate = part(whole.gate, 0);
  mlp.down = part(whole.down, 1);
  mlp.factor = part(whole.factor, 1).detach();
  return mlp;
}

inline at::Tensor activation(const at::Tensor& up, const at::Tensor& gate) { return at::tanh(up) * gate; }

/// Runs the three layers. For a rank's parts, up and gate are cut by columns, and down by rows.
struct MlpProducts {
  std::shared_ptr<const ops::Products> up = ops::default_products();
  std::shared_ptr<const ops::Products> gate = up;
  std::shared_ptr<const ops::Products> down = up;
};

inline at::Tensor plain_output(const MlpTensors& mlp) {
  return at::linear(activation(at::linear(mlp.x, mlp.up), at::linear(mlp.x, mlp.gate)), mlp.down);
}

inline at::Tensor overlapped_output(const MlpTensors& mlp,
                                    const std::shared_ptr<const ops::SequenceExchange>& exchange,
                                    const MlpProducts& products = {}) {
  const std::vector<at::Tensor> hidden = ops::gathered_linears(
      mlp.x, {{mlp.up, nullptr}, {mlp.gate, nullptr}}, {products.up, products.gate}, exchange);
  return ops::scattered_linear(activation(hidden[0], hidden[1]), {mlp.down, nullptr}, products.down,
                               exchange);
}

inline void backward(const MlpTensors& mlp, const at::Tensor& output) {
  (output.pow(2) * mlp.factor).sum().backward();
}

/// Rank `rank`'s expected part of the whole output (`which` 0) or of the gradient of leaf which - 1.
inline at::Tensor expected_part(const MlpTensors& whole, const at::Tensor& output, size_t which, int rank,
                                int count) {
  constexpr int64_t dims[] = {1, 1, 0, 0, 1};
  const at::Tensor tensor = which == 0 ? output : whole.leaves()[which - 1].grad();
  return tensor.detach().chunk(count, dims[which])[static_cast<size_t>(rank)];
}

}  // namespace titan::testing
