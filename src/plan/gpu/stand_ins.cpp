#include "plan/gpu/stand_ins.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>

namespace titan::plan {

at::Tensor StandIns::stand_in(const at::Tensor& t) {
  if (!t.defined() || !t.is_cuda()) {
    if (!t.defined() || !t.device().is_cpu()) return t;
    TORCH_CHECK(t.dim() == 0,
                "Expected all tensors to be on the same device, but one is on the CPU: ", t.sizes());
    at::Tensor copy = t.clone();
    // Numbers promote types less than tensors do.
    copy.unsafeGetTensorImpl()->set_wrapped_number(t.unsafeGetTensorImpl()->is_wrapped_number());
    return copy;
  }
  TORCH_CHECK(pairs_.empty() || pairs_.front().cuda.device() == t.device(),
              "Expected all tensors to be on the same device, but found at least two devices, ",
              pairs_.front().cuda.device(), " and ", t.device());
  auto* impl = t.unsafeGetTensorImpl();
  const c10::Storage& cuda_storage = impl->unsafe_storage();
  c10::Storage& storage = storages_[cuda_storage.unsafeGetStorageImpl()];
  const bool is_meta = kind_ == Kind::meta;
  if (!storage) {
    auto data = is_meta ? at::DataPtr(nullptr, at::kMeta)
                        : at::DataPtr(const_cast<void*>(cuda_storage.data()), at::kCPU);
    storage =
        c10::Storage(c10::Storage::use_byte_size_t(), cuda_storage.nbytes(), std::move(data),
                     is_meta ? c10::GetAllocator(at::kMeta) : c10::GetCPUAllocator(), /*resizable=*/true);
  }
  const auto key = is_meta ? c10::DispatchKey::Meta : c10::DispatchKey::CPU;
  auto result =
      at::detail::make_tensor<at::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), t.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (impl->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (t.is_conj()) result._set_conj(true);
  if (t.is_neg()) result._set_neg(true);
  pairs_.push_back({t, result});
  return result;
}

c10::IValue StandIns::stand_in(const c10::IValue& value) {
  if (value.isTensor()) return stand_in(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(stand_in(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& t : value.toOptionalTensorVector())
      list.push_back(t ? std::optional(stand_in(*t)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().is_cuda())
    return c10::Device(kind_ == Kind::meta ? at::kMeta : at::kCPU);
  return value;
}

at::Tensor result_for(const at::Tensor& result, const StandIns& arguments, c10::Device device, bool& is_new) {
  is_new = false;
  if (!result.defined()) return result;
  for (const auto& [cuda, other] : arguments.pairs())
    if (other.is_same(result)) return cuda;
  for (const auto& [cuda, other] : arguments.pairs()) {
    if (!result.has_storage() ||
        result.storage().unsafeGetStorageImpl() != other.storage().unsafeGetStorageImpl())
      continue;
    auto view = at::detail::make_tensor<at::TensorImpl>(
        c10::Storage(cuda.storage()), c10::DispatchKeySet(c10::DispatchKey::CUDA), result.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(),
                                                      result.storage_offset());
    return view;
  }
  is_new = true;
  const auto options = result.options().device(device);
  at::Tensor made = result.is_non_overlapping_and_dense()
                        ? at::empty_strided(result.sizes(), result.strides(), options)
                        : at::empty(result.sizes(), options);
  if (result.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

}  // namespace titan::plan
