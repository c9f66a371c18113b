#pragma once

// The least that an operation costs, by the shapes of its tensors: bytes that it has to read and write once,
// and the floating-point operations of products and attention.

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

namespace titan::train {

/// `batches` products of [m, k] and [k, n]; of attention: for each head of each sequence, m queries, n keys, and their size k.
struct ProductShape {
  int64_t batches = 0, m = 0, n = 0, k = 0;
};

struct OperationCost {
  double flops = 0;  ///< only products and attention have any; memory limits the others
  double bytes_read = 0, bytes_written = 0;
  at::ScalarType dtype = at::ScalarType::Undefined;  ///< that of the operands, if it has FLOPs
  ProductShape shape{};                              ///< if it has FLOPs
};

/// An operator of LibTorch's dispatcher.
class Operation {
 public:
  using Values = std::span<const c10::IValue>;

  /// `device`: the type of the tensors that it is called with.
  Operation(const c10::FunctionSchema& schema, c10::DeviceType device);

  /// It writes memory: it isn't a view, an allocation, or a question about a tensor.
  bool counts() const { return counts_; }
  /// It is a kernel, and what it calls is part of it. Others only count if nothing that they call does.
  bool is_whole() const { return is_whole_; }
  /// "products", "attention", "norms", "rotary", "swiglu", "loss", "embedding", "copies", "optimizer", "other".
  const char* kind() const { return kind_; }

  /// Without the outputs that it makes.
  OperationCost of_inputs(Values inputs) const;
  /// Adds them.
  void add_outputs(Values outputs, OperationCost& cost) const;

 private:
  size_t place_of(std::initializer_list<const char*> names) const;
  void add_product(Values inputs, OperationCost& cost) const;
  void add_attention(Values inputs, OperationCost& cost) const;
  void correct(Values inputs, OperationCost& cost) const;

  c10::FunctionSchema schema_;
  std::string name_;
  const char* kind_ = "other";
  bool counts_ = false, is_whole_ = false, overwrites_ = false, looks_up_rows_ = false;
};

}  // namespace titan::train
