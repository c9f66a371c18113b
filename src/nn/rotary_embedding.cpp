#include "titan/nn/rotary_embedding.h"

#include <cmath>
#include <numbers>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include "titan/core/error.h"
#include "titan/ops/rotary.h"

namespace titan::nn {

namespace {

at::Tensor scaled(const at::Tensor& frequencies, const RotaryScaling& scaling) {
  const auto length = static_cast<double>(scaling.original_length);
  const at::Tensor wavelength = 2 * std::numbers::pi / frequencies;
  const at::Tensor is_slow = wavelength > length / scaling.low_freq_factor;
  const at::Tensor is_fast = wavelength < length / scaling.high_freq_factor;
  const at::Tensor slowed = frequencies / scaling.factor;
  const at::Tensor blend =
      (length / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
  const at::Tensor blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies;
  return at::where(is_fast, frequencies, at::where(is_slow, slowed, blended));
}

}  // namespace

at::Tensor rotary_frequencies(int64_t head_dim, double theta, const std::optional<RotaryScaling>& scaling,
                              at::ScalarType dtype) {
  const at::Tensor exponents = at::arange(0, head_dim, 2).to(dtype) / head_dim;
  const at::Tensor frequencies = 1.0 / at::pow(theta, exponents);
  return scaling ? scaled(frequencies, *scaling) : frequencies;
}

RotaryEmbeddingImpl::RotaryEmbeddingImpl(const RotaryOptions& options) : options_(options) {
  TITAN_CHECK(options.head_dim > 0 && options.head_dim % 2 == 0,
              "rotary embedding: expected an even head size, got ", options.head_dim);
  if (!options.construct.deferred) reset_buffers(options.construct.device);
}

void RotaryEmbeddingImpl::reset_buffers(const at::Device& device) {
  at::NoGradGuard no_grad;
  const at::ScalarType dtype = options_.construct.dtype == at::kDouble ? at::kDouble : at::kFloat;
  if (device.is_meta()) {
    table_ = at::empty({options_.max_positions, options_.head_dim},
                       at::TensorOptions().dtype(dtype).device(device));
    return;
  }
  const at::Tensor positions = at::arange(options_.max_positions).to(dtype);
  const at::Tensor frequencies =
      rotary_frequencies(options_.head_dim, options_.theta, options_.scaling, dtype);
  const at::Tensor angles = at::outer(positions, frequencies);
  table_ = at::stack({angles.cos(), angles.sin()}, -1).flatten(1).to(device);
}

at::Tensor RotaryEmbeddingImpl::forward(const at::Tensor& x_BSHD, const at::Tensor& positions) {
  check_entered_through_ref();
  TITAN_CHECK(table_.defined(), "rotary embedding '", fqn(),
              "' has no table yet: call titan::materialize(model, seed) first");
  if (positions.defined() || !token_positions_) return ops::rotary(x_BSHD, table_, positions);
  return ops::rotary(x_BSHD, table_, token_positions_->of(x_BSHD.size(1), x_BSHD.device()));
}

}  // namespace titan::nn
