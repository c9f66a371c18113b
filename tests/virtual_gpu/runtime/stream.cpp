// CUDA's functions on streams and events, and the settings. The scheduler (scheduler.cpp) runs what they queue.

#include "runtime/stream.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>

#include "runtime/counters.h"
#include "runtime/device.h"
#include "runtime/faults.h"
#include "runtime/races.h"

namespace virtual_gpu {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

size_t number_from(const char* variable, size_t fallback) {
  const char* text = std::getenv(variable);
  return text && *text ? std::strtoull(text, nullptr, 10) : fallback;
}

}  // namespace

State::State() {
  settings.num_devices = num_visible_devices(number_from("VIRTUAL_GPU_DEVICES", 1));
  settings.devices_per_process = static_cast<int>(number_from("VIRTUAL_GPU_DEVICES_PER_PROCESS", 1));
  if (const char* profile = std::getenv("VIRTUAL_GPU_PROFILE")) settings.profile = profile;
  settings.runs_libtorch = number_from("VIRTUAL_GPU_LIBTORCH", 0) != 0;
  settings.memory_only = settings.runs_libtorch || number_from("VIRTUAL_GPU_MEMORY_ONLY", 0) != 0;
  settings.is_prompt = number_from("VIRTUAL_GPU_PROMPT", 0) != 0;
  const char* races = std::getenv("VIRTUAL_GPU_RACES");
  settings.ends_at_race = races && std::string_view(races) == "fatal";
  settings.checks_races = settings.ends_at_race || number_from("VIRTUAL_GPU_RACES", 1) != 0;
  settings.poisons = !settings.memory_only && number_from("VIRTUAL_GPU_POISON", 1) != 0;
  settings.launch_blocking = number_from("CUDA_LAUNCH_BLOCKING", 0) != 0;
  settings.queue_limit = number_from("VIRTUAL_GPU_QUEUE_LIMIT", 0);
  settings.loads_lazily = number_from("VIRTUAL_GPU_LAZY_LOADING", 0) != 0;
  settings.num_queues = static_cast<int>(number_from("VIRTUAL_GPU_QUEUES", 0));
  settings.max_delay_us = static_cast<int64_t>(number_from("VIRTUAL_GPU_DELAY_US", 0));
  settings.seed = number_from("VIRTUAL_GPU_SEED", 1);
  settings.traces = number_from("VIRTUAL_GPU_TRACE", 0) != 0;
  settings.graphs_read_host = number_from("VIRTUAL_GPU_GRAPHS_READ_HOST", 1) != 0;
  random.seed(settings.seed);
}

// Never destroyed: LibTorch uses the device while static objects are destroyed.
State& state() {
  static auto* s = new State;
  return *s;
}

cudaError_t fail(cudaError_t error) {
  if (error != cudaErrorNotReady) last_error = error;
  return error;
}

Stream& stream_of(cudaStream_t handle) {
  if (handle != nullptr && handle != cudaStreamLegacy && handle != cudaStreamPerThread)
    return *reinterpret_cast<Stream*>(handle);
  State& s = state();
  Stream*& stream = s.default_streams[current_device()];
  if (!stream) {
    s.streams.push_back(std::make_unique<Stream>());
    stream = s.streams.back().get();
    stream->id = -1 - current_device();
    stream->device = current_device();
  }
  return *stream;
}

cudaError_t break_capture(Capture& capture, cudaError_t error) {
  capture.is_broken = true;
  return fail(error);
}

