#pragma once

// Memory that the ranks of one host lend each other: each has a piece of the same size, in which the others
// read and write without its help. A GPU's is in the plugin (over NVLink); no other device has one.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include "titan/dist/stream.h"

namespace titan::dist {

/// The pieces of a group's ranks, and a queue of copies that runs beside the computation, which is what the
/// current stream does. All ranks make the same calls of reserve() and barrier() in the same order.
class PeerMemory {
 public:
  /// Of the queue: behind everything that was asked for before it.
  using Moment = int64_t;
  /// Offsets into a piece, in bytes, are multiples of this.
  static constexpr int64_t kAlignment = 256;

  virtual ~PeerMemory() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Makes every rank's piece `bytes` large, if it is smaller. What was in it is lost then, and the host
  /// waits for all ranks. Throws Error where the ranks can't reach each other's memory.
  virtual void reserve(int64_t bytes) = 0;
  /// A tensor in this rank's own piece, until that grows.
  virtual at::Tensor mine(int64_t offset, at::IntArrayRef sizes, at::ScalarType dtype) = 0;

  // These return at once. Each is done after those asked for before it, and after what the computation had
  // been given by then. Tensors are contiguous, and live until the computation has waited for a later moment.

  virtual void read(const at::Tensor& target, int peer, int64_t offset) = 0;
  /// `peer` may be this rank.
  virtual void write(int peer, int64_t offset, const at::Tensor& source) = 0;
  /// Goes on when every rank's queue has come to it.
  virtual void barrier() = 0;

  virtual Moment now() = 0;
  /// What the computation is given from now on is done after `moment`. Doesn't block the host.
  virtual void wait(Moment moment) = 0;
};

}  // namespace titan::dist

namespace c10d {

// What a kind of device adds to the library: groups over its interconnect, choosing the device, memory
// figures. The CUDA one lives in the plugin libtitan_cuda.so, so that a machine without a GPU never loads a
// CUDA library. Streams and events are in dist/stream.h.

class Backend;
class Store;
class Work;
}  // namespace c10d

namespace titan::dist {

class PeerMemory;

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

/// What a group needs to be made.
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
  /// 90 of compute capability 9.0.
  virtual int compute_capability(int index) const = 0;
  /// A communicator (NCCL) of the current device.
  virtual c10::intrusive_ptr<c10d::Backend> make_group(const GroupSpec& spec) = 0;
  /// Asks, without waiting and from any thread, whether the device is done with a call of a group that
  /// make_group made. Doesn't keep the call's tensors. Empty where a finished wait() says so already.
  virtual std::function<bool()> completion_of(c10d::Work& /*work*/) { return {}; }
  /// The current device, in words that other processes of the job can hand to why_no_peer_memory().
  virtual std::string device_address() const = 0;
  /// Why the current device can't share memory with that one; empty: it can.
  virtual std::string why_no_peer_memory(const std::string& address) const = 0;
  /// Of the current device, for a group between all of whose devices nothing stands in the way.
  virtual std::unique_ptr<PeerMemory> make_peer_memory(const GroupSpec& spec) = 0;
  virtual DeviceMemory memory(int index) const = 0;
  virtual void reset_peak_memory(int index) = 0;
  /// From now on the allocator notes what it does, with call stacks; the last `max_events` are kept.
  virtual void record_memory_history(int64_t max_events) = 0;
  /// What it has noted, and what is in use now: a file that PyTorch's memory viewer loads.
  virtual std::string memory_snapshot() = 0;
};

/// Opens the CUDA plugin if a GPU is visible, once per process; null where there is no GPU or no plugin was
/// built. Has to come before the first tensor, because LibTorch remembers "no CUDA" from its first look for
/// the life of the process. Throws Error when it comes too late, or when the plugin doesn't load (with the
/// loader's reason).
DeviceBackend* open_cuda_plugin();

/// The file that open_cuda_plugin() opens, whether it was built or not: beside the library.
std::filesystem::path cuda_plugin_path();

/// The backend if open_cuda_plugin() has opened it, else null. Doesn't open it.
DeviceBackend* device_backend();

/// True where the driver shows a GPU and CUDA_VISIBLE_DEVICES doesn't hide it. Touches no CUDA library.
bool gpu_visible();

struct DeviceSituation {
  std::string wanted;            ///< InitOptions::device
  bool gpu_visible = false;      ///< the driver shows one
  std::filesystem::path plugin;  ///< which may not be there
};

/// What to tell the user of a job that runs on the CPU beside a GPU because the plugin wasn't built; empty
/// where there is nothing to tell.
std::string missing_plugin_warning(const DeviceSituation& situation);

}  // namespace titan::dist
