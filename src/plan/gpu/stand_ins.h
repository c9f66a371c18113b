#pragma once

// Tensors that stand for a GPU's, for LibTorch's kernels of other devices. Planned and virtual GPUs (tests/virtual_gpu) use them.

#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

namespace titan::plan {

/// Makes tensors of another backend that stand for CUDA tensors: on the CPU over the same memory, for computing, or without
/// memory on the meta device, for shapes. Tensors that share a storage share one here, too. The memory isn't owned: a caching
/// allocator gives it to nobody else before the stream has come past.
class StandIns {
 public:
  enum class Kind { cpu, meta };
  explicit StandIns(Kind kind) : kind_(kind) {}

  /// Other tensors are returned as they are; CPU tensors are copied, because the caller may change them before the
  /// operation runs.
  at::Tensor stand_in(const at::Tensor& tensor);
  c10::IValue stand_in(const c10::IValue& value);

  struct Pair {
    at::Tensor cuda;
    at::Tensor other;
  };
  const std::vector<Pair>& pairs() const { return pairs_; }

 private:
  Kind kind_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_;
  std::vector<Pair> pairs_;
};

/// The tensor that a result stands for: an argument, a view of an argument, or a new one on `device`, which `is_new` tells.
at::Tensor result_for(const at::Tensor& result, const StandIns& arguments, c10::Device device, bool& is_new);

/// Calls `visit` for each tensor in the value: a tensor, a list of tensors, or a list of optional ones.
template <class Visit>
void for_each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor && tensor->defined()) visit(*tensor);
  }
}

}  // namespace titan::plan
