#include "kernels/call.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

namespace virtual_gpu {
namespace {

size_t extent_bytes(const at::Tensor& t) {
  return t.numel() == 0 ? 0 : at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize());
}

}  // namespace

Range range_of(const at::Tensor& t, bool is_written) {
  if (!t.has_storage()) return {};
  const auto* begin =
      static_cast<const char*>(t.storage().data()) + t.storage_offset() * static_cast<int64_t>(t.itemsize());
  return {begin, extent_bytes(t), is_written};
}

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

void run_on_device(std::string name, const std::vector<at::Tensor>& reads,
                   const std::vector<at::Tensor>& writes, std::function<void()> work) {
  const OwnWork own;
  Operation operation{std::move(name), {}, {}};
  size_t largest = 0;
  const auto add = [&](const at::Tensor& t, bool is_written) {
    if (!t.defined() || !t.is_cuda()) return;
    const Range range = range_of(t, is_written);
    largest = std::max(largest, range.bytes);
    const auto same = std::ranges::find_if(
        operation.ranges, [&](const Range& r) { return r.data == range.data && r.bytes == range.bytes; });
    if (!is_written || same == operation.ranges.end()) {
      operation.ranges.push_back(range);
    } else {
      same->is_written = same->is_read_too = true;
    }
  };
  for (const at::Tensor& t : reads) add(t, false);
  for (const at::Tensor& t : writes) add(t, true);
  const bool is_run = computes() || largest <= small_bytes;
  // Operations inside a kernel are none of the program's.
  const auto run = [work = std::move(work)] {
    const at::DisableRecordFunctionGuard no_records;
    work();
  };
  operation = computation(
      operation.name, operation.ranges, is_run ? std::function<void()>(run) : [] {});
  submit(c10::cuda::getCurrentCUDAStream().stream(), std::move(operation));
}

}  // namespace virtual_gpu
