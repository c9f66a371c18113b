#include "plan/gpu/planned_gpu.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <thread>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "core/units.h"
#include "dist/planned_devices.h"
#include "plan/gpu/groups.h"
#include "plan/gpu/ranges.h"
#include "titan/core/error.h"

namespace titan::plan {

namespace {

const c10::Device kDevice(c10::kCUDA, 0);

PlannedGpu* opened = nullptr;  // set once, never destroyed: tensors outlive main

// ---- streams and events

// As LibTorch's pools: so many streams of each priority, handed out in turns.
constexpr int64_t kStreamsOfPool = 32;
thread_local int64_t stream_of_thread = 0;

class GuardImpl final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device /*device*/) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device /*device*/) const override {}
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device /*device*/) const override { return stream(stream_of_thread); }
  c10::Stream getDefaultStream(c10::Device /*device*/) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device /*device*/, bool is_high_priority) const override {
    const int64_t number = next_[is_high_priority ? 1 : 0]++ % kStreamsOfPool;
    return stream(1 + number + (is_high_priority ? kStreamsOfPool : 0));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream other) const override {
    return stream(std::exchange(stream_of_thread, other.id()));
  }
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    PlannedGpu::get().host_waits_for_stream(stream.id());
  }
  // LibTitan doesn't.
  void synchronizeDevice(const c10::DeviceIndex /*index*/) const override {}

  // An event is a number.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex /*index*/,
              const c10::EventFlag /*flag*/) const override {
    *event = reinterpret_cast<void*>(PlannedGpu::get().record_event(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) PlannedGpu::get().wait_for_event(stream.id(), reinterpret_cast<int64_t>(event));
  }
  bool queryEvent(void* /*event*/) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event) PlannedGpu::get().host_waits_for_event(reinterpret_cast<int64_t>(event));
  }
  void destroyEvent(void* /*event*/, const c10::DeviceIndex /*index*/) const noexcept override {}
  double elapsedTime(void* /*start*/, void* /*end*/, const c10::DeviceIndex /*index*/) const override {
    return 0;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    PlannedGpu::get().record_stream(reinterpret_cast<uintptr_t>(data.get()), stream.id());
  }

 private:
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
  mutable std::atomic<int64_t> next_[2] = {0, 0};
};

// ---- memory

void free_planned(void* address) { PlannedGpu::get().free(reinterpret_cast<uintptr_t>(address)); }

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, kDevice};
    auto* address = reinterpret_cast<void*>(PlannedGpu::get().allocate(static_cast<int64_t>(bytes)));
    return {address, address, &free_planned, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_planned; }
  void copy_data(void* /*to*/, const void* /*from*/, size_t /*bytes*/) const override {}
};

// Pinned memory is the host's, which a plan doesn't count.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* address = std::malloc(std::max<size_t>(bytes, 1));
    if (!address) throw std::bad_alloc();
    const std::lock_guard lock(mutex_);
    blocks_[reinterpret_cast<uintptr_t>(address)] = bytes;
    return {address, address, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool owns(uintptr_t address) {
    const std::lock_guard lock(mutex_);
    auto block = blocks_.upper_bound(address);
    if (block == blocks_.begin()) return false;
    --block;
    return address < block->first + std::max<size_t>(block->second, 1);
  }
  static PinnedAllocator& get() {
    static auto* allocator = new PinnedAllocator;
    return *allocator;
  }

 private:
  static void release(void* address) {
    {
      const std::lock_guard lock(get().mutex_);
      get().blocks_.erase(reinterpret_cast<uintptr_t>(address));
    }
    std::free(address);
  }

  std::mutex mutex_;
  std::map<uintptr_t, size_t> blocks_;
};

// ---- what LibTorch asks about CUDA

class Hooks final : public at::CUDAHooksInterface {
 public:
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex /*index*/) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*index*/) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*index*/) const override { return 0; }
  // No number is drawn, but states are saved and set.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*index*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex /*index*/) const override {
    return at::detail::createCPUGenerator();
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::get(); }
  bool isPinnedPtr(const void* data) const override {
    return PinnedAllocator::get().owns(reinterpret_cast<uintptr_t>(data));
  }
  c10::Device getDeviceFromPtr(void* /*data*/) const override { return kDevice; }
  void deviceSynchronize(c10::DeviceIndex /*index*/) const override {}
};

// ---- what LibTitan asks about its devices

class Graph final : public dist::DeviceGraph {
 public:
  void begin() override {
    PlannedGpu::get().empty_cache();
    numbers_ = PlannedGpu::get().generator_numbers();
    PlannedGpu::get().begin_graph(current_stream());
  }
  void end() override { PlannedGpu::get().end_graph(); }
  void launch() override {
    for (const at::Tensor& number : *numbers_) number.fill_(0);
  }

 private:
  std::shared_ptr<const PlannedGpu::GeneratorNumbers> numbers_;
};

