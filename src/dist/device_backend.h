#pragma once

// The functions that a kind of device adds to the library: groups over its interconnect, choosing the device,
// memory that ranks share, memory figures. CUDA's are in the plugin libtitan_cuda.so, so that a machine
// without a GPU never loads a CUDA library. Streams and events are in dist/stream.h.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include "dist/flight_record.h"
#include "dist/stream.h"

namespace c10d {
class Backend;
class Store;
class Work;
}  // namespace c10d

namespace titan::dist {

/// Memory that the ranks of a group on one host share: each has a piece of the same size, which the others
/// read and write without its help (over NVLink). A queue of copies runs in parallel with the computation
/// (the current stream). All ranks make the same calls of reserve() and barrier() in the same order.
class SymmetricMemory {
 public:
  /// A point in the queue, after all earlier operations.
  using Moment = int64_t;
  /// Offsets into a piece, in bytes, are multiples of this.
  static constexpr int64_t kAlignment = 256;

  virtual ~SymmetricMemory() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Makes every rank's piece at least `bytes` large. If it has to grow, its contents are lost and the host
  /// waits for all ranks. Throws Error if the ranks can't reach each other's memory.
  virtual void reserve(int64_t bytes) = 0;
  /// A tensor in this rank's own piece, valid until that grows.
  virtual at::Tensor mine(int64_t offset, at::IntArrayRef sizes, at::ScalarType dtype) = 0;

  // These return at once. Each runs after the earlier ones and after the computation queued before the call.
  // Tensors are contiguous, and live until the computation has waited for a later moment.

  virtual void read(const at::Tensor& target, int peer, int64_t offset) = 0;
  /// `peer` may be this rank.
  virtual void write(int peer, int64_t offset, const at::Tensor& source) = 0;
  /// Continues when every rank's queue has reached it.
  virtual void barrier() = 0;

  virtual Moment now() = 0;
  /// Computation queued from now on runs after `moment`. Doesn't block the host.
  virtual void wait(Moment moment) = 0;
};

/// Memory that is kept from step to step was replaced by a larger piece: recorded work must not use the old one any more.
void note_replaced_memory();
/// How often that happened in this process.
int64_t num_replaced_memories();

/// [Note: registered memory]
/// Device memory that NCCL reads and writes directly, because it is registered with the communicators of groups. A call's
/// buffers have to be registered by all members or by none, and at the same offsets: so each tensor is an allocation of
/// its own, which stays until the object ends. All members make one and add the same groups.
class RegisteredMemory {
 public:
  /// Nothing of the groups may still use the memory. Tensors that are left stay valid, and aren't registered any more.
  virtual ~RegisteredMemory() = default;
  /// A group from make_group; it may have been added before.
  virtual void add(const c10::intrusive_ptr<c10d::Backend>& group) = 0;
  /// Uninitialized bytes, allocated on the current stream. Throws Error if its work is recorded.
  virtual at::Tensor empty(int64_t bytes) = 0;
};

/// Bytes on one device, as its caching allocator counts them.
struct DeviceMemory {
  int64_t allocated_bytes = 0;       ///< in tensors now
  int64_t peak_allocated_bytes = 0;  ///< since the last reset_peak_memory
  /// Besides tensors also blocks that were freed while another stream still uses them.
  int64_t peak_active_bytes = 0;
  int64_t reserved_bytes = 0;  ///< taken from the driver
  int64_t peak_reserved_bytes = 0;
  int64_t total_bytes = 0;         ///< the device's size
  int64_t num_out_of_memory = 0;   ///< requests that failed
  int64_t allocation_retries = 0;  ///< times the allocator had to flush its cache; above 0 means too full
  int64_t page_locked_bytes = 0;   ///< host memory of this process: lock_pages and LibTorch's allocator
};

/// A device's allocator at the moment when a request failed.
struct OutOfMemory {
  struct Block {
    uintptr_t begin = 0;
    int64_t bytes = 0;
  };
  int64_t requested_bytes = 0;
  std::vector<Block> blocks;  ///< in use, by address
};

/// A recording of device work (dist/work_graph.h has the rules).
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  /// Records the current stream from now on. Waits for the device and frees the allocator's unused blocks, because the
  /// recording has memory of its own.
  virtual void begin() = 0;
  /// Throws c10::Error if the work can't be recorded.
  virtual void end() = 0;
  /// Queues the recording on the current stream.
  virtual void launch() = 0;
};

/// The parameters of a group to make.
struct GroupSpec {
  std::string name;
  c10::intrusive_ptr<c10d::Store> store;  ///< with a prefix for this group
  int rank = 0;
  int size = 1;
  std::vector<int> world_ranks;  ///< its members, in order
  std::chrono::milliseconds timeout{};
  bool has_long_receives = false;  ///< kLongReceives in titan/dist/world.h
};

class DeviceBackend {
 public:
  /// The most that CUDA has. Streams that share a queue wait for each other without need.
  static constexpr int kQueues = 32;

