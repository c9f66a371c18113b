#pragma once

// What a kind of device adds to the library: groups over its interconnect, choosing the device, memory that
// ranks share, memory figures. The CUDA one lives in the plugin libtitan_cuda.so, so that a machine without a
// GPU never loads a CUDA library. Streams and events are in dist/stream.h.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include "dist/stream.h"

namespace c10d {
class Backend;
class Store;
class Work;
}  // namespace c10d

namespace titan::dist {

/// Memory that the ranks of a group on one host share: each has a piece of the same size, which the others
/// read and write without its help (over NVLink). A queue of copies runs beside the computation, that is, the
/// current stream. All ranks make the same calls of reserve() and barrier() in the same order.
class SymmetricMemory {
 public:
  /// A point in the queue: after everything that was asked for before it.
  using Moment = int64_t;
  /// Offsets into a piece, in bytes, are multiples of this.
  static constexpr int64_t kAlignment = 256;

  virtual ~SymmetricMemory() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Makes every rank's piece `bytes` large, if it is smaller: then its contents are lost, and the host waits
  /// for all ranks. Throws Error where the ranks can't reach each other's memory.
  virtual void reserve(int64_t bytes) = 0;
  /// A tensor in this rank's own piece, valid until that grows.
  virtual at::Tensor mine(int64_t offset, at::IntArrayRef sizes, at::ScalarType dtype) = 0;

  // These return at once. Each is done after those asked for before it, and after the computation queued by
  // then. Tensors are contiguous, and live until the computation has waited for a later moment.

  virtual void read(const at::Tensor& target, int peer, int64_t offset) = 0;
  /// `peer` may be this rank.
  virtual void write(int peer, int64_t offset, const at::Tensor& source) = 0;
  /// Continues when every rank's queue has reached it.
  virtual void barrier() = 0;

  virtual Moment now() = 0;
  /// Computation queued from now on runs after `moment`. Doesn't block the host.
  virtual void wait(Moment moment) = 0;
};

/// Bytes on one device, as its caching allocator counts them.
struct DeviceMemory {
  int64_t allocated_bytes = 0;       ///< in tensors now
  int64_t peak_allocated_bytes = 0;  ///< since the last reset_peak_memory
  int64_t reserved_bytes = 0;        ///< taken from the driver
  int64_t peak_reserved_bytes = 0;
  int64_t total_bytes = 0;         ///< the device's size
  int64_t num_out_of_memory = 0;   ///< requests that failed
  int64_t allocation_retries = 0;  ///< times the allocator had to flush its cache; above 0 means too full
};

/// What it takes to make a group.
struct GroupSpec {
  std::string name;
  c10::intrusive_ptr<c10d::Store> store;  ///< with a prefix of the group's own
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{};
};

class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;
  virtual c10::DeviceType device_type() const = 0;
  virtual int num_devices() const = 0;
  /// Makes device `index` this thread's current one.
  virtual void set_device(int index) = 0;
  /// "NVIDIA H100 80GB HBM3"; tables of peak FLOPS are keyed by it.
  virtual std::string device_name(int index) const = 0;
  /// 90 for compute capability 9.0.
  virtual int compute_capability(int index) const = 0;
  /// A communicator (NCCL) of the current device.
  virtual c10::intrusive_ptr<c10d::Backend> make_group(const GroupSpec& spec) = 0;
  /// A function that asks, without waiting and from any thread, whether the device is done with a call of a
  /// group from make_group. It doesn't keep the call's tensors. Empty where a finished wait() says so
  /// already.
  virtual std::function<bool()> completion_of(c10d::Work& /*work*/) { return {}; }
  /// The current device, in words for why_no_symmetric_memory() on other processes of the job.
  virtual std::string device_address() const = 0;
  /// Why the current device can't share memory with that one; empty: it can.
  virtual std::string why_no_symmetric_memory(const std::string& address) const = 0;
  /// On the current device, for a group whose devices can all share memory. Allocates nothing yet.
  virtual std::unique_ptr<SymmetricMemory> make_symmetric_memory(const GroupSpec& spec) = 0;
  virtual DeviceMemory memory(int index) const = 0;
  virtual void reset_peak_memory(int index) = 0;
  /// From now on the allocator records what it does, with call stacks, and keeps the last `max_events`.
  virtual void record_memory_history(int64_t max_events) = 0;
  /// What it has recorded, and what is in use now, in the format of PyTorch's memory viewer.
  virtual std::string memory_snapshot() = 0;
};

/// Opens the CUDA plugin if a GPU is visible, once per process; returns null where there is no GPU or no
/// plugin was built. Has to come before the first tensor, because LibTorch remembers "no CUDA" from its first
/// look for the life of the process. Throws Error when it comes too late, or when the plugin doesn't load
/// (with the loader's reason).
DeviceBackend* open_cuda_plugin();

/// The file that open_cuda_plugin() opens, whether it was built or not: beside the library.
std::filesystem::path cuda_plugin_path();

/// The backend if open_cuda_plugin() has opened it, else null. Doesn't open it.
DeviceBackend* device_backend();

/// True where the driver shows a GPU and CUDA_VISIBLE_DEVICES doesn't hide it. Touches no CUDA library.
bool gpu_visible();

/// A warning that the job runs on the CPU beside a GPU because the plugin wasn't built; empty otherwise.
/// `wanted`: InitOptions::device. `gpu_visible`: the driver shows one. `plugin`: its file, which may not exist.
std::string missing_plugin_warning(const std::string& wanted, bool gpu_visible,
                                   const std::filesystem::path& plugin);

}  // namespace titan::dist
