// The CUDA plugin implements dist/device_backend.h with NCCL and LibTorch's CUDA library. LibTitan loads it
// if a GPU is visible (src/dist/device_backend.cpp); nothing else links to it.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/MemPool.h>
#include <ATen/ops/empty.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/env.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>
#include <torch/csrc/cuda/memory_snapshot.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include "core/process.h"
#include "core/threads.h"
#include "dist/device_backend.h"
#include "dist/stream.h"
#include "dist/stream_clock.h"
#include "titan/core/error.h"

namespace titan::dist {

// [Note: symmetric memory]
// (It has run on virtual GPUs only.)
// A *piece* is one allocation of LibTorch's symmetric memory. Each rank allocates one, and a *rendezvous*
// over the store maps it on all ranks. The *queue* is a stream of high priority; the *computation* is the
// stream that is current at the call. Every operation of the queue first makes the queue wait for an event at
// the computation's end; every wait makes the computation wait for an event of the queue. The host waits only
// for a rendezvous.
//
// Copies between contiguous tensors of one dtype are cudaMemcpyAsync, which uses copy engines and leaves all
// multiprocessors to matrix products. A barrier is one kernel of one warp: it sends a signal to each peer
// with release semantics for the whole system, and receives the peer's with acquire semantics. Because the
// queue is a stream, copies queued before are complete when the kernel sends, and copies queued afterwards
// start when the kernel has received all signals. One channel of signals is enough, because all barriers are
// in one stream; a barrier that is a round ahead waits until its last signal has been received.
//
// A barrier that takes longer than the group's time limit traps, and the device reports an error to its next
// call.

namespace {

namespace symm = c10d::symmetric_memory;

// LibTorch 2.11 numbers the exchanges of a rendezvous by one count for all groups of the process, as "CUDASymmetricMemory/<number>/<rank>", so
// members whose other groups have met more or less often would wait for each other's keys forever. This store numbers those of one group.
class NumberedStore final : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;
  using PrefixStore::wait;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    PrefixStore::set(own(key), value);
  }
  std::vector<uint8_t> get(const std::string& key) override { return PrefixStore::get(own(key)); }
  void wait(const std::vector<std::string>& keys) override {
    std::vector<std::string> own_keys;
    for (const std::string& key : keys) own_keys.push_back(own(key));
    PrefixStore::wait(own_keys);
  }

 private:
  std::string own(const std::string& key) {
    const size_t rank = key.rfind('/');
    TITAN_CHECK(rank != std::string::npos, "LibTorch's rendezvous of symmetric memory has a key '", key,
                "' without a rank");
    if (const std::string exchange = key.substr(0, rank); exchange != exchange_) {
      exchange_ = exchange;
      ++count_;
    }
    return str(count_, key.substr(rank));
  }

  std::string exchange_;  // the last one
  int64_t count_ = 0;
};

// LibTorch 2.11's rendezvous looks up rank, size and store by the group's name in a per-process registry.
class RegisteredGroup {
 public:
  explicit RegisteredGroup(const GroupSpec& spec)
      : name_(unused_name(spec.name)),
        group_(c10::make_intrusive<c10d::ProcessGroup>(
            c10::make_intrusive<NumberedStore>("rendezvous", spec.store), spec.rank, spec.size)) {
    c10d::register_process_group(name_, group_);
  }
  ~RegisteredGroup() { c10d::unregister_process_group(name_); }
  RegisteredGroup(const RegisteredGroup&) = delete;
  RegisteredGroup& operator=(const RegisteredGroup&) = delete;

  const std::string& name() const { return name_; }

 private:
  // The registry lives as long as the process, so the count of its entries does, too.
  static std::string unused_name(const std::string& group) {
    static std::atomic<int> count{0};
    return str("titan ", group, " ", count++);
  }

  std::string name_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

// [Note: streams that wait for other ranks]
// LibTorch's pool has 32 streams of a priority and gives them out in turn, whether or not they are in use. If two of those below shared one, a
// receive that was queued early could delay a call that its sender waits for, and both ranks would wait forever. So each has a stream of its own,
// of the highest priority: a gather that the next layer waits for runs before other computation.
class OwnStream {
 public:
  explicit OwnStream(c10::DeviceIndex device) : stream_(take(device)) {}
  ~OwnStream() {
    const std::lock_guard lock(spare().mutex);
    spare().streams.push_back(stream_);
  }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  const c10::cuda::CUDAStream& get() const { return stream_; }

