#include "plan/gpu/shapes.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <unordered_set>

#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>

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

// ---- temporary memory, as in LibTorch's
// https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/cuda, EmbeddingBackwardKernel.cu and
// ForeachReduceOp.cu, and native/transformers/cuda/flash_attn/flash_api.cpp

using Tensors = std::vector<at::Tensor>;

at::TensorOptions in_float(const at::Tensor& t) {
  return t.options().dtype(at::toOpMathType(t.scalar_type()));
}

// The memory that cub takes to sort numbers of 64 bits (cub/device/dispatch/dispatch_radix_sort.cuh): two lists, 1 KiB for each tile, 8 bytes for
// each bin of its 8 passes, and counters. LibTorch's code on virtual GPUs takes as much.
int64_t bytes_to_sort(int64_t count, int64_t compute_capability) {
  const int64_t tile = compute_capability >= 90 ? 4608 : 3840;
  return 2 * ((8 * count + 255) / 256 * 256) + 1024 * ((count + tile - 1) / tile) + 16'895;
}
constexpr int64_t bytes_to_scan = 1279;  // up to 1 KiB more from 32,768 numbers on

// The gradient is made after the first two: indices in order, and where they were.
void before_embedding_gradient(Tensors& memory, const at::Tensor& indices, int64_t compute_capability) {
  const auto numbers = [&] { return at::empty({indices.numel()}, indices.options()); };
  for (int i = 0; i < 2; ++i) memory.push_back(numbers());
  const at::Tensor places = numbers(),
                   for_sort = at::empty({bytes_to_sort(indices.numel(), compute_capability)},
                                        indices.options().dtype(at::kByte));
}
void after_embedding_gradient(Tensors& memory, const at::Tensor& gradient, const at::Tensor& indices,
                              int64_t vocabulary) {
  const int64_t count = indices.numel(), most_rows = std::min(count, vocabulary),
                sums = count / 10 + most_rows;
  const auto numbers = [&](int64_t size) { return at::empty({size}, indices.options()); };
  const auto for_scan = [&] { return at::empty({bytes_to_scan}, indices.options().dtype(at::kByte)); };
  for (const int64_t size : {count, int64_t{1}}) memory.push_back(numbers(size));
  { const at::Tensor rows = numbers(count), room = for_scan(); }
  for (int i = 0; i < 2; ++i) memory.push_back(numbers(most_rows));
  for_scan();
  for (const int64_t size : {int64_t{1}, sums}) memory.push_back(numbers(size));
  memory.push_back(at::empty({sums, gradient.size(-1)}, in_float(gradient)));
}

Tensors of_norms(const Tensors& tensors, at::ScalarType dtype) {
  constexpr int64_t chunk = 65'536;
  int64_t most_chunks = 0;
  for (const at::Tensor& t : tensors) most_chunks = std::max(most_chunks, (t.numel() + chunk - 1) / chunk);
  return {at::empty({static_cast<int64_t>(tensors.size()) * most_chunks},
                    tensors.front().options().dtype(dtype))};
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// In how many parts FlashAttention cuts the keys, so that few blocks of queries fill the device.
int64_t parts_of_keys(int64_t blocks_of_queries, int64_t blocks_of_keys, int64_t multiprocessors) {
  const int64_t places = 2 * multiprocessors, most = std::min<int64_t>({128, places, blocks_of_keys});
  if (static_cast<float>(blocks_of_queries) >= 0.8f * static_cast<float>(places)) return 1;
  const auto differs = [&](int64_t parts) {
    return parts == 1 || ceil_div(blocks_of_keys, parts) != ceil_div(blocks_of_keys, parts - 1);
  };
  const auto efficiency = [&](int64_t parts) {
    const float waves = static_cast<float>(blocks_of_queries * parts) / static_cast<float>(places);
    return waves / std::ceil(waves);
  };
  float best = 0;
  for (int64_t parts = 1; parts <= most; ++parts)
    if (differs(parts)) best = std::max(best, efficiency(parts));
  for (int64_t parts = 1; parts <= most; ++parts)
    if (differs(parts) && efficiency(parts) >= 0.85 * best) return parts;
  return 1;
}

// Sums and outputs of the parts of the keys in fp32. q and k are [batch, heads, tokens, features].
Tensors of_flash(const at::Tensor& q, const at::Tensor& k, int64_t multiprocessors) {
  const int64_t size = q.size(-1), rows = q.size(0) * q.size(1), queries = q.size(2),
                keys_of_block = size <= 64    ? 256
                                : size <= 128 ? 128
                                              : 64,
                multiple = size <= 128 ? 32 : 64;
  const int64_t parts =
      parts_of_keys(rows * ceil_div(queries, 64), ceil_div(k.size(2), keys_of_block), multiprocessors);
  if (parts == 1) return {};
  const auto options = q.options().dtype(at::kFloat);
  return {at::empty({parts, rows, queries}, options),
          at::empty({parts, rows, queries, ceil_div(size, multiple) * multiple}, options)};
}

// Sums of gradients in fp32, and gradients of each head's own keys and values if several heads share them. `rows` are
// the queries with their padding.
Tensors of_flash_backward(const at::Tensor& q, int64_t batch, int64_t heads, int64_t heads_of_keys,
                          int64_t rows, int64_t keys, int64_t multiprocessors) {
  const int64_t size = q.size(-1), multiple = size <= 128 ? 32 : 64,
                rounded = (size + multiple - 1) / multiple * multiple;
  int64_t parts = 1;
  if (at::globalContext().deterministicAlgorithms()) {
    const int64_t blocks = batch * heads;
    parts = (multiprocessors + blocks - 1) / blocks;
  }
  const auto options = q.options().dtype(at::kFloat);
  Tensors memory{at::empty({heads, rows}, options), at::empty({parts, rows, heads, rounded}, options)};
  if (heads != heads_of_keys)
    for (int i = 0; i < 2; ++i) memory.push_back(at::empty({keys, heads, size}, q.options()));
  return memory;
}

}  // namespace

