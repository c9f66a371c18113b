// [Note: costs of operations]
// Bytes are those of an ideal kernel: each element of an input is read once and each element of an output is
// written once, however often a real one does. An input that is written in place counts as both, unless the
// operation ignores its old value. Expanded tensors have only the elements that are in memory, and lookups
// read only the rows that they copy.
//
// A product of [N, K] and [K, M] takes 2 N K M operations. Attention takes two products forward and five
// backward (the scores are computed again), each over the pairs of a query and a key that it sees: half of
// the matrix, if it is causal. Model FLOPs (metrics' tflops) count the whole matrix, and four backward.

#include "observe/operation_costs.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorOptions.h>

namespace titan::train {

namespace {

using Names = std::initializer_list<std::string_view>;

bool is_one_of(std::string_view name, Names names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_product(std::string_view name) {
  return is_one_of(name,
                   {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::baddbmm_",
                    "aten::_scaled_mm", "titan::float8_put_product", "mkldnn::_linear_pointwise"});
}

// By a part of the name; null for other operators.
const char* known_kind(std::string_view name) {
  static constexpr std::array<std::pair<std::string_view, const char*>, 17> kinds = {{
      {"attention", "attention"},
      {"titan::attend_", "attention"},
      {"rms_norm", "norms"},
      {"layer_norm", "norms"},
      {"titan::rotary", "rotary"},
      {"titan::swiglu", "swiglu"},
      {"titan::vocabulary_", "loss"},
      {"cross_entropy", "loss"},
      {"log_softmax", "loss"},
      {"nll_loss", "loss"},
      {"embedding", "embedding"},
      {"titan::float8_", "copies"},
      {"copy_", "copies"},
      {"aten::cat", "copies"},
      {"aten::constant_pad_nd", "copies"},
      {"aten::_fused_adam", "optimizer"},
      {"titan::adam_", "optimizer"},
  }};
  if (is_product(name)) return "products";
  const auto found = std::find_if(kinds.begin(), kinds.end(),
                                  [&](const auto& kind) { return name.find(kind.first) != name.npos; });
  return found == kinds.end() ? nullptr : found->second;
}

// Operators that return a tensor without writing to it, and don't say so in their schema.
bool only_allocates(std::string_view name) {
  return name.starts_with("aten::empty") || name.starts_with("aten::new_empty") ||
         is_one_of(name, {"aten::_unsafe_view", "aten::resize_", "aten::set_", "aten::record_stream"});
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

bool is_new_tensor(const c10::Argument& output) {
  return !output.alias_info() && (output.type()->isSubtypeOf(*c10::TensorType::get()) ||
                                  output.type()->isSubtypeOf(*c10::ListType::ofTensors()));
}

double bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return 0;
  auto bytes = static_cast<double>(tensor.element_size());
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.size(dim) == 0 || tensor.stride(dim) != 0) bytes *= static_cast<double>(tensor.size(dim));
  return bytes;
}

double bytes_of(const c10::IValue& value) {
  if (value.isTensor()) return bytes_of(value.toTensor());
  double bytes = 0;
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) bytes += bytes_of(tensor);
  } else if (value.isList()) {  // optional tensors, or numbers
    for (const c10::IValue& each : value.toListRef())
      bytes += each.isTensor() ? bytes_of(each.toTensor()) : 0;
  }
  return bytes;
}

// Pairs of a query and a key that it sees; query i sees the keys 0 .. first + i.
double causal_pairs(int64_t queries, int64_t keys, int64_t first) {
  double pairs = 0;
  for (int64_t i = 1; i <= queries; ++i)
    pairs += static_cast<double>(std::clamp<int64_t>(first + i, 0, keys));
  return pairs;
}

}  // namespace

Operation::Operation(const c10::FunctionSchema& schema, c10::DeviceType device)
    : schema_(schema), name_(schema.name()) {
  const auto& outputs = schema_.returns();
  const auto& inputs = schema_.arguments();
  counts_ = !only_allocates(name_) && (std::any_of(outputs.begin(), outputs.end(), is_new_tensor) ||
                                       std::any_of(inputs.begin(), inputs.end(), is_written));
  const auto handle = c10::Dispatcher::singleton().findOp(schema_.operator_name());
  is_whole_ = handle && handle->hasKernelForDispatchKey(at::TensorOptions(device).computeDispatchKey());
  // It sums without a call of its kernel's operator, but fills its result by one.
  if (name_ == "aten::sum") is_whole_ = true;
  if (const char* const known = known_kind(name_)) {
    kind_ = known;
    is_whole_ = true;
  }
  if (name_ == "titan::float8_multiply_vectors") is_whole_ = false;  // LibTorch's product is inside
  overwrites_ =
      is_one_of(name_, {"aten::copy_", "aten::_foreach_copy_", "aten::zero_", "aten::_foreach_zero_",
                        "aten::fill_", "aten::uniform_", "aten::normal_", "aten::random_"});
  looks_up_rows_ = is_one_of(name_, {"aten::embedding", "aten::index_select", "aten::gather", "aten::index"});
}

