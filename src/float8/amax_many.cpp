#include "float8/amax_many.h"

#include <vector>

#include <torch/library.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include "float8/composite.h"
#include "ops/operators.h"
#include "titan/core/error.h"
#include "titan/float8/cast.h"

namespace titan::float8 {

namespace composite {

at::Tensor amax_many(at::TensorList xs) {
  std::vector<at::Tensor> found;
  for (const at::Tensor& x : xs) found.push_back(amax(x, std::nullopt));
  return at::stack(found);
}

}  // namespace composite

namespace {

at::Tensor amax_many_meta(at::TensorList xs) {
  return at::empty({static_cast<int64_t>(xs.size())}, xs[0].options().dtype(at::kFloat));
}

TORCH_LIBRARY_FRAGMENT(titan, m) {
  // The largest magnitude of each, fp32 [n].
  m.def("float8_amax_many(Tensor[] xs) -> Tensor");
}
TORCH_LIBRARY_IMPL(titan, CompositeExplicitAutograd, m) { m.impl("float8_amax_many", composite::amax_many); }
TORCH_LIBRARY_IMPL(titan, Meta, m) { m.impl("float8_amax_many", amax_many_meta); }

}  // namespace

at::Tensor amax_many(at::TensorList xs) {
  TITAN_CHECK(!xs.empty(), "float8: the largest magnitudes of no tensors");
  for (const at::Tensor& x : xs)
    TITAN_CHECK(x.numel() > 0, "float8: the largest magnitude of ", x.sizes(), ", which is empty");
  using Signature = at::Tensor(at::TensorList);
  static const auto operation = ops::find_operator<Signature>("titan::float8_amax_many");
  return operation.call(xs);
}

}  // namespace titan::float8
