#pragma once

// [Note: planned GPU]
// A CUDA device that exists only as counts, for programs without a GPU. LibTorch takes it for one: it has streams, events and an
// allocator, and operations on its tensors run LibTorch's dispatcher and autograd as usual. Only where a GPU would be given work or
// memory, it is counted instead:
// - storages have addresses but no memory; the addresses come from a model of LibTorch's caching allocator (caching_allocator.h);
// - an operation's results get the sizes that its meta kernel finds (operations.cpp), and LibTitan's own operations are the plugin's
//   (plugin_operations.cpp), so the branches that are counted are those that a GPU takes;
// - groups have no peers (groups.cpp).
//
// Values don't exist: a number that the host reads is 0. Nothing takes time: an event is done when it is recorded. How long the work would
// take, simulation.h says afterwards, from what waits for what. A CUDA graph's work is counted when it is recorded, and its launches aren't.
//
// It must be opened before LibTorch has looked for CUDA, so before the process makes its first tensor, and a process that opens it
// can't open the CUDA plugin.

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>

#include "dist/device_backend.h"
#include "plan/cluster.h"
#include "plan/gpu/caching_allocator.h"
#include "plan/trace.h"

namespace torch {
class Library;
}

namespace titan::plan {

class PlannedGpu {
 public:
  /// Makes the process's planned GPU. Throws Error if LibTorch has looked for CUDA already, or the CUDA plugin is open.
  static PlannedGpu& open(const DeviceSpec& device);
  /// The one that was opened.
  static PlannedGpu& get();

  const DeviceSpec& device() const { return device_; }
  /// Empty memory and a new trace. No tensor of the device may be alive.
  void reset();
  /// To read when the rehearsal is over.
  const CachingAllocator& allocator() const { return *allocator_; }
  dist::DeviceMemory memory() const;
  void reset_peaks();
  Trace& trace() { return *trace_; }
  std::shared_ptr<const Trace> shared_trace() const { return trace_; }

  // ---- what the device is given

  /// The storages of whole parameters: whatever memory an operation finds there is of the category Gathered.
  void watch_parameters(const std::vector<at::Tensor>& parameters);
  void reads(const at::Tensor& tensor);

  uintptr_t allocate(int64_t bytes);
  void free(uintptr_t address);
  void record_stream(uintptr_t address, int64_t stream);
  /// The number of a new event of the stream.
  int64_t record_event(int64_t stream);
  void wait_for_event(int64_t stream, int64_t event);
  /// Throws Error if that work is being recorded.
  void host_waits_for_event(int64_t event);
  void host_waits_for_stream(int64_t stream);
  /// Gives unused memory back, as before a graph is recorded.
  void empty_cache();
  /// From now on the stream is recorded, and those that wait for it meanwhile, until end_graph().
  void begin_graph(int64_t stream);
  void end_graph();
  bool is_recorded(int64_t stream) const;
  /// While there are graphs, LibTorch's generator of random numbers has two numbers on the device, which it writes before each launch.
  using GeneratorNumbers = std::array<at::Tensor, 2>;
  std::shared_ptr<const GeneratorNumbers> generator_numbers();
  struct Work {
    std::string name;
    double flops = 0, bytes_read = 0, bytes_written = 0;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    train::ProductShape shape{};
  };
  void launch(const Work& work);
  /// The workspaces of this thread's handles and the current stream, which LibTorch takes at the first product and keeps: cuBLAS's, and for a
  /// scaled product (Float8) cuBLASLt's, too. LibTorch gives some products with a bias to cuBLASLt as well, which isn't counted: LibTitan's models
  /// have none.
  void take_workspaces(bool is_scaled_product);

 private:
  explicit PlannedGpu(const DeviceSpec& device);

  DeviceSpec device_;
  mutable std::recursive_mutex mutex_;  // recursive, because workspaces are allocated under it
  uintptr_t next_address_ = CachingAllocator::Options().first_address;
  std::unique_ptr<CachingAllocator> allocator_;
  std::shared_ptr<Trace> trace_;
  std::unordered_set<const c10::StorageImpl*> parameters_;
  std::set<int64_t> recorded_streams_, recorded_events_;  // streams and events of the graph in progress
  std::weak_ptr<const GeneratorNumbers> generator_numbers_;
  std::map<std::tuple<uint64_t, int64_t, bool>, uintptr_t>
      workspaces_;  // by thread and stream, and whether it is cuBLASLt's
};

/// The stream that is current on this thread; 0 is the default one.
int64_t current_stream();

/// Lists a library's operations for the key; open() registers them. Returns true.
bool list_operations(const char* library, c10::DispatchKey key, void (*define)(torch::Library&));

/// For open(): registers kernels for LibTorch's operations, and what was listed.
void register_operations();

}  // namespace titan::plan