size_t Operation::place_of(std::initializer_list<const char*> names) const {
  const auto& arguments = schema_.arguments();
  for (const char* name : names)
    for (size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].name() == name) return i;
  return arguments.size();
}

OperationCost Operation::of_inputs(Values inputs) const {
  OperationCost cost;
  const auto& arguments = schema_.arguments();
  for (size_t i = 0; i < std::min(arguments.size(), inputs.size()); ++i) {
    const double bytes = bytes_of(inputs[i]);
    const bool written = is_written(arguments[i]);
    if (written) cost.bytes_written += bytes;
    if (!written || !(overwrites_ || arguments[i].is_out())) cost.bytes_read += bytes;
  }
  correct(inputs, cost);
  if (is_product(name_)) add_product(inputs, cost);
  if (kind_ == std::string_view("attention") && name_ != "titan::merge_attention_")
    add_attention(inputs, cost);
  if (cost.flops > 0)
    cost.dtype = inputs[place_of({"mat2", "batch2", "W", "q", "query"})].toTensor().scalar_type();
  return cost;
}

// Operators that read an argument only in part, or that don't write one that their schema says they may.
void Operation::correct(Values inputs, OperationCost& cost) const {
  if (looks_up_rows_) cost.bytes_read -= bytes_of(inputs[0]);  // add_outputs knows how much of it
  if (name_ == "titan::rotary") {
    const at::Tensor& table = inputs[1].toTensor();
    const int64_t rows =
        inputs[2].isTensor() ? inputs[2].toTensor().numel() : inputs[0].toTensorVector()[0].size(1);
    const auto unread = static_cast<double>(std::max<int64_t>(0, table.size(0) - rows));
    cost.bytes_read -= bytes_of(table) * unread / static_cast<double>(table.size(0));
  }
  if (name_ == "titan::float8_put_product" && !inputs[place_of({"adds"})].toBool())
    cost.bytes_read -= bytes_of(inputs[0]);
  if (name_ == "titan::cross_entropy_" && !inputs[2].toBool()) cost.bytes_written = 0;
  // The fused optimizers may scale gradients in place, which isn't asked for here.
  if (name_.starts_with("aten::_fused_adam")) cost.bytes_written -= bytes_of(inputs[1]);
}

void Operation::add_outputs(Values outputs, OperationCost& cost) const {
  double made = 0;
  for (size_t i = 0; i < std::min(outputs.size(), schema_.returns().size()); ++i)
    if (is_new_tensor(schema_.returns()[i])) made += bytes_of(outputs[i]);
  cost.bytes_written += made;
  if (looks_up_rows_) cost.bytes_read += made;
}

void Operation::add_product(Values inputs, OperationCost& cost) const {
  const at::Tensor& left = inputs[place_of({"mat1", "batch1", "X", "self"})].toTensor();
  const at::Tensor& right = inputs[place_of({"mat2", "batch2", "W"})].toTensor();
  const int64_t columns = right.size(name_ == "mkldnn::_linear_pointwise" ? 0 : -1);
  cost.flops = 2 * static_cast<double>(left.numel()) * static_cast<double>(columns);
  const bool is_batched = right.dim() == 3;
  const int64_t k = left.size(-1), batches = is_batched ? right.size(0) : 1;
  cost.shape = {.batches = batches,
                .m = left.numel() / std::max<int64_t>(k * batches, 1),
                .n = right.dim() > 1 ? columns : 1,
                .k = k};
}

void Operation::add_attention(Values inputs, OperationCost& cost) const {
  const at::Tensor& q = inputs[place_of({"q", "query"})].toTensor();
  const at::Tensor& k = inputs[place_of({"k", "key"})].toTensor();
  const at::Tensor& v = inputs[place_of({"v", "value"})].toTensor();
  const int64_t sequence = name_.starts_with("titan::") ? 1 : 2, heads = 3 - sequence;
  const int64_t queries = q.size(sequence), keys = k.size(sequence);
  const size_t first = place_of({"first_query"}), causal = place_of({"is_causal"});
  const bool is_causal = causal == inputs.size() || inputs[causal].toBool();
  const double pairs = is_causal
                           ? causal_pairs(queries, keys, first == inputs.size() ? 0 : inputs[first].toInt())
                           : static_cast<double>(queries * keys);
  const auto size = static_cast<double>(q.size(-1)), value_size = static_cast<double>(v.size(-1));
  const bool is_backward = name_.find("backward") != std::string::npos;
  const double of_a_pair = is_backward ? 6 * size + 4 * value_size : 2 * size + 2 * value_size;
  cost.flops = static_cast<double>(q.size(0) * q.size(heads)) * pairs * of_a_pair;
  cost.shape = {.batches = q.size(0) * q.size(heads), .m = queries, .n = keys, .k = q.size(-1)};
}

}  // namespace titan::train
