#include "titan/float8/convert.h"

#include <limits>

#include <torch/library.h>
#include <torch/nn/module.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "float8/cast.h"
#include "float8/products.h"
#include "ops/operators.h"
#include "titan/core/error.h"
#include "titan/nn/linear.h"

namespace titan::float8 {

namespace composite {

at::Tensor delayed_scale(const at::Tensor& amax, const at::Tensor& pending, const at::Tensor& largest,
                         at::ScalarType dtype, bool power_of_two, bool records) {
  const at::Tensor finite = at::isfinite(amax);
  if (records) pending.copy_(at::maximum(pending, at::where(finite, amax, 0.0)));
  const at::Tensor scale = scale_of(at::where(largest.gt(0), largest, amax), dtype, power_of_two);
  return at::where(finite, scale, std::numeric_limits<double>::quiet_NaN());
}

}  // namespace composite

namespace {

at::Tensor delayed_scale_meta(const at::Tensor& amax, const at::Tensor& /*pending*/,
                              const at::Tensor& /*largest*/, at::ScalarType /*dtype*/, bool /*power_of_two*/,
                              bool /*records*/) {
  return at::empty({}, amax.options());
}

TORCH_LIBRARY_FRAGMENT(titan, m) {
  // All [], fp32. pending = max(pending, amax) if `records`.
  m.def(
      "float8_delayed_scale(Tensor amax, Tensor(a!) pending, Tensor largest, ScalarType dtype, bool "
      "power_of_two, bool records) -> Tensor");
}
TORCH_LIBRARY_IMPL(titan, CompositeExplicitAutograd, m) {
  m.impl("float8_delayed_scale", composite::delayed_scale);
}
TORCH_LIBRARY_IMPL(titan, Meta, m) { m.impl("float8_delayed_scale", delayed_scale_meta); }

}  // namespace

at::Tensor delayed_scale(const at::Tensor& amax, const DelayedScale& history, at::ScalarType dtype,
                         bool power_of_two, bool records) {
  using Signature =
      at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, at::ScalarType, bool, bool);
  static const auto operation = ops::find_operator<Signature>("titan::float8_delayed_scale");
  return operation.call(amax, history.pending, history.largest, dtype, power_of_two, records);
}

DelayedScales DelayedScales::collect(const std::vector<torch::nn::Module*>& roots, int64_t history_len,
                                     at::Device device) {
  DelayedScales all;
  for (const torch::nn::Module* root : roots)
    for (const auto& named : root->named_modules(/*name_prefix=*/"", /*include_self=*/false))
      if (const auto* linear = dynamic_cast<const nn::LinearImpl*>(named.value().get()))
        if (auto scales = layer_scales(*linear->products()))
          all.layers_.push_back({named.key(), std::move(scales)});
  const auto rows = static_cast<int64_t>(3 * all.layers_.size());
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  all.history_ = at::zeros({rows, history_len}, options);
  all.largest_ = at::zeros({rows}, options);
  all.pending_ = at::zeros({rows}, options);
  int64_t row = 0;
  for (const Layer& layer : all.layers_)
    for (DelayedScale* scale : {&layer.scales->input, &layer.scales->weight, &layer.scales->grad_output}) {
      *scale = {all.largest_[row], all.pending_[row]};
      ++row;
    }
  return all;
}

at::Tensor DelayedScales::history(size_t i) const {
  return history_.narrow(0, 3 * static_cast<int64_t>(i), 3);
}

void DelayedScales::refresh() {
  largest_.copy_(history_.amax(1));
  for (const Layer& layer : layers_) layer.scales->ready = true;
}

void DelayedScales::update(const std::function<void(const at::Tensor&)>& reduce_max) {
  const at::NoGradGuard no_grad;
  reduce_max(pending_);
  const int64_t kept = history_.size(1) - 1;
  if (kept > 0) history_.narrow(1, 1, kept).copy_(history_.narrow(1, 0, kept).clone());
  history_.select(1, 0).copy_(pending_);
  refresh();
  pending_.zero_();
}

void DelayedScales::loaded() {
  const at::NoGradGuard no_grad;
  refresh();
  pending_.zero_();
}

}  // namespace titan::float8
