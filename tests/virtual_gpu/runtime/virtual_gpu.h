#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
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

/// Bytes of device memory, or of pinned host memory, that an operation reads or writes.
struct Range {
  const void* data = nullptr;
  size_t bytes = 0;
  bool is_written = false;
};

struct Operation {
  std::string name;
  std::vector<Range> ranges;
  /// Called once for each run: once for a queued operation, and at each launch of a graph that recorded it.
  std::function<Attempt()> begin;
};

/// An operation whose work is one call that never waits for another rank.
Operation computation(std::string name, std::vector<Range> ranges, std::function<void()> work);

/// Queues the operation, or records it if the stream is being captured. Blocks the host only where
/// VIRTUAL_GPU_QUEUE_LIMIT or CUDA_LAUNCH_BLOCKING says so.
void submit(cudaStream_t stream, Operation operation);

/// Waits until all operations of the stream have run.
/// @throws nothing; a stream that is being captured can't be waited for, see is_capturing.
void wait_for(cudaStream_t stream);

bool is_capturing(cudaStream_t stream);

/// The host itself reads or writes these bytes now. Only pinned memory is checked; the device uses no other memory of the host.
void check_host_access(const Range& range, const std::string& name);

/// False in memory-only mode, in which operations on more than small_bytes are not run.
bool computes();
constexpr size_t small_bytes = 16384;

/// Whether memory is filled with NaN when the allocator hands it out and when it takes it back.
bool poisons();

/// Compute capability of the profile, as 90 for 9.0.
int compute_capability();

/// Prints the message and ends the program: something is used that the virtual GPU lacks.
[[noreturn]] void not_supported(const std::string& what, const std::string& remedy);

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