Temporaries::Temporaries(const std::string& name, std::span<const at::IValue> arguments,
                         int64_t multiprocessors, int64_t compute_capability) {
  const auto tensor = [=](size_t i) { return arguments[i].toTensor(); };
  if (name == "aten::embedding_dense_backward") {
    if (tensor(1).numel() <= 3072) return;
    before_embedding_gradient(memory_, tensor(1), compute_capability);
    rest_ = [=, this] { after_embedding_gradient(memory_, tensor(0), tensor(1), arguments[2].toInt()); };
  } else if (name == "aten::_foreach_norm") {
    const Tensors tensors = arguments[0].toTensorVector();
    const bool is_given = arguments.size() > 2 && !arguments[2].isNone();
    const at::ScalarType dtype = is_given ? arguments[2].toScalarType() : tensors.front().scalar_type();
    memory_ = of_norms(tensors, at::toOpMathType(dtype));
  } else if (name == "aten::_scaled_dot_product_flash_attention") {
    rest_ = [=, this] { memory_ = of_flash(tensor(0), tensor(1), multiprocessors); };
  } else if (name == "aten::_scaled_dot_product_flash_attention_backward") {
    // The kernel reads the output and its gradient as [batch, tokens, heads, features].
    for (const size_t i : {0, 4}) copy_if_strided(tensor(i).transpose(1, 2));
    rest_ = [=, this] {
      const at::Tensor q = tensor(1), k = tensor(2);
      const int64_t batch = q.size(0), rows = batch * ((q.size(2) + 127) / 128 * 128);
      add(of_flash_backward(q, batch, q.size(1), k.size(1), rows, batch * k.size(2), multiprocessors));
    };
  } else if (name == "aten::_flash_attention_backward") {  // its sequences are packed
    for (const size_t i : {0, 4}) copy_if_strided(tensor(i));
    rest_ = [=, this] {
      const at::Tensor q = tensor(1), k = tensor(2);
      const int64_t batch = tensor(6).numel() - 1;
      add(of_flash_backward(q, batch, q.size(1), k.size(1), q.size(0) + 128 * batch, k.size(0),
                            multiprocessors));
    };
  }
}
void Temporaries::copy_if_strided(const at::Tensor& t) {
  if (!t.is_contiguous()) memory_.push_back(at::empty(t.sizes(), t.options()));
}
void Temporaries::add(std::vector<at::Tensor> tensors) {
  for (at::Tensor& each : tensors) memory_.push_back(std::move(each));
}
Temporaries::~Temporaries() {  // in reverse, as local variables are freed
  while (!memory_.empty()) memory_.pop_back();
}
void Temporaries::take_rest() {
  if (rest_) rest_();
}

// https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/cuda/Copy.cu
bool is_one_memcpy(const at::Tensor& self, const at::Tensor& source) {
  if (self.dtype() != source.dtype() || self.is_conj() != source.is_conj() ||
      self.is_neg() != source.is_neg())
    return false;
  return at::TensorIteratorConfig()
      .add_output(self)
      .add_const_input(source)
      .resize_outputs(false)
      .check_all_same_device(false)
      .build()
      .is_contiguous();
}

// https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/ForeachUtils.h
void raise_versions_of_lists(const c10::FunctionSchema& schema, std::span<const at::IValue> arguments,
                             bool is_cpu) {
  static const std::unordered_set<std::string> without = {"aten::_foreach_lerp_", "aten::_foreach_zero_"};
  if (!schema.name().starts_with("aten::_foreach_") || (!is_cpu && without.contains(schema.name()))) return;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite() || !arguments[i].isTensorList()) continue;
    for (const at::Tensor& t : arguments[i].toTensorVector())
      if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  }
}

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