 private:
  // Never destroyed, because the allocator may still know tensors that they used.
  struct Spare {
    std::mutex mutex;
    std::vector<c10::cuda::CUDAStream> streams;
  };
  static Spare& spare() {
    static auto& all = *new Spare;
    return all;
  }
  static c10::cuda::CUDAStream take(c10::DeviceIndex device) {
    {
      const std::lock_guard lock(spare().mutex);
      auto& streams = spare().streams;
      const auto found = std::ranges::find(streams, device, &c10::cuda::CUDAStream::device_index);
      if (found != streams.end()) {
        const c10::cuda::CUDAStream stream = *found;
        streams.erase(found);
        return stream;
      }
    }
    const c10::cuda::CUDAGuard guard(device);
    int lowest = 0, highest = 0;
    C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    cudaStream_t stream = nullptr;
    C10_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest));
    return c10::cuda::getStreamFromExternal(stream, device);
  }

  c10::cuda::CUDAStream stream_;
};

class CudaSymmetricMemory final : public SymmetricMemory {
 public:
  explicit CudaSymmetricMemory(const GroupSpec& spec)
      : rank_(spec.rank),
        size_(spec.size),
        timeout_ms_(static_cast<size_t>(spec.timeout.count())),
        device_(c10::kCUDA, c10::cuda::current_device()),
        group_(spec),
        own_stream_(device_.index()),
        queue_(own_stream_.get().unwrap()) {
    name_stream("peer memory " + spec.name, queue_);
  }

  ~CudaSymmetricMemory() override {
    // Freeing synchronizes the device, on which a barrier may wait for peers that never arrive. If an error
    // is being thrown to main(), which ends the process, don't free.
    if (std::uncaught_exceptions() == 0) return;
    static_cast<void>(peers_.release());
    static_cast<void>(piece_.unsafeReleaseTensorImpl());
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void reserve(int64_t bytes) override {
    if (piece_.defined() && piece_.numel() >= bytes) return;
    try {
      grow(bytes);
    } catch (const c10::Error& error) {
      throw Error(str("rank ", rank_, " couldn't share ", bytes, " bytes of its GPU's memory with the ",
                      size_ - 1, " other ranks of its group: ", reason_of(error),
                      " (without asynchronous tensor parallelism nothing is shared)"));
    }
  }

  at::Tensor mine(int64_t offset, at::IntArrayRef sizes, at::ScalarType dtype) override {
    return view(rank_, offset, sizes, dtype);
  }

  void read(const at::Tensor& target, int peer, int64_t offset) override {
    const StreamGuard guard(queue_after_computation());
    const at::NoGradGuard no_grad;
    at::Tensor(target).copy_(view(peer, offset, target.sizes(), target.scalar_type()), /*non_blocking=*/true);
  }
  void write(int peer, int64_t offset, const at::Tensor& source) override {
    const StreamGuard guard(queue_after_computation());
    const at::NoGradGuard no_grad;
    view(peer, offset, source.sizes(), source.scalar_type()).copy_(source, /*non_blocking=*/true);
  }
  void barrier() override {
    const StreamGuard guard(queue_after_computation());
    peers_->barrier(/*channel=*/0, timeout_ms_);
  }

  Moment now() override {
    const Moment moment = num_moments_++;
    event_of(moment).record(queue_);
    return moment;
  }
  void wait(Moment moment) override {
    const PeerWait waiting("peer memory");
    Stream::current(device_).wait(event_of(moment));
  }

 private:
  const Stream& queue_after_computation() {
    computed_.record(Stream::current(device_));
    queue_.wait(computed_);
    return queue_;
  }

  void grow(int64_t bytes) {
    // LibTorch takes memory on the current stream and fills it by copies of the default one, which waits for no
    // other.
    const c10::cuda::CUDAStreamGuard on_default_stream(c10::cuda::getDefaultCUDAStream(device_.index()));
    at::Tensor piece =
        symm::empty_strided_p2p({bytes}, {1}, at::kByte, device_, std::nullopt, /*alloc_id=*/std::nullopt);
    // The piece and its signals were zeroed on the default stream, and peers may access them right after the
    // rendezvous.
    c10::cuda::getDefaultCUDAStream(device_.index()).synchronize();
    auto peers = symm::rendezvous(piece, group_.name());
    TITAN_CHECK(peers && peers->get_rank() == rank_ && peers->get_world_size() == size_,
                "the rendezvous of symmetric memory returned without its peers");
    // The last exchange ended with a barrier, after which no rank uses the old pieces. So once this queue has
    // finished, the peers have finished with this rank's piece.
    queue_.synchronize();
    piece_ = std::move(piece);
    peers_ = std::move(peers);
  }

  at::Tensor view(int peer, int64_t offset, at::IntArrayRef sizes, at::ScalarType dtype) const {
    return peers_->get_buffer(peer, sizes, dtype, offset / static_cast<int64_t>(c10::elementSize(dtype)));
  }

  // An old moment's event may have been recorded again for a later moment. A wait for it is then longer than
  // necessary, but never for work that is requested after the wait.
  Event& event_of(Moment moment) { return events_[static_cast<size_t>(moment) % events_.size()]; }

  int rank_, size_;
  size_t timeout_ms_;
  c10::Device device_;
  RegisteredGroup group_;
  OwnStream own_stream_;
  Stream queue_;
  at::Tensor piece_;  // this rank's piece
  c10::intrusive_ptr<symm::SymmetricMemory> peers_;
  Event computed_;
  std::array<Event, 128> events_;  // more than one exchange on one host uses
  Moment num_moments_ = 0;
};

std::string bus_id(int device) {
  char id[32] = "";
  C10_CUDA_CHECK(cudaDeviceGetPCIBusId(id, sizeof(id), device));
  return id;
}

bool has_atomics_between(int device, int peer) {
  int can = 0, atomics = 0;
  C10_CUDA_CHECK(cudaDeviceCanAccessPeer(&can, device, peer));
  if (can)
    C10_CUDA_CHECK(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device, peer));
  return can && atomics;
}

