// titan::float8_delayed_scale on a CPU: one number, for which ten operations would be the cost.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include <torch/library.h>

#include <ATen/ops/empty.h>

#include "titan/float8/cast.h"

namespace titan::float8 {

namespace {

at::Tensor delayed_scale_cpu(const at::Tensor& amax, const at::Tensor& pending, const at::Tensor& largest,
                             at::ScalarType dtype, bool power_of_two, bool records) {
  at::Tensor out = at::empty({}, amax.options());
  auto* to = out.mutable_data_ptr<float>();
  const float mine = *amax.const_data_ptr<float>(), history = *largest.const_data_ptr<float>();
  *to = std::numeric_limits<float>::quiet_NaN();
  if (!std::isfinite(mine)) return out;
  auto* noted = pending.mutable_data_ptr<float>();
  if (records) *noted = std::max(*noted, mine);
  const double used = history > 0 ? history : mine;
  *to = static_cast<float>(largest_value(dtype) / std::max(used, 1e-12));
  if (power_of_two) *to = std::bit_cast<float>(std::bit_cast<uint32_t>(*to) & 0x7f800000U);
  return out;
}

TORCH_LIBRARY_IMPL(titan, CPU, m) { m.impl("float8_delayed_scale", delayed_scale_cpu); }

}  // namespace
}  // namespace titan::float8
