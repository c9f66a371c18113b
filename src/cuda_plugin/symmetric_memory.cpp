#include "cuda_plugin/symmetric_memory.h"

#include <array>
#include <atomic>
#include <exception>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include "core/process.h"
#include "cuda_plugin/nccl_groups.h"
#include "cuda_plugin/own_stream.h"
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
                      " (parallelism.enable_async_tensor_parallel and context_parallel_rotate_method = "
                      "\"symmetric_memory\" share memory)"));
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
    const Stream& queue = queue_after_computation();  // a graph's exchanges are the computation's
    if (piece_.defined()) note_replaced_memory();
    constexpr int64_t largest_rounding = 20 << 20;
    leave_to_driver(bytes + largest_rounding);
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
    queue.synchronize();
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

}  // namespace

std::unique_ptr<SymmetricMemory> make_cuda_symmetric_memory(const GroupSpec& spec) {
  return std::make_unique<CudaSymmetricMemory>(spec);
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

}  // namespace titan::dist
