// The CUDA plugin implements dist/device_backend.h with NCCL and LibTorch's CUDA library. LibTitan loads it
// if a GPU is visible (src/dist/device_backend.cpp); nothing else links to it.

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/env.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/cuda/memory_snapshot.h>
#include <torch/csrc/distributed/c10d/NCCLUtils.hpp>

#include "cuda_plugin/nccl_groups.h"
#include "cuda_plugin/symmetric_memory.h"
#include "dist/device_backend.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::dist {
namespace {

using Stats = c10::CachingDeviceAllocator::DeviceStats;

constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

/// The caching allocator exists once CUDA has been used.
c10::DeviceAllocator& allocator() {
  at::globalContext().lazyInitDevice(c10::kCUDA);
  return *c10::getDeviceAllocator(c10::kCUDA);
}

/// LibTorch's allocator calls it before it takes more memory from the driver. The host waits for streams only where that has
/// little left: the request would fail otherwise.
class GiveBackIdleMemory final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    // A recording's memory is its own: what is given back would be of no use to it, and waiting would end it.
    if (at::cuda::currentStreamCaptureStatusMayInitCtx() != at::cuda::CaptureStatus::None) return false;
    size_t free = 0, total = 0;
    const bool is_short = cudaMemGetInfo(&free, &total) == cudaSuccess && free < total / 8;
    return is_short && IdleMemory::give_back() > 0;
  }
};

// Whether the driver maps memory to addresses that the caller chooses. Some virtual machines' drivers don't.
bool maps_memory(int device) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  constexpr unsigned version = 12000;
  if (cudaGetDriverEntryPointByVersion("cuDeviceGetAttribute", &entry, version, cudaEnableDefault, &found) !=
          cudaSuccess ||
      found != cudaDriverEntryPointSuccess)
    return false;
  int supported = 0;
  const auto ask = reinterpret_cast<decltype(&cuDeviceGetAttribute)>(entry);
  return ask(&supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) == CUDA_SUCCESS &&
         supported != 0;
}

std::string setting_of(const char* variable) { return c10::utils::get_env(variable).value_or(""); }