class Devices final : public dist::PlannedDevices {
 public:
  c10::DeviceType device_type() const override { return c10::kCUDA; }
  int num_devices() const override { return 1; }
  void set_device(int /*index*/) override {}
  std::string device_name(int /*index*/) const override { return PlannedGpu::get().device().name; }
  std::string settings() const override { return "planned GPU"; }
  int num_multiprocessors(int /*index*/) const override {
    return static_cast<int>(PlannedGpu::get().device().multiprocessors);
  }
  int compute_capability(int /*index*/) const override {
    return static_cast<int>(PlannedGpu::get().device().compute_capability);
  }
  c10::intrusive_ptr<c10d::Backend> make_group(const dist::GroupSpec& spec) override {
    return make_planned_group(spec);
  }
  std::string device_address() const override { return "planned"; }
  std::string why_no_symmetric_memory(const std::string& /*address*/) const override {
    return "planned GPUs share no memory";
  }
  std::unique_ptr<dist::SymmetricMemory> make_symmetric_memory(const dist::GroupSpec& /*spec*/) override {
    throw Error("planned GPUs share no memory");
  }
  std::unique_ptr<dist::DeviceGraph> make_graph() override { return std::make_unique<Graph>(); }
  bool is_recorded(const c10::Stream& stream) const override {
    return PlannedGpu::get().is_recorded(stream.id());
  }
  dist::DeviceMemory memory(int /*index*/) const override { return PlannedGpu::get().memory(); }
  void lock_pages(void* /*address*/, int64_t /*bytes*/) override {}
  void unlock_pages(void* /*address*/) override {}
  void reset_peak_memory(int /*index*/) override { PlannedGpu::get().reset_peaks(); }
  bool caches_memory() const override { return !PlannedGpu::get().device().is_cpu; }
  void watch_out_of_memory(std::function<void(const dist::OutOfMemory&)> /*seen*/) override {}
  void record_memory_history(int64_t /*max_events*/) override {}
  std::string memory_snapshot() override { throw Error("a planned GPU has no memory snapshot"); }
};

// LibTorch's objects live as long as the process.
void install_hooks() {
  TITAN_CHECK(!dist::device_backend(), "a planned GPU can't be opened beside the CUDA plugin, which is open");
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks", [](at::CUDAHooksArgs) { return std::unique_ptr<at::CUDAHooksInterface>(new Hooks); });
  TITAN_CHECK(
      at::detail::getCUDAHooks().hasCUDA(),
      "a planned GPU was opened too late: LibTorch had already looked for CUDA. Open it before the first "
      "tensor is made");
}
void install_memory_and_operations() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kCUDA)].store(new GuardImpl);
  c10::SetAllocator(c10::kCUDA, new DeviceAllocator);
  register_operations();
}

}  // namespace

int64_t current_stream() { return stream_of_thread; }

PlannedGpu::PlannedGpu(const DeviceSpec& device) : device_(device) { reset(); }

PlannedGpu& PlannedGpu::open(const DeviceSpec& device) {
  if (opened) {
    opened->device_ = device;
    opened->reset();
    return *opened;
  }
  install_hooks();
  static auto* devices = new Devices;
  dist::use_planned_devices(*devices);
  opened = new PlannedGpu(device);
  install_memory_and_operations();
  return *opened;
}

PlannedGpu& PlannedGpu::get() {
  TITAN_INTERNAL_ASSERT(opened, "there is no planned GPU");
  return *opened;
}

void PlannedGpu::reset() {
  const std::lock_guard lock(mutex_);
  if (allocator_) next_address_ = allocator_->end_of_addresses();
  workspaces_.clear();
  parameters_.clear();
  recorded_streams_.clear();
  recorded_events_.clear();
  generator_numbers_.reset();
  trace_ = std::make_shared<Trace>();
  // A request that doesn't fit is counted all the same: how much is missing is part of the plan.
  constexpr int64_t no_limit = int64_t{1} << 50;
  allocator_ = std::make_unique<CachingAllocator>(
      CachingAllocator::Options{.device_bytes = no_limit, .first_address = next_address_});
}

dist::DeviceMemory PlannedGpu::memory() const {
  const std::lock_guard lock(mutex_);
  return {.allocated_bytes = allocator_->allocated().now,
          .peak_allocated_bytes = allocator_->allocated().peak,
          .peak_active_bytes = allocator_->active().peak,
          .reserved_bytes = allocator_->reserved().now,
          .peak_reserved_bytes = allocator_->reserved().peak,
          .total_bytes = std::llround(device_.memory_gib * kGiB),
          .num_out_of_memory = allocator_->num_out_of_memory(),
          .allocation_retries = allocator_->num_retries()};
}

void PlannedGpu::reset_peaks() {
  const std::lock_guard lock(mutex_);
  allocator_->reset_peaks();
}

void PlannedGpu::watch_parameters(const std::vector<at::Tensor>& parameters) {
  const std::lock_guard lock(mutex_);
  for (const at::Tensor& parameter : parameters)
    parameters_.insert(parameter.storage().unsafeGetStorageImpl());
}

void PlannedGpu::reads(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  if (parameters_.contains(tensor.storage().unsafeGetStorageImpl()))
    trace_->set_category(reinterpret_cast<uintptr_t>(tensor.storage().data()), Category::Gathered);
}

