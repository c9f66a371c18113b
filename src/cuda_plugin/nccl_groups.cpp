#include "cuda_plugin/nccl_groups.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <exception>
#include <list>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/MemPool.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "core/threads.h"
#include "cuda_plugin/own_stream.h"
#include "titan/core/error.h"

namespace titan::dist {
namespace {

constexpr int64_t kMoreThanItsBuffers = 1 << 30;

/// Known to abort_all() as long as it lives.
class NcclGroup final : public c10d::ProcessGroupNCCL {
  using Call = c10::intrusive_ptr<c10d::Work>;

 public:
  NcclGroup(const GroupSpec& spec, c10::intrusive_ptr<Options> options)
      : ProcessGroupNCCL(spec.store, spec.rank, spec.size, std::move(options)),
        stream_(c10::cuda::current_device()) {
    const std::lock_guard lock(living().mutex);
    living().groups.push_back(this);
  }
  // Connects now, not in the first step, so that a failure to connect falls within start-up and its time limit.
  void connect() {
    const c10::Device device = stream_.get().device();
    setBoundDeviceId(device);
    eagerConnectSingleDevice(device);
    for (auto& [key, stream] : ncclStreams_) stream = stream_.get();
  }
  // Calls in progress end first: a peer may not have received yet what this rank has sent. LibTorch's destructor would
  // abort as well, but its watchdog would report calls that it hasn't yet seen finished.
  ~NcclGroup() override {
    {
      const std::lock_guard lock(living().mutex);
      std::erase(living().groups, this);
    }
    const auto start = std::chrono::steady_clock::now();
    while (!is_aborted_ && has_calls() && has_time(start)) std::this_thread::sleep_for(kBetweenLooks);
    NcclGroup::abort();
  }

