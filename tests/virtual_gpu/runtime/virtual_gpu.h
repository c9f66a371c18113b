#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

/// A GPU that exists in host memory only. The libraries in this folder stand in for CUDA's, so that LibTorch's own CUDA and NCCL
/// code runs without a GPU. See docs/virtual_gpu.md.
///
/// - An **operation** is work on a stream: a kernel, a copy, a collective. It is queued by the host and run later by the scheduler.
/// - A **stream** is a queue of operations that run one after another.
/// - The **scheduler** is one thread per process; it runs the first operation of a stream that may run.
namespace virtual_gpu {

/// One attempt to run an operation; returns false if it must be tried again, because another rank hasn't done its part.
using Attempt = std::function<bool()>;

/// Sizes and strides of a tensor that has gaps between its elements.
struct Strided {
  std::vector<int64_t> sizes, strides;
  size_t itemsize = 1;
};

/// Bytes of device memory, or of pinned host memory, that an operation reads or writes.
struct Range {
  const void* data = nullptr;
  size_t bytes = 0;
  bool is_written = false;
  bool is_read_too = false;       ///< before it is written
  bool is_computed_with = false;  ///< an operation reads these bytes to compute with them
  bool arrives_later = false;     ///< the host sees what is written when it has synchronized
  std::shared_ptr<const Strided> strided = nullptr;  ///< none: all bytes of the range
};

struct Stamp;
struct Count;
struct Operation {
  std::string name;
  std::vector<Range> ranges;
  /// Called once for each run: once for a queued operation, and at each launch of a graph that recorded it.
  std::function<Attempt()> begin;
  /// If the operation is recorded: makes `begin` when the host launches the graph. May be empty.
  std::function<std::function<Attempt()>()> begin_at_launch = nullptr;
  std::shared_ptr<const Stamp> stamp = nullptr;  ///< given when it is queued; see runtime/races.h
  std::shared_ptr<const std::string> label =
      nullptr;                 ///< given when it is queued: its name, and the module that it belongs to
  const void* code = nullptr;  ///< CUDA loads it at the first launch; null: the name stands for it
  Count* count = nullptr;      ///< where it is counted; see runtime/counters.h
  std::shared_ptr<const std::string> recorded_in =
      nullptr;                  ///< if a graph's: the module, for its launches' counts
  bool is_continued = false;    ///< a further launch of one InOperation
  bool is_bookkeeping = false;  ///< the virtual GPU needs it, and a real one does not: not counted
};

/// An operation whose work is one call that never waits for another rank.
Operation computation(std::string name, std::vector<Range> ranges, std::function<void()> work);

/// Queues the operation, or records it if the stream is being captured. Blocks the host only where
/// VIRTUAL_GPU_QUEUE_LIMIT or CUDA_LAUNCH_BLOCKING says so. An error, which cudaGetLastError returns, too, if the capture has failed.
cudaError_t submit(cudaStream_t stream, Operation operation);

/// A kernel's accesses to device memory.
struct Accessed {
  std::vector<Range> ranges;     ///< each byte once
  uint64_t bytes_requested = 0;  ///< by threads: a byte counts each time
};

/// For an operation that learns what it accesses by running. Only on the scheduler's thread.
void add_accesses(Accessed accessed);

/// The host waits in this call until all operations of the stream have run. A stream that is being captured can't be waited for.
void wait_for(cudaStream_t stream, const std::string& call);

bool is_capturing(cudaStream_t stream);

/// Whether the device's memory there was taken from the driver in several pieces (cuMemCreate).
bool is_of_several_pieces(const void* data, size_t bytes);

/// The host itself reads or writes these bytes now. Only pinned memory is checked; the device uses no other memory of the host.
void check_host_access(const Range& range, const std::string& name);

/// The range of at::RecordFunction that the calling thread is in, for counters and for reports of races.
bool needs_modules();
void enter_module(std::string name);
void leave_module();

/// For counters, if VIRTUAL_GPU_COUNTERS asks for them: a call that isn't an operation of a stream.
void count_call(const std::string& call);

/// False in memory-only mode, in which operations on more than small_bytes are not run.
bool computes();
constexpr size_t small_bytes = 16384;

/// With VIRTUAL_GPU_LIBTORCH, which is memory-only mode with LibTorch's own code of its operations: all that the host does is real, and kernels
/// that have no host version are launched and do nothing.
bool runs_libtorch();

/// In its scope, all that the calling thread launches is one operation with this name, except copies of CUDA's within aten::copy_, which keep
/// their names. The outermost scope counts.
class InOperation {
 public:
  explicit InOperation(std::string name);
  ~InOperation();
  InOperation(const InOperation&) = delete;
  InOperation& operator=(const InOperation&) = delete;

 private:
  bool is_outermost_;
};

/// The allocation that contains the address: the program's own, or the part of it that LibTorch's allocator has handed out. Empty if
/// there is none. The device is about to use it: bytes on their way to pinned memory arrive first.
Range find_allocation(const void* address);

/// LibTorch's allocator hands out this part of its memory, or takes it back. Called in the order of the stream that owns it.
void note_part(const void* address, size_t bytes, bool is_handed_out);

/// Whether races are looked for.
bool checks_races();

/// Whether memory is filled with NaN when the allocator hands it out and when it takes it back.
bool poisons();

/// Compute capability of the profile, as 90 for 9.0.
int compute_capability();

/// In its scope the calling thread does the virtual GPU's own work, which takes longer than what a real GPU's libraries do there.
/// virtual_gpu_own_ns() adds it up, so that a benchmark of the host can leave it out. May be nested.
class OwnWork {
 public:
  OwnWork();
  ~OwnWork();
  OwnWork(const OwnWork&) = delete;
  OwnWork& operator=(const OwnWork&) = delete;
};

/// Prints the message and ends the program: something is used that the virtual GPU lacks.
[[noreturn]] void not_supported(const std::string& what, const std::string& remedy);

/// CUDA's error, which cudaGetLastError returns, too, for a launch of no block or thread, or of more than a device takes.
cudaError_t check_launch(dim3 grid, dim3 block);

/// A function that runs a kernel on the host. `arguments` point at the kernel's arguments, as in cudaLaunchKernel.
struct Launch {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  void** arguments = nullptr;
  cudaStream_t stream = nullptr;
};
using HostKernel = std::function<void(const Launch&)>;

/// Adds a host version for all kernels whose demangled name contains `name`. It is called by the launch itself,
/// where it copies the arguments, and then submits an operation.
void register_kernel(std::string name, HostKernel kernel);

}  // namespace virtual_gpu