cudaError_t check_capture(const Stream& stream) {
  return stream.capture && stream.capture->is_broken ? fail(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}

cudaError_t check_no_capture() {
  State& s = state();
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (const auto& capture : s.captures) {
    const bool is_own = capture->thread == std::this_thread::get_id();
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    if (!is_own &&
        (thread_mode != cudaStreamCaptureModeGlobal || capture->mode != cudaStreamCaptureModeGlobal))
      continue;
    return break_capture(*capture, cudaErrorStreamCaptureUnsupported);
  }
  return cudaSuccess;
}

// Neither a stream that is being captured nor anything that contains it can be asked or waited for, in any mode.
static cudaError_t check_is_no_capture(const Stream& stream) {
  return stream.capture ? break_capture(*stream.capture, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
static cudaError_t check_is_no_capture(const Event& event) {
  return event.capture ? break_capture(*event.capture, cudaErrorCapturedEvent) : check_no_capture();
}

// ---- the interface for the other libraries

Operation computation(std::string name, std::vector<Range> ranges, std::function<void()> work) {
  return {std::move(name), std::move(ranges), [work = std::move(work)]() -> Attempt {
            return [work] {
              work();
              return true;
            };
          }};
}

static std::set<std::tuple<int, std::string, const void*>>& loaded_kernels() {
  static auto* loaded = new std::set<std::tuple<int, std::string, const void*>>;
  return *loaded;
}

// CUDA loads a kernel at its first launch, for which the host may have to wait until the device has nothing to do.
static bool all_launches_load = false;  // the state's mutex is held

static void load_kernel(Lock& lock, const Stream& stream, const std::string& name, const void* code) {
  for (const char* other : {"nccl", "cudaMem", "cuMem", "host function", "callback"})
    if (name.starts_with(other)) return;
  if (loaded_kernels().insert({stream.device, name, code}).second || all_launches_load)
    wait_for_device(lock, stream.device);
}

// The operation whose InOperation the thread is in.
static thread_local std::string open_operation;
static thread_local bool has_launched = false;

InOperation::InOperation(std::string name) : is_outermost_(open_operation.empty()) {
  if (!is_outermost_) return;
  open_operation = std::move(name);
  has_launched = false;
}
InOperation::~InOperation() {
  if (is_outermost_) open_operation.clear();
}

// A copy that aten::copy_ leaves to CUDA is counted by CUDA's name.
static void join_open_operation(Operation& operation) {
  if (open_operation.empty() || operation.is_bookkeeping) return;
  if (open_operation == "aten::copy_" && operation.name.starts_with("cudaMemcpy")) return;
  operation.name = open_operation;
  operation.is_continued = std::exchange(has_launched, true);
}

cudaError_t submit(cudaStream_t handle, Operation operation) {
  if (!operation.is_bookkeeping) need_context(operation.name.c_str());
  const OwnWork own;
  const std::string kernel = operation.name;
  join_open_operation(operation);
  State& s = state();
  Lock lock(s.mutex);
  Stream& stream = stream_of(handle);
  if (stream.capture && stream.capture->is_broken)
    return operation.is_bookkeeping ? cudaSuccess : check_capture(stream);
  if (s.settings.traces)
    std::fprintf(stderr, "virtual GPU: stream %d: %s\n", stream.id, operation.name.c_str());
  if (s.settings.checks_races) operation.label = label_here(operation.name);
  if (s.settings.loads_lazily && !stream.capture && !operation.is_bookkeeping)
    load_kernel(lock, stream, kernel, operation.code);
  if (stream.capture) {
    operation.recorded_in = module_here();
    stamp_captured(operation);
  } else {
    count_operation(operation);
    stamp(stream, operation);
  }
  push(lock, stream, std::move(operation));
  return cudaSuccess;
}

void wait_for(cudaStream_t handle, const std::string& call) {
  Lock lock(state().mutex);
  count_host_wait(call);
  Stream& stream = stream_of(handle);
  wait_for(lock, stream);
  host_has_seen(stream);
}

bool is_capturing(cudaStream_t handle) {
  Lock lock(state().mutex);
  return stream_of(handle).capture != nullptr;
}

bool computes() { return !state().settings.memory_only; }
bool runs_libtorch() { return state().settings.runs_libtorch; }
bool poisons() { return state().settings.poisons; }
bool checks_races() { return state().settings.checks_races; }

// The function knows of all operations that have run before it.
static cudaError_t submit_host_function(cudaStream_t handle, const char* name,
                                        std::function<void()> function) {
  return submit(handle, computation(name, {}, [function = std::move(function)] {
                  if (const Stamp* stamp = running_stamp()) {
                    const Lock lock(state().mutex);
                    host_has_seen(stamp->clock);
                  }
                  function();
                }));
}

void not_supported(const std::string& what, const std::string& remedy) {
  end_program("virtual GPU: %s is not supported. %s\n", what.c_str(), remedy.c_str());
}

}  // namespace virtual_gpu

// ---- CUDA's functions

using namespace virtual_gpu;

extern "C" {

// For tests, with VIRTUAL_GPU_LAZY_LOADING: how many kernels have been loaded, and whether each launch counts as its kernel's first.
int virtual_gpu_num_loaded() {
  const Lock lock(state().mutex);
  return static_cast<int>(loaded_kernels().size());
}
void virtual_gpu_load_at_each_launch(int does) {
  const Lock lock(state().mutex);
  all_launches_load = does != 0;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  need_context("cudaThreadExchangeStreamCaptureMode");
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  need_context("cudaStreamCreateWithPriority");
  State& s = state();
  Lock lock(s.mutex);
  s.streams.push_back(std::make_unique<Stream>());
  Stream& stream = *s.streams.back();
  stream.id = new_stream_id();
  stream.device = current_device();
  stream.priority = priority;
  stream.flags = flags;
  *handle = reinterpret_cast<cudaStream_t>(&stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  need_context("cudaStreamDestroy");
  Lock lock(state().mutex);
  stream_of(handle).is_destroyed = true;
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  need_context("cudaStreamGetPriority");
  Lock lock(state().mutex);
  *priority = stream_of(handle).priority;
  return cudaSuccess;
}
cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  Lock lock(state().mutex);
  *flags = stream_of(handle).flags;
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  Lock lock(state().mutex);
  *id = static_cast<unsigned long long>(stream_of(handle).id);
  return cudaSuccess;
}
cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  Lock lock(state().mutex);
  *device = stream_of(handle).device;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  need_context("cudaStreamQuery");
  Lock lock(state().mutex);
  Stream& stream = stream_of(handle);
  if (const cudaError_t error = check_is_no_capture(stream)) return error;
  if (!stream.items.empty()) return fail(cudaErrorNotReady);
  host_has_seen(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  need_context("cudaStreamSynchronize");
  Lock lock(state().mutex);
  Stream& stream = stream_of(handle);
  if (const cudaError_t error = check_is_no_capture(stream)) return error;
  count_host_wait("cudaStreamSynchronize");
  wait_for(lock, stream);
  host_has_seen(stream);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  need_context("cudaDeviceSynchronize");
  Lock lock(state().mutex);
  cudaError_t error = cudaSuccess;
  for (const auto& capture : state().captures)
    if (capture->origin->device == current_device())
      error = break_capture(*capture, cudaErrorStreamCaptureUnsupported);
  if (error) return error;
  count_host_wait("cudaDeviceSynchronize");
  wait_for_device(lock, current_device());
  host_has_seen_device(current_device());
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  need_context("cudaStreamWaitEvent");
  Lock lock(state().mutex);
  Stream& stream = stream_of(handle);
  Event& event = *reinterpret_cast<Event*>(event_handle);
  if (!event.marker) return cudaSuccess;  // an event that was never recorded is complete
  if (const cudaError_t error = check_capture(stream)) return error;
  if (stream.capture && !event.capture)
    return break_capture(*stream.capture, cudaErrorStreamCaptureIsolation);
  if (event.capture && event.capture != stream.capture) {
    const auto& captures = state().captures;
    if (std::ranges::find(captures, event.capture) == captures.end()) return fail(cudaErrorCapturedEvent);
    if (stream.capture) {
      event.capture->is_broken = true;
      return break_capture(*stream.capture, cudaErrorStreamCaptureMerge);
    }
    stream.capture = event.capture;
  }
  if (!stream.capture) stream_has_seen(stream, event.clock);
  push(lock, stream, WaitFor{event.marker});
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  return submit_host_function(handle, "host function", [function, data] { function(data); });
}
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data, unsigned) {
  return submit_host_function(handle, "callback",
                              [handle, function, data] { function(handle, cudaSuccess, data); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  need_context("cudaEventCreateWithFlags");
  auto* const made = new Event;
  made->is_timed = (flags & cudaEventDisableTiming) == 0;
  *event = reinterpret_cast<cudaEvent_t>(made);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  need_context("cudaEventDestroy");
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event_handle, cudaStream_t handle, unsigned) {
  need_context("cudaEventRecordWithFlags");
  Lock lock(state().mutex);
  Stream& stream = stream_of(handle);
  Event& event = *reinterpret_cast<Event*>(event_handle);
  if (const cudaError_t error = check_capture(stream)) return error;
  event.marker = std::make_shared<Marker>();
  event.capture = stream.capture;
  event.clock = clock_of(stream);
  push(lock, stream, Reached{event.marker});
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  return cudaEventRecordWithFlags(event, handle, 0);
}
cudaError_t cudaEventQuery(cudaEvent_t event_handle) {
  Lock lock(state().mutex);
  Event& event = *reinterpret_cast<Event*>(event_handle);
  if (const cudaError_t error = check_is_no_capture(event)) return error;
  const MarkerPtr marker = event.marker;
  const Clock clock = event.clock;
  if (marker && !marker->is_done) {
    if (!state().settings.is_prompt) return fail(cudaErrorNotReady);
    wait_for(lock, marker);
  }
  host_has_seen(clock);
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event_handle) {
  Lock lock(state().mutex);
  Event& event = *reinterpret_cast<Event*>(event_handle);
  if (const cudaError_t error = check_is_no_capture(event)) return error;
  count_host_wait("cudaEventSynchronize");
  const MarkerPtr marker = event.marker;
  const Clock clock = event.clock;
  if (marker) wait_for(lock, marker);
  host_has_seen(clock);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t second) {
  Lock lock(state().mutex);
  const Event& a = *reinterpret_cast<Event*>(first);
  const Event& b = *reinterpret_cast<Event*>(second);
  if (!a.is_timed || !b.is_timed || !a.marker || !b.marker) return fail(cudaErrorInvalidResourceHandle);
  if (!a.marker->is_done || !b.marker->is_done) return fail(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(b.marker->done_at - a.marker->done_at).count();
  return cudaSuccess;
}

}  // extern "C"
