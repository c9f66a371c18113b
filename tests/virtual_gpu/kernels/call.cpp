#include "kernels/call.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <unordered_set>

namespace virtual_gpu {
namespace {

size_t extent_bytes(const at::Tensor& t) {
  return t.numel() == 0 ? 0 : at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize());
}

// False for operations that move bytes, or whose index says which bytes they read or change: the others may be padding.
bool computes_with_all(const std::string& name) {
  static const std::unordered_set<std::string> others = {"aten::copy_",
                                                         "aten::_foreach_copy_",
                                                         "aten::cat",
                                                         "aten::_chunk_cat",
                                                         "aten::split_with_sizes_copy",
                                                         "aten::index",
                                                         "aten::index_select",
                                                         "aten::gather",
                                                         "aten::take",
                                                         "aten::embedding",
                                                         "aten::masked_select",
                                                         "aten::where",
                                                         "aten::index_put_",
                                                         "aten::_index_put_impl_",
                                                         "aten::index_copy_",
                                                         "aten::index_fill_",
                                                         "aten::index_add_",
                                                         "aten::scatter_",
                                                         "aten::scatter_add_",
                                                         "aten::scatter_reduce_",
                                                         "aten::masked_fill_",
                                                         "aten::masked_scatter_",
                                                         "aten::_foreach_zero_",
                                                         "aten::exponential_"};
  return !others.contains(name);
}

}  // namespace

Range range_of(const at::Tensor& t, bool is_written) {
  if (!t.has_storage()) return {};
  const auto* begin =
      static_cast<const char*>(t.storage().data()) + t.storage_offset() * static_cast<int64_t>(t.itemsize());
  Range range{begin, extent_bytes(t), is_written};
  if (!t.is_non_overlapping_and_dense())
    range.strided =
        std::make_shared<const Strided>(Strided{t.sizes().vec(), t.strides().vec(), t.itemsize()});
  return range;
}

void run_on_device(std::string name, const std::vector<at::Tensor>& reads,
                   const std::vector<at::Tensor>& writes, std::function<void()> work) {
  const OwnWork own;
  Operation operation{std::move(name), {}, {}};
  size_t largest = 0;
  const bool computes_with = computes_with_all(operation.name);
  const auto add = [&](const at::Tensor& t, bool is_written) {
    if (!t.defined() || !t.is_cuda()) return;
    Range range = range_of(t, is_written);
    range.is_computed_with = !is_written && computes_with;
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
  C10_CUDA_CHECK(submit(c10::cuda::getCurrentCUDAStream().stream(), std::move(operation)));
}

}  // namespace virtual_gpu