  // The first calls prepare ([Note: a first call]).
  Call allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    prepare(Function::AllReduce, tensors, options.reduceOp);
    return ProcessGroupNCCL::allreduce(tensors, options);
  }
  Call _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    prepare(Function::AllGather, out);
    return ProcessGroupNCCL::_allgather_base(out, in, options);
  }
  Call allgather_into_tensor_coalesced(std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins,
                                       const c10d::AllgatherOptions& options) override {
    prepare(Function::AllGather, outs);
    return ProcessGroupNCCL::allgather_into_tensor_coalesced(outs, ins, options);
  }
  Call _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                            const c10d::ReduceScatterOptions& options) override {
    prepare(Function::ReduceScatter, in, options.reduceOp);
    return ProcessGroupNCCL::_reduce_scatter_base(out, in, options);
  }
  Call reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins,
                                       const c10d::ReduceScatterOptions& options) override {
    prepare(Function::ReduceScatter, ins, options.reduceOp);
    return ProcessGroupNCCL::reduce_scatter_tensor_coalesced(outs, ins, options);
  }

  // LibTorch's watchdog would report each call that is aborted, or that it hasn't yet seen finished, and end the
  // process, so it forgets them; whoever waits for an aborted call reports the failure.
  void abort() override {
    if (is_aborted_.exchange(true)) return;
    const std::list<WorkNCCL> calls = take_from_watchdog();
    ProcessGroupNCCL::abort();
  }

  static void finish_all() {
    const auto start = std::chrono::steady_clock::now();
    while (true) {
      bool any_has_calls = false, any_works = false;
      {
        const std::lock_guard lock(living().mutex);
        for (NcclGroup* group : living().groups) {
          const bool has_calls = !group->is_aborted_ && group->has_calls();
          any_has_calls = any_has_calls || has_calls;
          any_works = any_works || (has_calls && group->has_time(start));
        }
      }
      if (!any_has_calls) return;
      // Otherwise each group would wait for its calls as long again.
      if (!any_works) return abort_all();
      std::this_thread::sleep_for(kBetweenLooks);
    }
  }

  // All at the same time: an abort waits for its group's kernels, which may wait for those of another one.
  static void abort_all() {
    constexpr std::chrono::seconds limit{3};
    within(limit, [] {
      const std::lock_guard lock(living().mutex);
      const auto& groups = living().groups;
      run_tasks(static_cast<int>(groups.size()), groups.size(), [&](size_t i) { groups[i]->abort(); });
    });
  }

 private:
  struct Living {
    std::mutex mutex;
    std::vector<NcclGroup*> groups;
  };
  // Never destroyed, because a thread that aborts may outlive main().
  static Living& living() {
    static auto& all = *new Living;
    return all;
  }

  // After an error that NCCL reports, such as a lost peer between hosts, LibTorch's watchdog sleeps for a minute with
  // this lock, and would end the process then. LibTitan's own names the peer and ends it much earlier.
  using CallsLock = std::unique_lock<std::mutex>;

  static constexpr std::chrono::milliseconds kBetweenLooks{2};
  bool has_time(std::chrono::steady_clock::time_point since) {
    return std::chrono::steady_clock::now() < since + getOptions()->timeout;
  }

  // [Note: a first call]
  // Function, sum or maximum, dtype and size of a call decide which algorithm NCCL takes. When it takes one for the first time, it allocates buffers, and
  // zeroes those of NVLink SHARP on the legacy stream, which nothing waits for (nvlsAllocateMem in src/transport/nvls.cc). So before the first
  // call of its kind, memory is freed, and that stream, which may be the one that computes, is drained. A step is recorded after others of the same
  // calls.
  enum class Function { AllReduce, AllGather, ReduceScatter };
  using Kind = std::tuple<Function, c10d::ReduceOp::RedOpType, at::ScalarType, size_t>;  // and bytes
  void prepare(Function function, at::TensorList whole,
               const c10d::ReduceOp& operation = c10d::ReduceOp::SUM) {
    size_t bytes = 0;
    for (const at::Tensor& tensor : whole) bytes += tensor.nbytes();
    const Kind kind(function, static_cast<c10d::ReduceOp::RedOpType>(operation), whole[0].scalar_type(),
                    bytes);
    if (prepared_.contains(kind)) return;
    cudaStreamCaptureStatus status{};
    C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(), &status));
    if (status != cudaStreamCaptureStatusNone) return;
    prepared_.insert(kind);
    leave_to_driver(kMoreThanItsBuffers);
    C10_CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));
  }

  /// Also true now and then without calls, while LibTorch's watchdog has the lock.
  bool has_calls() {
    const CallsLock lock(workMetaListMutex_, std::try_to_lock);
    return !lock || !workMetaList_.empty();
  }
  // The calls have tensors that their kernels may still use.
  std::list<WorkNCCL> take_from_watchdog() {
    asyncErrorHandling_ = c10d::CleanUpOnly;
    std::list<WorkNCCL> calls;
    CallsLock lock(workMetaListMutex_, std::defer_lock);
    for (int tries = 0; !lock.try_lock() && tries < 200; ++tries)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (lock) calls.swap(workMetaList_);
    return calls;
  }

  OwnStream stream_;
  std::atomic<bool> is_aborted_{false};
  std::set<Kind> prepared_;
};

/// A pool of LibTorch's allocator, whose memory comes from NCCL. LibTorch registers its segments when they are made, and a
/// pool with an allocator of its own has no expandable ones.
class CudaRegisteredMemory final : public RegisteredMemory {
 public:
  // While an error unwinds, streams may wait in calls that use the memory; aborting the groups ends its registration.
  ~CudaRegisteredMemory() override {
    if (std::uncaught_exceptions() > 0) static_cast<void>(pool_.release());
    if (!pool_) return;
    for (const auto& group : groups_) {
      try {
        group->deregisterMemPool(pool_.get());
      } catch (const std::exception&) {  // it was aborted
      }
    }
  }

  void add(const c10::intrusive_ptr<c10d::Backend>& group) override {
    auto nccl = c10::dynamic_intrusive_pointer_cast<NcclGroup>(group);
    TITAN_CHECK(nccl, "only NCCL's groups take registered memory");
    if (std::ranges::find(groups_, nccl) != groups_.end()) return;
    if (!pool_)
      pool_ = std::make_unique<at::cuda::MemPool>(allocator_of_nccl(), /*is_user_created=*/true,
                                                  /*use_on_oom=*/false, /*no_split=*/true);
    nccl->registerMemPool(pool_.get());
    groups_.push_back(std::move(nccl));
  }