// LibTorch passes memory descriptors through Unix sockets, which containers on one machine may not share.
// Such containers have different host identities.
std::string gpu_address() { return str(host_identity(), " ", bus_id(c10::cuda::current_device())); }

std::string why_not_reachable(const std::string& address) {
  const size_t space = address.rfind(' ');
  TITAN_INTERNAL_ASSERT(space != std::string::npos, "GPU address without a host: ", address);
  if (address.substr(0, space) != host_identity()) return "it is on another host, or in another container";
  const std::string theirs = address.substr(space + 1);
  const int device = c10::cuda::current_device();
  if (theirs == bus_id(device)) return str("both are on GPU ", theirs);
  int peer = 0;
  if (cudaDeviceGetByPCIBusId(&peer, theirs.c_str()) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // else the next launch reports it
    return str("its GPU ", theirs, " isn't visible to this process (CUDA_VISIBLE_DEVICES)");
  }
  // Without NVLink a GPU can copy from a peer, but a barrier's signals need atomics.
  if (!has_atomics_between(device, peer))
    return str("no NVLink connects GPUs ", bus_id(device), " and ", theirs);
  const c10::Device here(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
  const std::string kind = symm::has_allocator(c10::kCUDA) ? symm::get_backend(here).value_or("") : "";
  if (kind != "CUDA") return str("LibTorch's symmetric memory is '", kind, "' (TORCH_SYMMMEM), not 'CUDA'");
  return "";
}

// A queued receive holds a multiprocessor for each CTA until its message has come; NCCL would take up to 32. Four keep up with a network of
// 400 Gb/s, and a message within a host takes tenths of a millisecond, which the schedule hides.
constexpr int kMostCtasOfLongReceives = 4;

/// Known to abort_all() as long as it lives.
class NcclGroup final : public c10d::ProcessGroupNCCL {
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
    const auto end = std::chrono::steady_clock::now() + getOptions()->timeout;
    while (!is_aborted_ && has_calls() && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    NcclGroup::abort();
  }

  // LibTorch's watchdog would report each call that is aborted, or that it hasn't yet seen finished, and end the
  // process, so it forgets them; whoever waits for an aborted call reports the failure.
  void abort() override {
    if (is_aborted_.exchange(true)) return;
    const std::list<WorkNCCL> calls = take_from_watchdog();
    ProcessGroupNCCL::abort();
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

  bool has_calls() {
    const std::lock_guard lock(workMetaListMutex_);
    return !workMetaList_.empty();
  }
  // The calls have tensors that their kernels may still use.
  std::list<WorkNCCL> take_from_watchdog() {
    asyncErrorHandling_ = c10d::CleanUpOnly;
    std::list<WorkNCCL> calls;
    const std::lock_guard lock(workMetaListMutex_);
    calls.swap(workMetaList_);
    return calls;
  }

  OwnStream stream_;
  std::atomic<bool> is_aborted_{false};
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
    constexpr size_t largest_rounding = 20 << 20;
    size_t free = 0, total = 0;
    if (cudaMemGetInfo(&free, &total) == cudaSuccess && free < static_cast<size_t>(bytes) + largest_rounding)
      c10::cuda::CUDACachingAllocator::emptyCache();
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

using Stats = c10::CachingDeviceAllocator::DeviceStats;

constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

/// The events around NCCL's work, from protected members.
struct WorkEvents : c10d::ProcessGroupNCCL::WorkNCCL {
  using Pointer = std::shared_ptr<at::cuda::CUDAEvent>;
  static Pointer start_of(WorkNCCL& work) { return work.*(&WorkEvents::ncclStartEvent_); }
  static Pointer end_of(WorkNCCL& work) { return work.*(&WorkEvents::ncclEndEvent_); }
};

/// The caching allocator exists once CUDA has been used.
c10::DeviceAllocator& allocator() {
  at::globalContext().lazyInitDevice(c10::kCUDA);
  return *c10::getDeviceAllocator(c10::kCUDA);
}

/// LibTorch's allocator calls it before it takes more memory from the driver. Only where that has little left,
/// the host waits for streams: the request would fail otherwise.
class GiveBackIdleMemory final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    size_t free = 0, total = 0;
    const bool is_short = cudaMemGetInfo(&free, &total) == cudaSuccess && free < total / 8;
    return IdleMemory::give_back(/*wait=*/is_short) > 0;
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

// If the end of a capture fails, LibTorch leaves its allocators and random generators as they are during one: memory that was used on
// several streams would never come back, random numbers would fail, and no graph could be captured.
struct Capture : at::cuda::CUDAGraph {
  void abandon() {
    if (std::exchange(capture_ended_, true)) return;  // so that the pool is released with the others
    for (const auto& [generator, increment] : captured_generator_states_) generator->capture_epilogue();
    c10::cuda::CUDACachingAllocator::endAllocateToPool(capture_dev_, mempool_id_);
    at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(mempool_id_);
  }
};

class CudaGraph final : public DeviceGraph {
 public:
  // A pool of memory without graphs can't be used again.
  CudaGraph() {
    if (num_living++ == 0) memory = at::cuda::graph_pool_handle();
  }
  ~CudaGraph() override { --num_living; }

  // Other threads may call the driver meanwhile.
  void begin() override {
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    c10::cuda::CUDACachingAllocator::emptyCache();
    graph_.capture_begin(memory, cudaStreamCaptureModeThreadLocal);
  }
  void end() override {
    try {
      graph_.capture_end();
    } catch (...) {
      graph_.abandon();
      throw;
    }
  }
  void launch() override { graph_.replay(); }

 private:
  // One thread makes and destroys all graphs.
  inline static int num_living = 0;
  inline static decltype(at::cuda::graph_pool_handle()) memory;

  Capture graph_;
};

class CudaBackend final : public DeviceBackend {
 public:
  c10::DeviceType device_type() const override { return c10::kCUDA; }

  int num_devices() const override { return c10::cuda::device_count(); }

  bool launches_block() const override {
    const char* blocks = std::getenv("CUDA_LAUNCH_BLOCKING");
    return blocks && std::string_view(blocks) != "0";
  }

  void set_device(int index) override {
    c10::cuda::set_device(static_cast<c10::DeviceIndex>(index));
    static const bool once = (use_expandable_segments(index), true);
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
               ", NCCL on streams of high priority; environment: ", variables_of_gpus());
  }
  int compute_capability(int index) const override {
    const auto* properties = at::cuda::getDeviceProperties(index);
    return 10 * properties->major + properties->minor;
  }

  c10::intrusive_ptr<c10d::Backend> make_group(const GroupSpec& spec) override {
    auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
    options->timeout = spec.timeout;
    options->group_name = spec.name;
    if (spec.has_long_receives) options->config.maxCTAs = kMostCtasOfLongReceives;
    auto group = c10::make_intrusive<NcclGroup>(spec, options);
    meet(spec);
    group->enableCollectivesTiming();
    group->connect();
    return group;
  }

  void abort_groups() override { NcclGroup::abort_all(); }

  // Keeps only the events around NCCL's work, because the work itself would keep the call's tensors alive.
  std::function<DeviceCall()> completion_of(c10d::Work& work) override {
    auto* nccl = dynamic_cast<c10d::ProcessGroupNCCL::WorkNCCL*>(&work);
    auto end = nccl ? WorkEvents::end_of(*nccl) : nullptr;
    if (!end) return {};
    return [start = WorkEvents::start_of(*nccl), end = std::move(end)]() -> DeviceCall {
      if (!end->query()) return {};
      if (!start || !start->isCreated()) return {.done = true};
      return {.done = true, .ns = std::llround(1e6 * static_cast<double>(start->elapsed_time(*end)))};
    };
  }

  std::string device_address() const override { return gpu_address(); }
  std::string why_no_symmetric_memory(const std::string& address) const override {
    return why_not_reachable(address);
  }
  std::unique_ptr<SymmetricMemory> make_symmetric_memory(const GroupSpec& spec) override {
    return std::make_unique<CudaSymmetricMemory>(spec);
  }

  std::unique_ptr<RegisteredMemory> make_registered_memory() override {
    return std::make_unique<CudaRegisteredMemory>();
  }

  std::unique_ptr<DeviceGraph> make_graph() override { return std::make_unique<CudaGraph>(); }
  bool is_recorded(const c10::Stream& stream) const override {
    cudaStreamCaptureStatus status{};
    C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::CUDAStream(stream), &status));
    return status != cudaStreamCaptureStatusNone;
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
  static titan::dist::CudaBackend backend;
  return &backend;
}