uintptr_t PlannedGpu::allocate(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const int64_t stream = current_stream();
  const uintptr_t address = allocator_->allocate(bytes, stream);
  if (address == 0) throw Error("one rank takes more than 1,024 TiB: the job fits no GPU");
  trace_->allocated(address, {.bytes = allocator_->size_of(address),
                              .stream = stream,
                              .module = trace_->number_of(current_module())});
  return address;
}

// Autograd's thread of the device may free the last tensors of a backward after the main thread has gone on to the next rank.
void PlannedGpu::free(uintptr_t address) {
  const std::lock_guard lock(mutex_);
  if (!allocator_->is_in_use(address)) return;
  trace_->freed(address);
  allocator_->free(address);
}

void PlannedGpu::record_stream(uintptr_t address, int64_t stream) {
  const std::lock_guard lock(mutex_);
  allocator_->record_stream(address, stream);
}

int64_t PlannedGpu::record_event(int64_t stream) {
  const std::lock_guard lock(mutex_);
  const int64_t event = trace_->next_event();
  if (recorded_streams_.contains(stream)) recorded_events_.insert(event);
  trace_->synchronized({Sync::Kind::Record, stream, event});
  return event;
}

void PlannedGpu::wait_for_event(int64_t stream, int64_t event) {
  const std::lock_guard lock(mutex_);
  TITAN_CHECK(recorded_events_.contains(event) || !recorded_streams_.contains(stream),
              "work that is being recorded can't wait for an event from before the recording");
  if (recorded_events_.contains(event)) recorded_streams_.insert(stream);
  trace_->synchronized({Sync::Kind::Wait, stream, event});
}

void PlannedGpu::host_waits_for_event(int64_t event) {
  const std::lock_guard lock(mutex_);
  TITAN_CHECK(!recorded_events_.contains(event), "the host can't wait for work that is being recorded");
  trace_->synchronized({.kind = Sync::Kind::HostEvent, .number = event});
}

void PlannedGpu::host_waits_for_stream(int64_t stream) {
  const std::lock_guard lock(mutex_);
  TITAN_CHECK(!recorded_streams_.contains(stream), "the host can't wait for work that is being recorded");
  trace_->synchronized({.kind = Sync::Kind::HostStream, .stream = stream});
}

void PlannedGpu::empty_cache() {
  const std::lock_guard lock(mutex_);
  allocator_->empty_cache();
}

std::shared_ptr<const PlannedGpu::GeneratorNumbers> PlannedGpu::generator_numbers() {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<const GeneratorNumbers> numbers = generator_numbers_.lock();
  if (!numbers) {
    const auto number = [] { return at::empty({1}, at::dtype(at::kLong).device(kDevice)); };
    numbers = std::make_shared<const GeneratorNumbers>(GeneratorNumbers{number(), number()});
    generator_numbers_ = numbers;
  }
  return numbers;
}

void PlannedGpu::begin_graph(int64_t stream) {
  const std::lock_guard lock(mutex_);
  recorded_streams_ = {stream};
  allocator_->begin_recording([this](int64_t each) { return recorded_streams_.contains(each); });
  trace_->synchronized({.kind = Sync::Kind::BeginGraph, .stream = stream});
}

void PlannedGpu::end_graph() {
  const std::lock_guard lock(mutex_);
  allocator_->end_recording();
  recorded_streams_.clear();
  recorded_events_.clear();
  trace_->synchronized({.kind = Sync::Kind::EndGraph});
}

bool PlannedGpu::is_recorded(int64_t stream) const {
  const std::lock_guard lock(mutex_);
  return recorded_streams_.contains(stream);
}

void PlannedGpu::launch(const Work& work) {
  trace_->launched({.name = trace_->number_of(work.name),
                    .module = trace_->number_of(current_module()),
                    .stream = current_stream(),
                    .flops = work.flops,
                    .bytes_read = work.bytes_read,
                    .bytes_written = work.bytes_written,
                    .dtype = work.dtype,
                    .shape = work.shape});
}

// Sizes are LibTorch's own (aten/src/ATen/cuda/CublasHandlePool.cpp).
void PlannedGpu::take_workspaces(bool is_scaled_product) {
  if (device_.is_cpu) return;
  const std::lock_guard lock(mutex_);
  const auto thread = static_cast<uint64_t>(std::hash<std::thread::id>()(std::this_thread::get_id()));
  const auto take = [&](bool is_of_cublaslt, int64_t bytes) {
    uintptr_t& workspace = workspaces_[{thread, current_stream(), is_of_cublaslt}];
    if (workspace) return;
    workspace = allocate(bytes);
    trace_->set_category(workspace, Category::Buffers);
  };
  const bool is_hopper = device_.compute_capability / 10 == 9;
  take(false, is_hopper ? 4096 * 8 * 1024 : 4096 * 1024 * 2 + 16 * 1024 * 8);
  if (is_scaled_product) take(true, 1024 * 1024);
}

}  // namespace titan::plan
