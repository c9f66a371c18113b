#include "kernels/call.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
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