// [Note: expandable segments]
// LibTorch's allocator then maps memory to a range of addresses that grows, instead of requesting a block of
// its own for each new size, so less is lost in gaps. The user's settings win, and so does a request for NCCL
// to register the allocator's memory, which LibTorch would drop. Symmetric memory has an allocator of its own,
// and nothing here passes the allocator's memory to other processes.
void use_expandable_segments(int device) {
  std::string settings = setting_of("PYTORCH_CUDA_ALLOC_CONF");
  if (settings.empty()) settings = setting_of("PYTORCH_ALLOC_CONF");
  for (const char* chosen : {"expandable_segments", "backend"})
    if (settings.find(chosen) != std::string::npos) return;
  for (const char* hook :
       {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"})
    if (const std::string value = setting_of(hook); !value.empty() && value != "0") return;
  if (!maps_memory(device)) return;
  c10::CachingAllocator::setAllocatorSettings(
      str(settings, settings.empty() ? "" : ",", "expandable_segments:True"));
}

// NCCL registers the buffers of calls that are recorded in a CUDA graph, unless told not to: of an expandable segment only the piece of the driver's
// memory in which a buffer begins, so peers would read past it.
void keep_nccl_from_registering_recorded_calls() {
  if (c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments())
    ::setenv("NCCL_GRAPH_REGISTER", "0", /*overwrite=*/0);
}

// 13000 -> "13.0"
std::string cuda_version(int number) { return str(number / 1000, ".", number % 1000 / 10); }

// The set variables of CUDA's libraries, NCCL and LibTorch, by name.
std::string variables_of_gpus() {
  std::vector<std::string> found;
  for (char** variable = environ; *variable; ++variable)
    for (const char* prefix : {"CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "PYTORCH_", "TORCH_"})
      if (std::string_view(*variable).starts_with(prefix)) found.emplace_back(*variable);
  std::ranges::sort(found);
  return found.empty() ? "none" : list_str(found);
}

// If the end of a capture fails, LibTorch leaves its allocators and random generators as they are during one: memory that was used on
// several streams would never come back, random numbers would fail, and no graph could be captured.
struct Capture : at::cuda::CUDAGraph {
  void abandon() {
    if (std::exchange(capture_ended_, true)) return;  // so that the pool is released with the others
    for (const auto& [generator, increment] : captured_generator_states_) generator->capturing_ = false;
    c10::cuda::CUDACachingAllocator::endAllocateToPool(capture_dev_, mempool_id_);
    at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(mempool_id_);
  }
  // Its memory stays. What runs of it runs on.
  void end() {
    if (std::exchange(has_graph_, false)) static_cast<void>(cudaGraphDestroy(graph_));
    if (std::exchange(has_graph_exec_, false)) static_cast<void>(cudaGraphExecDestroy(graph_exec_));
  }
};

/// A thread with another device would make a context there, which takes hundreds of MB. If the device has failed, the thread's stays.
class OnDevice {
 public:
  explicit OnDevice(int device) noexcept {
    try {
      if (device >= 0) guard_.emplace(static_cast<c10::DeviceIndex>(device));
    } catch (const std::exception&) {  // it is being reported already
    }
  }

 private:
  std::optional<c10::cuda::CUDAGuard> guard_;
};

class CudaGraph final : public DeviceGraph {
 public:
  // A pool of memory without graphs can't be used again.
  CudaGraph() {
    const std::lock_guard lock(living().mutex);
    if (living().graphs.empty()) memory = at::cuda::graph_pool_handle();
    living().graphs.push_back(this);
  }
  ~CudaGraph() override {
    const std::lock_guard lock(living().mutex);
    std::erase(living().graphs, this);
  }

  /// The recordings can't be launched any more. From any thread. A launch or the end of a recording that is in progress, and takes longer than a second,
  /// ends its recording itself.
  static void end_all() {
    const std::lock_guard lock(living().mutex);
    for (CudaGraph* graph : living().graphs) graph->must_end_ = true;
    for (CudaGraph* graph : living().graphs)
      if (const std::unique_lock in_use(graph->mutex_, std::chrono::seconds(1)); in_use) graph->graph_.end();
  }

  // Other threads may call the driver meanwhile.
  void begin() override {
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    c10::cuda::CUDACachingAllocator::emptyCache();
    graph_.capture_begin(memory, cudaStreamCaptureModeThreadLocal);
  }
  void end() override {
    const std::lock_guard lock(mutex_);
    const auto end_if_asked = c10::make_scope_exit([this] {
      if (must_end_) graph_.end();
    });
    try {
      graph_.capture_end();
    } catch (...) {
      const std::exception_ptr failure = std::current_exception();
      try {
        graph_.abandon();
      } catch (const std::exception& error) {
        log::warning(str("after a failed recording: ", reason_of(error)));  // the failure itself says more
      }
      std::rethrow_exception(failure);
    }
  }
  void launch() override {
    const std::lock_guard lock(mutex_);
    TITAN_CHECK(!must_end_, "a recorded step is launched after this process has ended its groups");
    const auto end_if_asked = c10::make_scope_exit([this] {
      if (must_end_) graph_.end();
    });
    graph_.replay();
  }

 private:
  struct Living {
    std::mutex mutex;
    std::vector<CudaGraph*> graphs;
  };
  // Never destroyed, because a thread that aborts may outlive main().
  static Living& living() {
    static auto& all = *new Living;
    return all;
  }
  // One thread makes and destroys all graphs.
  inline static decltype(at::cuda::graph_pool_handle()) memory;

  std::atomic<bool> must_end_ = false;
  std::timed_mutex mutex_;  // held by who uses the recording
  Capture graph_;
};

class CudaBackend final : public DeviceBackend {
 public:
  c10::DeviceType device_type() const override { return c10::kCUDA; }

  int num_devices() const override { return c10::cuda::device_count(); }

  std::string failure() const override {
    int count = 0, driver = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess) return "";
    static_cast<void>(cudaGetLastError());  // else the next call reports it
    // Without a driver's library CUDA says that the driver is too old. Its version is 0 then.
    const bool has_driver = cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0;
    if (error == cudaErrorNoDevice || !has_driver) return "";
    return str(cudaGetErrorString(error), " (driver for CUDA ", cuda_version(driver), ", LibTitan built for ",
               cuda_version(CUDART_VERSION), ")");
  }

  bool launches_block() const override {
    const char* blocks = std::getenv("CUDA_LAUNCH_BLOCKING");
    return blocks && std::string_view(blocks) != "0";
  }

  int num_queues() const override {
    const int queues = std::atoi(setting_of("CUDA_DEVICE_MAX_CONNECTIONS").c_str());
    return queues > 0 ? std::min(queues, kQueues) : kQueues;
  }

  void use_device_of_process() override {
    if (const int device = device_; device >= 0) c10::cuda::set_device(static_cast<c10::DeviceIndex>(device));
  }

  void set_device(int index) override {
    c10::cuda::set_device(static_cast<c10::DeviceIndex>(index));
    device_ = index;
    static const bool once = [&] {
      use_expandable_segments(index);
      keep_nccl_from_registering_recorded_calls();
      return true;
    }();
    static_cast<void>(once);
  }

  std::string device_name(int index) const override { return at::cuda::getDeviceProperties(index)->name; }
  std::string settings() const override {
    int runtime = 0, driver = 0;
    static_cast<void>(cudaRuntimeGetVersion(&runtime));
    static_cast<void>(cudaDriverGetVersion(&driver));
    const std::string allocator = c10::CachingAllocator::getAllocatorSettings();
    return str("CUDA ", cuda_version(runtime), ", driver for CUDA ", cuda_version(driver), ", NCCL ",
               c10d::getNcclVersion(), ", allocator ", allocator.empty() ? "as LibTorch sets it" : allocator,
               ", NCCL on streams of high priority, messages of rings and pipelines on at most ",
               kMostCtasOfLongReceives,
               " multiprocessors unless NCCL_MAX_CTAS is set; environment: ", variables_of_gpus());
  }
  int num_multiprocessors(int index) const override {
    return at::cuda::getDeviceProperties(index)->multiProcessorCount;
  }
  int compute_capability(int index) const override {
    const auto* properties = at::cuda::getDeviceProperties(index);
    return 10 * properties->major + properties->minor;
  }

  c10::intrusive_ptr<c10d::Backend> make_group(const GroupSpec& spec) override {
    return make_nccl_group(spec);
  }

  void finish_calls() override { finish_calls_of_nccl(); }
  // NCCL's communicators don't end while a recording has their calls.
  void abort_groups() override {
    const OnDevice on_device(device_);
    CudaGraph::end_all();
    abort_nccl_groups();
  }

  std::function<DeviceCall()> completion_of(c10d::Work& work) override { return completion_of_nccl(work); }

  std::string device_address() const override { return gpu_address(); }
  std::string why_no_symmetric_memory(const std::string& address) const override {
    return why_not_reachable(address);
  }
  std::unique_ptr<SymmetricMemory> make_symmetric_memory(const GroupSpec& spec) override {
    return make_cuda_symmetric_memory(spec);
  }

  std::unique_ptr<RegisteredMemory> make_registered_memory() override { return make_memory_of_nccl(); }

  std::unique_ptr<DeviceGraph> make_graph() override { return std::make_unique<CudaGraph>(); }
  bool is_recorded(const c10::Stream& stream) const override {
    cudaStreamCaptureStatus status{};
    C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::CUDAStream(stream), &status));
    return status != cudaStreamCaptureStatusNone;
  }

  int64_t num_recorded_draws() const override {
    if (!is_recorded(c10::cuda::getCurrentCUDAStream())) return 0;
    at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator();
    const std::lock_guard lock(generator.mutex());
    const at::PhiloxCudaState state =
        at::check_generator<at::CUDAGeneratorImpl>(generator)->philox_cuda_state(/*increment=*/0);
    return static_cast<int64_t>(state.offset_intragraph_);
  }

  DeviceMemory memory(int index) const override {
    const Stats stats = allocator().getDeviceStats(static_cast<c10::DeviceIndex>(index));
    DeviceMemory memory;
    memory.allocated_bytes = stats.allocated_bytes[kAll].current;
    memory.peak_allocated_bytes = stats.allocated_bytes[kAll].peak;
    memory.peak_active_bytes = stats.active_bytes[kAll].peak;
    memory.reserved_bytes = stats.reserved_bytes[kAll].current;
    memory.peak_reserved_bytes = stats.reserved_bytes[kAll].peak;
    memory.total_bytes = static_cast<int64_t>(at::cuda::getDeviceProperties(index)->totalGlobalMem);
    memory.num_out_of_memory = stats.num_ooms;
    memory.page_locked_bytes = at::getHostAllocator(c10::kCUDA)->get_stats().allocated_bytes.current;
    {
      const std::lock_guard lock(locked_mutex_);
      for (const auto& [address, bytes] : locked_) memory.page_locked_bytes += bytes;
    }
    memory.allocation_retries = stats.num_alloc_retries;
    return memory;
  }

  // Portable: for the contexts of all devices.
  void lock_pages(void* address, int64_t bytes) override {
    const OnDevice on_device(device_);
    const cudaError_t error = cudaHostRegister(address, static_cast<size_t>(bytes), cudaHostRegisterPortable);
    if (error != cudaSuccess) {
      static_cast<void>(cudaGetLastError());  // else the next launch reports it
      throw Error(
          str("the driver can't lock ", bytes, " bytes of the host's memory: ", cudaGetErrorString(error)));
    }
    const std::lock_guard lock(locked_mutex_);
    locked_[address] = bytes;
  }

  void unlock_pages(void* address) override {
    const OnDevice on_device(device_);
    // It fails only for a device that has failed, whose error is being reported already.
    if (cudaHostUnregister(address) != cudaSuccess) static_cast<void>(cudaGetLastError());
    const std::lock_guard lock(locked_mutex_);
    locked_.erase(address);
  }

  void reset_peak_memory(int index) override {
    allocator().resetPeakStats(static_cast<c10::DeviceIndex>(index));
  }

  void watch_out_of_memory(std::function<void(const OutOfMemory&)> seen) override {
    allocator();
    static const bool once = (c10::cuda::CUDACachingAllocator::attachOutOfMemoryObserver(
                                  [this](int64_t device, size_t requested, size_t, size_t) {
                                    tell_out_of_memory(device, static_cast<int64_t>(requested));
                                  }),
                              true);
    static_cast<void>(once);
    const std::lock_guard lock(seen_mutex_);
    out_of_memory_seen_ = std::move(seen);
  }

  void record_memory_history(int64_t max_events) override {
    const std::string all = "all";  // record all events with their stacks, including C++ stacks
    torch::cuda::_record_memory_history(std::optional(all), std::optional(all), all,
                                        static_cast<size_t>(max_events));
  }

  std::string memory_snapshot() override { return torch::cuda::_memory_snapshot_pickled(); }

 private:
  // LibTorch has released its allocator's lock when it calls this.
  void tell_out_of_memory(int64_t device, int64_t requested) {
    const std::lock_guard lock(seen_mutex_);
    if (!out_of_memory_seen_) return;
    OutOfMemory found{requested, {}};
    for (const auto& segment :
         c10::cuda::CUDACachingAllocator::snapshot({0, 0}, /*include_traces=*/false).segments) {
      uintptr_t begin = segment.address;
      for (const auto& block : segment.blocks) {
        if (block.allocated && segment.device == device)
          found.blocks.push_back({begin, static_cast<int64_t>(block.size)});
        begin += block.size;
      }
    }
    std::ranges::sort(found.blocks, {}, &OutOfMemory::Block::begin);
    out_of_memory_seen_(found);
  }

  std::mutex seen_mutex_;
  std::function<void(const OutOfMemory&)> out_of_memory_seen_;
  std::atomic<int> device_ = -1;  // chosen by set_device()
  mutable std::mutex locked_mutex_;
  std::map<void*, int64_t> locked_;  // by address
};

}  // namespace
}  // namespace titan::dist

// LibTorch's macro uses names of this namespace.
namespace c10 {
REGISTER_FREE_MEMORY_CALLBACK(titan_idle_memory, titan::dist::GiveBackIdleMemory)
}

/// The plugin's only entry point. The object lives as long as the process.
extern "C" __attribute__((visibility("default"))) titan::dist::DeviceBackend* titan_cuda_plugin() {
  // Streams that share one of the device's queues wait for each other without need, and a job has more than the eight queues that there are otherwise.
  // CUDA reads it when the process first uses a device.
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(titan::dist::DeviceBackend::kQueues).c_str(),
           /*overwrite=*/0);
  // LibTorch would make NVLink's multicast objects for symmetric memory, which LibTitan doesn't use. On some hosts that fails or hangs
  // (pytorch issues 162429, 167537 and 195596).
  ::setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1", /*overwrite=*/0);
  static titan::dist::CudaBackend backend;
  return &backend;
}
