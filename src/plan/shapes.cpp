#include "plan/shapes.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>

#include <unordered_map>

namespace titan::plan {
namespace {

using torch::jit::Stack;

at::Tensor like(const at::Tensor& t, at::IntArrayRef sizes) {
  return at::empty(sizes, t.options().device(at::kMeta));
}

// For each tensor of the list, a number.
Stack foreach_norm(const Stack& arguments) {
  c10::List<at::Tensor> norms;
  const auto dtype = arguments.size() > 2 ? arguments[2].toOptional<at::ScalarType>() : std::nullopt;
  for (const at::Tensor& t : arguments[0].toTensorVector())
    norms.push_back(at::empty({}, t.options().dtype(dtype.value_or(t.scalar_type()))));
  return {norms};
}

// The result has the argument's shape. The `out` that follows the argument is resized to it.
Stack pointwise_out(const Stack& arguments) {
  const at::Tensor out = arguments.back().toTensor();
  out.resize_(arguments[0].toTensor().sizes());
  return {out};
}

// The same for two arguments.
Stack pointwise_of_two_out(const Stack& arguments) {
  const at::Tensor out = arguments.back().toTensor();
  out.resize_(at::infer_size(arguments[0].toTensor().sizes(), arguments[1].toTensor().sizes()));
  return {out};
}

Stack index_select(const Stack& arguments) {
  const at::Tensor& self = arguments[0].toTensor();
  const int64_t dim = c10::maybe_wrap_dim(arguments[1].toInt(), self.dim());
  std::vector<int64_t> sizes = self.sizes().vec();
  if (!sizes.empty()) sizes[static_cast<size_t>(dim)] = arguments[2].toTensor().numel();
  return {like(self, sizes)};
}

Stack embedding_dense_backward(const Stack& arguments) {
  const at::Tensor& gradient = arguments[0].toTensor();
  return {like(gradient, {arguments[2].toInt(), gradient.size(-1)})};
}

}  // namespace

const ShapeRule* shape_rule(const std::string& name) {
  static const std::unordered_map<std::string, ShapeRule> rules = {
      {"aten::_foreach_norm", foreach_norm},
      {"aten::abs", pointwise_out},
      {"aten::logical_and", pointwise_of_two_out},
      {"aten::logical_not", pointwise_out},
      {"aten::logical_or", pointwise_of_two_out},
      {"aten::logical_xor", pointwise_of_two_out},
      {"aten::index_select", index_select},
      {"aten::embedding_dense_backward", embedding_dense_backward},
  };
  const auto found = rules.find(name);
  return found == rules.end() ? nullptr : &found->second;
}

}  // namespace titan::plan
