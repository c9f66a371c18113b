// The CUDA plugin: what dist/device_backend.h asks of a device, by NCCL and LibTorch's CUDA library. The
// library opens it when a GPU is visible (src/dist/device_backend.cpp); nothing else links to it.

#include <cuda_runtime_api.h>

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/cuda/memory_snapshot.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "cuda_plugin/symmetric_memory.h"
#include "titan/core/error.h"
#include "titan/dist/device_backend.h"

namespace titan::dist {
namespace {

using Stats = c10::CachingDeviceAllocator::DeviceStats;

constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

/// The event is protected in the class.
struct EndEvent : c10d::ProcessGroupNCCL::WorkNCCL {
  static std::shared_ptr<at::cuda::CUDAEvent> of(WorkNCCL& work) { return work.*(&EndEvent::ncclEndEvent_); }
};

/// The caching allocator exists from the first use of CUDA on.
c10::DeviceAllocator& allocator() {
  at::globalContext().lazyInitDevice(c10::kCUDA);
  return *c10::getDeviceAllocator(c10::kCUDA);
}

class CudaBackend final : public DeviceBackend {
 public:
  c10::DeviceType device_type() const override { return c10::kCUDA; }

  int num_devices() const override { return c10::cuda::device_count(); }

  void set_device(int index) override { c10::cuda::set_device(static_cast<c10::DeviceIndex>(index)); }

  std::string device_name(int index) const override { return at::cuda::getDeviceProperties(index)->name; }
  int compute_capability(int index) const override {
    const auto* properties = at::cuda::getDeviceProperties(index);
    return 10 * properties->major + properties->minor;
  }

  c10::intrusive_ptr<c10d::Backend> make_group(const GroupSpec& spec) override {
    // A gather that the next layer waits for goes before the computation in the queue of the device.
    auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
    options->timeout = spec.timeout;
    options->group_name = spec.name;
    auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(spec.store, spec.rank, spec.size, options);
    const c10::Device device(c10::kCUDA, c10::cuda::current_device());
    group->setBoundDeviceId(device);
    // Now, not in the first step: a failure to connect belongs to the start-up and its time limit.
    group->eagerConnectSingleDevice(device);
    return group;
  }

  // The event that NCCL's work ends with, alone: the work itself would keep the call's tensors.
  std::function<bool()> completion_of(c10d::Work& work) override {
    auto* nccl = dynamic_cast<c10d::ProcessGroupNCCL::WorkNCCL*>(&work);
    auto event = nccl ? EndEvent::of(*nccl) : nullptr;
    if (!event) return {};
    return [event] { return event->query(); };
  }

  std::string device_address() const override { return symmetric_memory_address(); }
  std::string why_no_peer_memory(const std::string& address) const override {
    return why_no_symmetric_memory(address);
  }
  std::unique_ptr<PeerMemory> make_peer_memory(const GroupSpec& spec) override {
    return make_symmetric_memory(spec);
  }

  DeviceMemory memory(int index) const override {
    const Stats stats = allocator().getDeviceStats(static_cast<c10::DeviceIndex>(index));
    DeviceMemory memory;
    memory.allocated_bytes = stats.allocated_bytes[kAll].current;
    memory.peak_allocated_bytes = stats.allocated_bytes[kAll].peak;
    memory.reserved_bytes = stats.reserved_bytes[kAll].current;
    memory.peak_reserved_bytes = stats.reserved_bytes[kAll].peak;
    memory.total_bytes = static_cast<int64_t>(at::cuda::getDeviceProperties(index)->totalGlobalMem);
    memory.num_out_of_memory = stats.num_ooms;
    memory.allocation_retries = stats.num_alloc_retries;
    return memory;
  }

  void reset_peak_memory(int index) override {
    allocator().resetPeakStats(static_cast<c10::DeviceIndex>(index));
  }

  void record_memory_history(int64_t max_events) override {
    const std::string all = "all";  // events, and their stacks, those of C++ among them
    torch::cuda::_record_memory_history(std::optional(all), std::optional(all), all,
                                        static_cast<size_t>(max_events));
  }

  std::string memory_snapshot() override { return torch::cuda::_memory_snapshot_pickled(); }
};

}  // namespace
}  // namespace titan::dist

/// The plugin's one entry; the object lives as long as the process.
extern "C" __attribute__((visibility("default"))) titan::dist::DeviceBackend* titan_cuda_plugin() {
  static titan::dist::CudaBackend backend;
  return &backend;
}