  virtual ~DeviceBackend() = default;
  virtual c10::DeviceType device_type() const = 0;
  virtual int num_devices() const = 0;
  /// Why the driver's devices can't be used, as a text of CUDA's; empty if they can, or if there are none.
  virtual std::string failure() const { return ""; }
  /// Whether each launch blocks the host until it is done, for debugging (CUDA_LAUNCH_BLOCKING).
  virtual bool launches_block() const { return false; }
  /// How many of the device's queues its streams share.
  virtual int num_queues() const { return kQueues; }
  /// Makes device `index` this thread's current one, and the process's.
  virtual void set_device(int index) = 0;
  /// Makes the process's device this thread's current one. A new thread has device 0, where calls for another device's
  /// events would make a second context of half a GiB.
  virtual void use_device_of_process() {}
  /// "NVIDIA H100 80GB HBM3"; tables of peak FLOPS are keyed by it.
  virtual std::string device_name(int index) const = 0;
  /// Versions, what was set for this process, and variables of the environment that change how it runs: one line for the
  /// log of a run.
  virtual std::string settings() const { return ""; }
  /// 90 for compute capability 9.0.
  virtual int compute_capability(int index) const = 0;
  virtual int num_multiprocessors(int index) const = 0;
  /// A communicator (NCCL) of the current device.
  virtual c10::intrusive_ptr<c10d::Backend> make_group(const GroupSpec& spec) = 0;
  /// A function that asks, without waiting and from any thread, whether the device is done with a call of a
  /// group from make_group, and how long it took. It doesn't keep the call's tensors. Empty if a finished
  /// wait() already means that.
  virtual std::function<DeviceCall()> completion_of(c10d::Work& /*work*/) { return {}; }
  /// Waits until this rank's calls of all groups from make_group have ended, at most as long as the groups' time limit.
  /// If calls remain after that, aborts all groups.
  virtual void finish_calls() {}
  /// Ends this rank's calls of all groups from make_group, also those that would wait forever for a rank that
  /// is lost: the host and the streams continue, results are undefined, and later calls throw. From any thread;
  /// takes at most a few seconds.
  virtual void abort_groups() {}
  /// The current device as a text for why_no_symmetric_memory() in other processes of the job.
  virtual std::string device_address() const = 0;
  /// The reason why the current device can't share memory with that one; empty if it can.
  virtual std::string why_no_symmetric_memory(const std::string& address) const = 0;
  /// On the current device, for a group whose devices can all share memory. Allocates nothing yet.
  virtual std::unique_ptr<SymmetricMemory> make_symmetric_memory(const GroupSpec& spec) = 0;
  /// On the current device; null if the backend has none.
  virtual std::unique_ptr<RegisteredMemory> make_registered_memory() { return nullptr; }
  virtual std::unique_ptr<DeviceGraph> make_graph() = 0;
  /// Whether the stream's work is recorded instead of done.
  virtual bool is_recorded(const c10::Stream& stream) const = 0;
  /// How many random numbers the recording in progress has drawn on the current device, in the generator's own units; 0 without one. The
  /// generator's state doesn't show them.
  virtual int64_t num_recorded_draws() const { return 0; }
  virtual DeviceMemory memory(int index) const = 0;
  /// Locks host memory so that copies between it and a device overlap the computation. It is unlocked before
  /// it is unmapped. Throws Error.
  virtual void lock_pages(void* address, int64_t bytes) = 0;
  virtual void unlock_pages(void* address) = 0;
  virtual void reset_peak_memory(int index) = 0;
  /// Whether memory that is freed stays with the allocator, so that the next request costs nothing.
  virtual bool caches_memory() const { return true; }
  /// Calls `seen` whenever a request fails, on its thread, before the error is thrown. Empty: no more.
  virtual void watch_out_of_memory(std::function<void(const OutOfMemory&)> seen) = 0;
  /// From now on the allocator records its events, with call stacks, and keeps the last `max_events`.
  virtual void record_memory_history(int64_t max_events) = 0;
  /// The recorded events and the memory in use now, in the format of PyTorch's memory viewer.
  virtual std::string memory_snapshot() = 0;
};

/// Memory that its owner keeps for reuse, and can do without. The CUDA plugin asks for it when LibTorch's
/// allocator has no block for a request, and the driver little memory left.
class IdleMemory {
 public:
  /// Returns tensors to be freed, which no stream but their own uses any more; may wait for streams. Called on any
  /// thread, under the allocator's lock: it allocates and frees no device memory itself.
  using Take = std::function<std::vector<at::Tensor>()>;

  explicit IdleMemory(Take take);
  /// Waits for a call of `take` in progress.
  ~IdleMemory();
  IdleMemory(const IdleMemory&) = delete;
  IdleMemory& operator=(const IdleMemory&) = delete;

  /// Frees all owners' idle memory; returns the number of bytes.
  static int64_t give_back();

 private:
  Take take_;
};

/// Opens the CUDA plugin if a GPU is visible, once per process; returns null where there is no GPU or no
/// plugin was built. Must be called before the first tensor is made, because LibTorch looks for CUDA once and
/// remembers the answer for the life of the process. Throws Error if called too late, or if the plugin
/// doesn't load (with the loader's reason).
DeviceBackend* open_cuda_plugin();

/// The file that open_cuda_plugin() opens, beside the library. It may not exist.
std::filesystem::path cuda_plugin_path();

/// The backend if open_cuda_plugin() has opened it, else null. Doesn't open it.
DeviceBackend* device_backend();

/// Whether the driver shows a GPU and CUDA_VISIBLE_DEVICES doesn't hide it. Touches no CUDA library.
bool gpu_visible();

struct InitOptions;
/// Throws ConfigError as init() does, on a host with `local_size` ranks, if it lacks the GPUs for the device and
/// the backend in `options`.
void check_devices(const InitOptions& options, int local_size);

/// Why open_cuda_plugin() found no device although the driver has some, as a text of CUDA's; empty otherwise.
std::string cuda_failure();

/// A warning that the job runs on the CPU although a GPU is visible, because the plugin wasn't built or because of
/// `failure` (cuda_failure()); empty otherwise. `wanted`: InitOptions::device. `plugin`: its file, which may not exist.
std::string unused_gpu_warning(const std::string& wanted, bool gpu_visible,
                               const std::filesystem::path& plugin, const std::string& failure);

}  // namespace titan::dist
