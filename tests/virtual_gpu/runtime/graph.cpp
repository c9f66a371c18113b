// Captures and graphs. A capture records items and runs none; a launch runs a copy of them, each captured stream in a
// lane of its own, so that what could run at the same time still can.

#include <cstdio>
#include <map>
#include <memory>
#include <ranges>
#include <set>
#include <utility>

#include "runtime/counters.h"
#include "runtime/races.h"
#include "runtime/stream.h"

namespace virtual_gpu {
namespace {

// The origin must wait for each stream's last operation, or for a stream that does. From the end backwards, streams are joined before the
// markers that joined ones wait for.
bool all_are_joined(const Capture& capture) {
  std::set<const Marker*> waited_for;
  std::set<const Stream*> joined = {capture.origin};
  for (const auto& [captured, item] : std::views::reverse(capture.graph->items)) {
    if (const auto* wait = std::get_if<WaitFor>(&item)) {
      if (joined.contains(captured)) waited_for.insert(wait->marker.get());
    } else if (const auto* reached = std::get_if<Reached>(&item)) {
      if (waited_for.contains(reached->marker.get())) joined.insert(captured);
    } else if (const auto& operation = std::get<Operation>(item);
               !operation.is_bookkeeping && !joined.contains(captured)) {
      std::fprintf(stderr, "virtual GPU: nothing in the capture waits for %s (%s) on stream %d\n",
                   operation.name.c_str(), operation.recorded_in ? operation.recorded_in->c_str() : "",
                   captured->id);
      return false;
    }
  }
  return true;
}

// A marker of the capture in this launch.
struct Fresh {
  MarkerPtr marker = std::make_shared<Marker>();
  Clock clock;
};

void launch(Lock& lock, const Graph& graph, Stream& origin) {
  State& s = state();
  wait_for_place(lock, origin);
  const auto start = std::make_shared<Marker>();
  push(lock, origin, Reached{start});
  std::map<const Stream*, std::unique_ptr<Stream>> lanes;
  for (const auto& [captured, id] : graph.lanes) {
    auto& lane = lanes[captured] = std::make_unique<Stream>();
    lane->device = origin.device;
    lane->id = id;
    lane->clock = clock_of(origin);
    lane->is_destroyed = true;  // deleted when its items have run
    lane->is_lane = true;
    lane->items.push_back(WaitFor{start});
  }
  std::map<const Marker*, Fresh> markers;
  for (const auto& [captured, item] : graph.items) {
    Stream& lane = *lanes.at(captured);
    if (const auto* reached = std::get_if<Reached>(&item)) {
      Fresh& fresh = markers[reached->marker.get()];
      fresh.clock = clock_of(lane);
      lane.items.push_back(Reached{fresh.marker});
    } else if (const auto* wait = std::get_if<WaitFor>(&item)) {
      const Fresh& fresh = markers[wait->marker.get()];
      stream_has_seen(lane, fresh.clock);
      lane.items.push_back(WaitFor{fresh.marker});
    } else {
      Operation operation = std::get<Operation>(item);
      if (operation.begin_at_launch) operation.begin = operation.begin_at_launch();
      stamp(lane, operation);
      count_operation(operation);
      lane.items.push_back(std::move(operation));
    }
  }
  std::vector<MarkerPtr> ends;
  for (auto& [captured, lane] : lanes) {
    ends.push_back(std::make_shared<Marker>());
    lane->items.push_back(Reached{ends.back()});
    stream_has_seen(origin, clock_of(*lane));
    s.streams.push_back(std::move(lane));
  }
  for (const MarkerPtr& end : ends) push(lock, origin, WaitFor{end});
  if (s.settings.launch_blocking) wait_for(lock, origin);
}

// Its lanes' ids are those of streams again when nothing can launch it any more.
void destroy(void* handle) {
  const std::unique_ptr<std::shared_ptr<Graph>> graph(static_cast<std::shared_ptr<Graph>*>(handle));
  const Lock lock(state().mutex);  // released before the graph's tensors are
  if (graph->use_count() > 1) return;
  for (const auto& [captured, id] : (*graph)->lanes) state().unused_streams.push_back(id);
}

}  // namespace
}  // namespace virtual_gpu

using namespace virtual_gpu;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  need_context("cudaStreamBeginCapture");
  State& s = state();
  Lock lock(s.mutex);
  if (handle == nullptr || handle == cudaStreamLegacy) return fail(cudaErrorStreamCaptureUnsupported);
  Stream& stream = stream_of(handle);
  if (stream.capture) return fail(cudaErrorIllegalState);
  stream.capture = std::make_shared<Capture>();
  stream.capture->id = s.next_capture++;
  stream.capture->origin = &stream;
  stream.capture->mode = mode;
  stream.capture->thread = std::this_thread::get_id();
  s.captures.push_back(stream.capture);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  need_context("cudaStreamEndCapture");
  State& s = state();
  Lock lock(s.mutex);
  Stream& stream = stream_of(handle);
  *graph = nullptr;
  const std::shared_ptr<Capture> capture = stream.capture;
  if (!capture) return fail(cudaErrorIllegalState);
  if (capture->origin != &stream) return fail(cudaErrorStreamCaptureUnmatched);
  for (const auto& other : s.streams)
    if (other->capture == capture) other->capture = nullptr;
  std::erase(s.captures, capture);
  if (capture->is_broken) return fail(cudaErrorStreamCaptureInvalidated);
  if (!all_are_joined(*capture)) return fail(cudaErrorStreamCaptureUnjoined);
  // Events that were recorded keep the capture.
  *graph = reinterpret_cast<cudaGraph_t>(
      new std::shared_ptr<Graph>(std::exchange(capture->graph, std::make_shared<Graph>())));
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* num_nodes) {
  need_context("cudaStreamGetCaptureInfo");
  Lock lock(state().mutex);
  const auto& capture = stream_of(handle).capture;
  *status = !capture             ? cudaStreamCaptureStatusNone
            : capture->is_broken ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = capture ? reinterpret_cast<cudaGraph_t>(&capture->graph) : nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (num_nodes) *num_nodes = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* num_nodes) {
  *num_nodes = (*reinterpret_cast<std::shared_ptr<Graph>*>(graph))->items.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(
      new std::shared_ptr<Graph>(*reinterpret_cast<std::shared_ptr<Graph>*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  need_context("cudaGraphLaunch");
  Lock lock(state().mutex);
  launch(lock, **reinterpret_cast<std::shared_ptr<Graph>*>(executable), stream_of(handle));
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  destroy(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  destroy(executable);
  return cudaSuccess;
}

}  // extern "C"