  at::Tensor empty(int64_t bytes) override {
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
    cudaStreamCaptureStatus status{};
    C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    TITAN_CHECK(status == cudaStreamCaptureStatusNone,
                "registered communication buffers can't be allocated while work is recorded");
    // The allocator frees nothing for a pool.
    constexpr int64_t largest_rounding = 20 << 20;
    leave_to_driver(bytes + largest_rounding);
    std::optional<InPool> in_pool;
    if (pool_) in_pool.emplace(pool_->device(), pool_->id());
    return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(c10::kCUDA));
  }

 private:
  // LibTorch's own refuses devices without NVLink SHARP, where registration is of use, too.
  static std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator> allocator_of_nccl() {
    static const auto allocator = torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
        [](size_t bytes, int device, cudaStream_t) -> void* {
          const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
          void* address = nullptr;
          if (ncclMemAlloc(&address, bytes) == ncclSuccess) return address;
          static_cast<void>(cudaGetLastError());  // else the next launch reports it
          return nullptr;
        },
        [](void* address, size_t, int device, cudaStream_t) {
          const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
          static_cast<void>(ncclMemFree(address));
        });
    return allocator;
  }

  // This thread's requests go to the pool.
  class InPool {
   public:
    InPool(c10::DeviceIndex device, c10::MempoolId_t pool) : device_(device), pool_(std::move(pool)) {
      c10::cuda::CUDACachingAllocator::beginAllocateToPool(
          device_, pool_,
          [self = std::this_thread::get_id()](cudaStream_t) { return std::this_thread::get_id() == self; });
    }
    ~InPool() {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(device_, pool_);
      c10::cuda::CUDACachingAllocator::releasePool(device_, pool_);
    }
    InPool(const InPool&) = delete;
    InPool& operator=(const InPool&) = delete;

   private:
    c10::DeviceIndex device_;
    c10::MempoolId_t pool_;
  };

  std::vector<c10::intrusive_ptr<NcclGroup>> groups_;
  std::unique_ptr<at::cuda::MemPool> pool_;  // none before the first group
};

/// The events around NCCL's work, from protected members.
struct WorkEvents : c10d::ProcessGroupNCCL::WorkNCCL {
  using Pointer = std::shared_ptr<at::cuda::CUDAEvent>;
  static Pointer start_of(WorkNCCL& work) { return work.*(&WorkEvents::ncclStartEvent_); }
  static Pointer end_of(WorkNCCL& work) { return work.*(&WorkEvents::ncclEndEvent_); }
};

// NCCL waits without a limit for members that never connect, so that all meet in the store first.
void meet(const GroupSpec& spec) {
  const std::string count = "titan.members", all_here = "titan.all_here";
  if (spec.store->add(count, 1) == spec.size) spec.store->set(all_here, std::string("1"));
  try {
    spec.store->wait({all_here}, spec.timeout);
  } catch (const std::exception&) {
    throw Error(str(spec.store->add(count, 0), " of ", spec.size, " members came within ",
                    static_cast<double>(spec.timeout.count()) / 1000, " s to connect"));
  }
}

}  // namespace

void leave_to_driver(int64_t bytes) {
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) == cudaSuccess && free < static_cast<size_t>(bytes))
    c10::cuda::CUDACachingAllocator::emptyCache();
}

c10::intrusive_ptr<c10d::Backend> make_nccl_group(const GroupSpec& spec) {
  auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = spec.timeout;
  options->group_name = spec.name;
  if (spec.has_long_receives) options->config.maxCTAs = kMostCtasOfLongReceives;
  auto group = c10::make_intrusive<NcclGroup>(spec, options);
  meet(spec);
  group->enableCollectivesTiming();
  leave_to_driver(kMoreThanItsBuffers);
  group->connect();
  return group;
}

void finish_calls_of_nccl() { NcclGroup::finish_all(); }

void abort_nccl_groups() { NcclGroup::abort_all(); }

// Keeps only the events around NCCL's work, because the work itself would keep the call's tensors alive.
std::function<DeviceCall()> completion_of_nccl(c10d::Work& work) {
  auto* nccl = dynamic_cast<c10d::ProcessGroupNCCL::WorkNCCL*>(&work);
  auto end = nccl ? WorkEvents::end_of(*nccl) : nullptr;
  if (!end) return {};
  return [start = WorkEvents::start_of(*nccl), end = std::move(end)]() -> DeviceCall {
    if (!end->query()) return {};
    if (!start || !start->isCreated()) return {.done = true};
    return {.done = true, .ns = std::llround(1e6 * static_cast<double>(start->elapsed_time(*end)))};
  };
}

std::unique_ptr<RegisteredMemory> make_memory_of_nccl() { return std::make_unique<CudaRegisteredMemory>(); }

}  // namespace titan::dist
