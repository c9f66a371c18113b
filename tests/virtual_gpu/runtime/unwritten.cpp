#include "runtime/unwritten.h"

#include <algorithm>
#include <map>
#include <utility>

#include "runtime/faults.h"
#include "runtime/races.h"

namespace virtual_gpu {
namespace {

// Bytes that nothing has written, by their first address.
struct Unwritten {
  uintptr_t end = 0;
  bool is_free = false;
};
std::map<uintptr_t, Unwritten>& unwritten() {
  static auto* u = new std::map<uintptr_t, Unwritten>;
  return *u;
}
int num_reads = 0;

// In memory-only mode most operations aren't run, and nobody knows what LibTitan's kernels would write.
bool is_watched() { return state().settings.checks_races && computes(); }

// The first one that has bytes of this range.
std::map<uintptr_t, Unwritten>::iterator find(uintptr_t begin, uintptr_t end) {
  auto& all = unwritten();
  auto found = all.upper_bound(begin);
  if (found != all.begin() && std::prev(found)->second.end > begin) --found;
  return found != all.end() && found->first < end ? found : all.end();
}

void remove(uintptr_t begin, uintptr_t end) {
  auto& all = unwritten();
  for (auto found = find(begin, end); found != all.end(); found = find(begin, end)) {
    const auto [first, piece] = *found;
    all.erase(found);
    if (first < begin) all[first] = {begin, piece.is_free};
    if (piece.end > end) all[end] = piece;
  }
}

// Calls the function for each run of bytes without a gap, until it returns true.
template <class Function>
bool any_run(const Range& range, Function function) {
  const auto begin = reinterpret_cast<uintptr_t>(range.data);
  if (!range.strided) return function(begin, begin + range.bytes);
  std::vector<std::pair<size_t, int64_t>> dims;  // stride in bytes, size
  const auto& [sizes, strides, itemsize] = *range.strided;
  for (size_t i = 0; i < sizes.size(); ++i)
    if (sizes[i] > 1 && strides[i] > 0)
      dims.emplace_back(static_cast<size_t>(strides[i]) * itemsize, sizes[i]);
  std::ranges::sort(dims, std::greater<>());
  size_t run = itemsize;
  for (; !dims.empty() && dims.back().first == run; dims.pop_back())
    run *= static_cast<size_t>(dims.back().second);
  std::vector<int64_t> index(dims.size());
  for (uintptr_t at = begin;;) {
    if (function(at, at + run)) return true;
    size_t i = dims.size();
    for (; i > 0; --i) {
      const auto& [stride, size] = dims[i - 1];
      at += stride;
      if (++index[i - 1] < size) break;
      at -= stride * static_cast<size_t>(size);
      index[i - 1] = 0;
    }
    if (i == 0) return false;
  }
}

void check_read(const Operation& operation, const Range& range) {
  const auto begin = reinterpret_cast<uintptr_t>(range.data);
  if (find(begin, begin + range.bytes) == unwritten().end()) return;
  any_run(range, [&](uintptr_t first, uintptr_t end) {
    const auto found = find(first, end);
    if (found == unwritten().end()) return false;
    const uintptr_t from = std::max(first, found->first), to = std::min(end, found->second.end);
    report_fault("virtual GPU: UNWRITTEN: %s reads %zu bytes at %#zx, %zu bytes into its argument, %s\n",
                 operation.label->c_str(), size_t{to - from}, size_t{from}, size_t{from - begin},
                 found->second.is_free ? "which the allocator has taken back"
                                       : "which nothing has written since the allocator handed them out");
    if (operation.stamp && operation.stamp->calls) print_calls(*operation.stamp->calls);
    ++num_reads;
    end_at_fault();
    remove(begin, begin + range.bytes);  // one report is enough
    return true;
  });
}

void note_write(const Range& range) {
  constexpr int most_runs = 4096;  // if a tensor has more of them, its gaps count as written, too
  const auto begin = reinterpret_cast<uintptr_t>(range.data);
  if (find(begin, begin + range.bytes) == unwritten().end()) return;
  int num_runs = 0;
  if (any_run(range, [&](uintptr_t, uintptr_t) { return ++num_runs > most_runs; }))
    remove(begin, begin + range.bytes);
  else
    any_run(range, [&](uintptr_t first, uintptr_t end) {
      remove(first, end);
      return false;
    });
}

}  // namespace

void note_unwritten(const void* data, size_t bytes, bool is_free) {
  if (!is_watched()) return;
  forget_unwritten(data, bytes);
  const auto begin = reinterpret_cast<uintptr_t>(data);
  unwritten()[begin] = {begin + bytes, is_free};
}

void forget_unwritten(const void* data, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  remove(begin, begin + bytes);
}

void check_reads(const Operation& operation) {
  if (operation.is_bookkeeping || !is_watched()) return;
  for (const Range& range : operation.ranges)
    if (range.is_computed_with && range.bytes > 0) check_read(operation, range);
  for (const Range& range : operation.ranges)
    if (range.is_written && range.bytes > 0) note_write(range);
}

}  // namespace virtual_gpu

// Waits for what is queued, because reads are checked when operations have run.
extern "C" int virtual_gpu_num_unwritten_reads() {
  using namespace virtual_gpu;
  Lock lock(state().mutex);
  for (int device = 0; device < state().settings.num_devices; ++device) wait_for_device(lock, device);
  return num_reads;
}
