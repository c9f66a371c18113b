#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "runtime/virtual_gpu.h"

/// Streams, events and graphs, and the thread that runs what is queued.
namespace virtual_gpu {

using Time = std::chrono::steady_clock::time_point;

/// For each stream, the number of its operations that have happened before. A sorted array: each operation copies one and joins two.
class Clock {
 public:
  bool empty() const { return numbers_.empty(); }
  /// 0 if none has happened before.
  uint64_t operator[](int stream) const;
  void set(int stream, uint64_t number);
  /// Takes the later of both for each stream, and returns whether that changes this clock.
  bool join(const Clock& other);

 private:
  std::vector<std::pair<int, uint64_t>> numbers_;  // in the order of streams
};

/// A point in a stream that others wait for. Each record of an event makes a new one.
struct Marker {
  bool is_done = false;
  Time done_at;
};
using MarkerPtr = std::shared_ptr<Marker>;

struct Reached {
  MarkerPtr marker;
};
struct WaitFor {
  MarkerPtr marker;
};
using Item = std::variant<Operation, Reached, WaitFor>;

struct Stream;

/// A recorded capture: its streams' items in the order of the host's calls. Each captured stream is a lane of the graph, which has its own
/// number among those of streams. Markers within it are those of the capture; each launch replaces them with new ones.
struct Graph {
  struct Recorded {
    Stream* captured = nullptr;
    Item item;
  };
  std::vector<Recorded> items;
  std::map<const Stream*, int> lanes;
};

/// A capture that has begun and not ended.
struct Capture {
  uint64_t id = 0;
  Stream* origin = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  bool is_broken = false;  ///< a call that isn't allowed during a capture was made
};

struct Stream {
  int id = 0;
  int device = 0;
  int priority = 0;
  unsigned flags = 0;
  std::deque<Item> items;
  Attempt running;            ///< the first item's attempt, once it has begun
  bool is_running = false;    ///< the scheduler is in the first item at this moment
  bool is_destroyed = false;  ///< is deleted when its items have run
  bool is_lane = false;       ///< belongs to a graph's launch: its id stays the graph's
  Time not_before;            ///< the first item may not run earlier, if times are drawn at random
  bool has_not_before = false;
  uint64_t num_delays = 0;
  Clock clock;
  std::shared_ptr<Capture> capture;
};

struct Event {
  bool is_timed = true;
  MarkerPtr marker;  ///< none before the first record
  Clock clock;
  std::shared_ptr<Capture> capture;
};

/// How the device behaves; read from the environment once, see docs/virtual_gpu.md.
struct Settings {
  int num_devices = 1;
  int devices_per_process = 1;  ///< that it may choose
  std::string profile = "h100";
  bool memory_only = false;
  bool runs_libtorch = false;  ///< memory_only, with LibTorch's own code of its operations
  bool is_prompt = false;      ///< work is done when the host asks
  bool checks_races = true;
  bool ends_at_race = false;
  bool poisons = true;
  bool launch_blocking = false;
  bool loads_lazily = false;  ///< at a kernel's first launch the host waits for the device
  size_t queue_limit = 0;     ///< the host waits if a stream has this many operations; 0: never
  int num_queues = 0;         ///< that all streams share; 0: each has its own
  int64_t max_delay_us = 0;   ///< operations and completions are late by up to this; 0: never
  uint64_t seed = 0;
  bool traces = false;           ///< prints each operation
  bool graphs_read_host = true;  ///< a recorded copy may read page-locked memory
};

/// All state of the virtual devices of this process; `mutex` guards every field and every Stream and Event.
struct State {
  Settings settings;
  std::mutex mutex;
  std::condition_variable changed;  ///< an item has run, or was queued
  std::vector<std::unique_ptr<Stream>> streams;
  std::map<int, Stream*> default_streams;
  std::map<int, uint64_t> num_operations;  ///< by stream id
  std::vector<std::shared_ptr<Capture>> captures;
  uint64_t next_capture = 1;
  int next_stream = 1;
  std::map<int, std::deque<Stream*>>
      queues;                       ///< the streams of the items that haven't begun, as the host queued them
  std::vector<int> unused_streams;  ///< ids of deleted streams
  std::map<int, int> lanes;         ///< the captured streams' ids, by those of the lanes of graphs
  std::mt19937_64 random;
  bool scheduler_runs = false;

  State();
};
State& state();

using Lock = std::unique_lock<std::mutex>;

/// Whether a thread runs queued operations.
bool scheduler_has_started();
/// Ends that thread for good. Waits for the operation that is running, which can take seconds on a busy machine.
void stop_scheduler(void* unused);

/// The device that this thread has chosen with cudaSetDevice.
int current_device();
/// Whether this process has a context on the device: it has chosen the device, or worked on it without having chosen any.
bool has_context(int device);
/// For calls that make a context, of hundreds of MB, on the thread's device if there is none. Ends the program if there is one on another device.
void need_context(const char* call);

/// The stream of a handle; null stands for the current device's default stream.
Stream& stream_of(cudaStream_t handle);

/// Remembers the error for cudaGetLastError and returns it.
cudaError_t fail(cudaError_t error);

/// Queues the item, or records it if the stream is being captured.
void push(Lock& lock, Stream& stream, Item item);
/// The host waits until the stream's queue has a place, if VIRTUAL_GPU_QUEUE_LIMIT limits it.
void wait_for_place(Lock& lock, Stream& stream);
void wait_for(Lock& lock, Stream& stream);
void wait_for(Lock& lock, const MarkerPtr& marker);
void wait_for_device(Lock& lock, int device);

/// Ends a capture because of a call that isn't allowed, and returns the error.
cudaError_t break_capture(Capture& capture, cudaError_t error);
/// An error if the stream is being captured and a call that isn't allowed has been made meanwhile.
cudaError_t check_capture(const Stream& stream);
/// An error if a capture is under way during which this thread may not query or wait for events, or allocate memory; it breaks the
/// capture, as CUDA does. https://docs.nvidia.com/cuda/cuda-runtime-api, cudaThreadExchangeStreamCaptureMode.
cudaError_t check_no_capture();

}  // namespace virtual_gpu
