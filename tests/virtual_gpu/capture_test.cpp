// CUDA graphs: what a capture records and what it refuses, and what a launch reads.

#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include "virtual_gpu_test.h"

namespace virtual_gpu_test {
namespace {

/// A capture on the current stream that is expected to fail. LibTorch's allocator stays in it, and keeps freed memory, until endAllocateToPool.
class FailingCapture {
 public:
  FailingCapture() { graph_.capture_begin(pool_); }
  ~FailingCapture() {
    EXPECT_THROW(graph_.capture_end(), c10::Error);
    c10::cuda::CUDACachingAllocator::endAllocateToPool(0, pool_);
    cudaGetLastError();
  }

 private:
  at::cuda::MempoolId_t pool_ = at::cuda::graph_pool_handle();
  at::cuda::CUDAGraph graph_;
};

TEST_F(VirtualGpu, GraphsRecordWithoutRunningAndReplay) {
  const CUDAStreamGuard guard(side_);
  const Tensor in = at::ones({4}, on_gpu), count = at::zeros({1}, on_gpu);
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  count.add_(1);
  const Tensor out = (in * 2 + 1).sum();
  graph.capture_end();
  EXPECT_EQ(count.item<float>(), 0);
  graph.replay();
  EXPECT_EQ(out.item<float>(), 12);
  in.fill_(2);
  graph.replay();
  EXPECT_EQ(out.item<float>(), 20);
  EXPECT_EQ(count.item<float>(), 2);
}

TEST_F(VirtualGpu, OperationsOfAGraphCountWhenItIsLaunched) {
  const CUDAStreamGuard guard(side_);
  const Tensor x = at::zeros({4}, on_gpu);
  start_counting();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  {
    RECORD_USER_SCOPE("recorded module");
    x.add_(1);
  }
  graph.capture_end();
  EXPECT_EQ(count("launches", "aten::add_"), 0u);
  for (int i = 0; i < 3; ++i) graph.replay();
  EXPECT_EQ(count("launches", "aten::add_", "recorded module"), 3u);
  EXPECT_EQ(count("bytes_written", "aten::add_", "recorded module"), 3u * 16);
}

// As without a graph, one after the other.
TEST_F(VirtualGpu, EachLaunchOfAGraphDrawsNewRandomNumbers) {
  const CUDAStreamGuard guard(side_);
  const Tensor drawn = at::zeros({1000}, on_gpu);
  const auto two_of = [&](const std::function<void()>& draw) {
    at::Generator generator = at::globalContext().defaultGenerator(at::Device(at::kCUDA, 0));
    generator.set_current_seed(5);
    draw();
    const Tensor first = drawn.cpu();
    draw();
    return std::pair(first, drawn.cpu());
  };
  const auto [first, second] = two_of([&] { drawn.uniform_(); });
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  drawn.uniform_();
  graph.capture_end();
  const auto [launched, launched_again] = two_of([&] { graph.replay(); });
  EXPECT_FALSE(first.equal(second));
  EXPECT_TRUE(launched.equal(first));
  EXPECT_TRUE(launched_again.equal(second));
}

// A launch reads what the memory of the host holds then; what is passed by value is that of the capture.
TEST_F(VirtualGpu, EachLaunchOfAGraphReadsTheHostsMemoryAgain) {
  const CUDAStreamGuard guard(side_);
  const Tensor copied = at::zeros({64}, on_gpu), computed = at::zeros({64}, on_gpu);
  Tensor host = at::full({64}, 1.f, pinned), returned = at::zeros({64}, pinned), number = at::full({}, 10.f);
  c10::cuda::device_synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  copied.copy_(host, /*non_blocking=*/true);
  launch_planted("sound_kernel", computed, host, 1);
  computed.add_(number);
  returned.copy_(computed, /*non_blocking=*/true);
  graph.capture_end();
  number.fill_(20);
  for (const float value : {2.f, 3.f}) {
    host.fill_(value);
    graph.replay();
    num_races();  // it has run
    EXPECT_EQ(returned.const_data_ptr<float>()[0], value == 2 ? 0 : 12) << "before the host synchronizes";
    side_.synchronize();
    EXPECT_EQ(returned.const_data_ptr<float>()[0], value + 10);
    EXPECT_EQ(copied.min().item<float>(), value);
    EXPECT_EQ(computed.min().item<float>(), value + 10);
  }
  graph.replay();
  host.fill_(4);
  EXPECT_GE(new_races(), 1) << "the host changes what a launch may still read";
  side_.synchronize();
}

TEST_F(VirtualGpu, AReadDuringACaptureFails) {
  const CUDAStreamGuard guard(side_);
  const Tensor in = at::ones({4}, on_gpu);
  const std::pair<const char*, std::function<void()>> reads[] = {
      {"item", [&] { in.sum().item<float>(); }},
      {"copy_ to pinned memory", [&] { at::zeros({4}, pinned).copy_(in); }},
      {"equal", [&] { in.equal(in); }},
      {"nonzero", [&] { in.nonzero(); }},
      {"an index by a mask", [&] { in.index({in > 0}); }}};
  for (const auto& [name, read] : reads) {
    SCOPED_TRACE(name);
    const FailingCapture capture;
    EXPECT_THROW(read(), c10::Error);
  }
  // LibTorch refuses this one before it calls CUDA.
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  EXPECT_THROW(in.cpu(), c10::Error);
  in.add_(1);
  graph.capture_end();
}

// As CUDA's launches do: cudaErrorStreamCaptureInvalidated.
TEST_F(VirtualGpu, ACaptureThatHasFailedTakesNoMoreOperations) {
  const CUDAStreamGuard guard(side_);
  const Tensor x = at::ones({64}, on_gpu), y = at::ones({64}, on_gpu);
  float* const data = x.mutable_data_ptr<float>();
  ncclUniqueId id;
  ncclComm_t communicator = nullptr;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  ASSERT_EQ(ncclCommInitRank(&communicator, 1, id, 0), ncclSuccess);
  start_counting();
  std::optional<FailingCapture> capture(std::in_place);
  EXPECT_EQ(cudaStreamQuery(side_), cudaErrorStreamCaptureUnsupported);
  cudaGetLastError();
  EXPECT_THROW(x.add_(1), c10::Error);
  launch_planted("sound_kernel", x, y, 1);
  EXPECT_EQ(cudaGetLastError(), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaLaunchHostFunc(
                side_, [](void*) {}, nullptr),
            cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(ncclAllReduce(data, data, 1, ncclFloat, ncclSum, communicator, side_), ncclUnhandledCudaError);
  capture.reset();
  for (const char* name : {"aten::add_", "sound_kernel", "host function", "ncclAllReduce"})
    EXPECT_EQ(count("launches", name), 0u) << name;
  x.add_(1);
  EXPECT_EQ(x.min().item<float>(), 2);
  EXPECT_EQ(ncclCommDestroy(communicator), ncclSuccess);
}

TEST_F(VirtualGpu, ACaptureFailsUnlessTheWorkOfAllItsStreamsIsJoined) {
  const cudaStream_t origin = side_, first = other_, second = at::cuda::getStreamFromPool();
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 64), cudaSuccess);
  const auto work = [&](cudaStream_t stream) {
    EXPECT_EQ(cudaMemsetAsync(memory, 0, 64, stream), cudaSuccess);
  };
  const auto follow = [](cudaStream_t later, cudaStream_t earlier) {
    cudaEvent_t event = nullptr;
    EXPECT_EQ(cudaEventCreate(&event), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(event, earlier), cudaSuccess);
    EXPECT_EQ(cudaStreamWaitEvent(later, event, 0), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  };
  const auto fork = [&](cudaStream_t stream) { follow(stream, origin); };
  struct Row {
    const char* name;
    std::function<void()> capture;
    cudaError_t error;
  };
  constexpr auto unjoined = cudaErrorStreamCaptureUnjoined;
  const Row rows[] = {
      {"joined", [&] { fork(first), work(first), follow(origin, first); }, cudaSuccess},
      {"not joined", [&] { fork(first), work(first); }, unjoined},
      {"nothing to join", [&] { fork(first); }, cudaSuccess},
      {"joined by another stream",
       [&] { fork(first), work(first), follow(second, first), follow(origin, second); }, cudaSuccess},
      {"joined to a stream that isn't", [&] { fork(first), work(first), follow(second, first); }, unjoined},
      {"joined to a stream that was joined before",
       [&] {
         fork(first), fork(second), work(first), work(second), follow(origin, second);
         follow(second, first);
       },
       unjoined},
      {"work after the join", [&] { fork(first), work(first), follow(origin, first), work(first); },
       unjoined},
  };
  for (const auto& [name, capture, error] : rows) {
    SCOPED_TRACE(name);
    ASSERT_EQ(cudaStreamBeginCapture(origin, cudaStreamCaptureModeRelaxed), cudaSuccess);
    work(origin);
    capture();
    cudaGraph_t graph = nullptr;
    EXPECT_STREQ(cudaGetErrorName(cudaStreamEndCapture(origin, &graph)), cudaGetErrorName(error));
    EXPECT_EQ(graph != nullptr, error == cudaSuccess);
    if (graph) cudaGraphDestroy(graph);
    cudaGetLastError();
  }
  cudaFree(memory);
  // Memory that is freed after the join is no work.
  const CUDAStreamGuard guard(side_);
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  at::cuda::CUDAEvent begun, done;
  begun.record();
  begun.block(other_);
  Tensor x;
  {
    const CUDAStreamGuard on_other(other_);
    x = at::ones({4}, on_gpu);
    done.record();
  }
  done.block(side_);
  x.reset();
  graph.capture_end();
}

// https://docs.nvidia.com/cuda/cuda-programming-guide, "Prohibited and unhandled operations" of stream capture; modes as documented at
// cudaThreadExchangeStreamCaptureMode.
TEST_F(VirtualGpu, CallsThatAreNotAllowedDuringACaptureFailAsCudas) {
  constexpr auto global = cudaStreamCaptureModeGlobal, local = cudaStreamCaptureModeThreadLocal,
                 relaxed = cudaStreamCaptureModeRelaxed;
  constexpr auto unsupported = cudaErrorStreamCaptureUnsupported;
  cudaEvent_t before = nullptr, within = nullptr, of_merged = nullptr;
  for (cudaEvent_t* event : {&before, &within, &of_merged}) ASSERT_EQ(cudaEventCreate(event), cudaSuccess);
  void *device = nullptr, *host = nullptr;
  ASSERT_EQ(cudaMalloc(&device, 64), cudaSuccess);
  ASSERT_EQ(cudaMallocHost(&host, 64), cudaSuccess);
  int pageable[16] = {};
  const cudaStream_t stream = side_, merged = other_;
  const auto allocate = [] {
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, 64);
    cudaFree(memory);
    return error;
  };
  struct Row {
    const char* call;
    std::function<cudaError_t()> run;
    cudaStreamCaptureMode mode;
    cudaError_t error, error_on_other_thread;
  };
  const auto query = [&] { return cudaEventQuery(before); };
  const auto wait = [&] { return cudaEventSynchronize(before); };
  const auto copy = [&] { return cudaMemcpy(device, pageable, 64, cudaMemcpyHostToDevice); };
  const auto on_stream = [&](auto function) { return [=] { return function(stream); }; };
  const Row rows[] = {
      {"cudaEventQuery", query, global, unsupported, unsupported},
      {"cudaEventQuery", query, local, unsupported, cudaSuccess},
      {"cudaEventQuery", query, relaxed, cudaSuccess, cudaSuccess},
      {"cudaEventSynchronize", wait, global, unsupported, unsupported},
      {"cudaEventSynchronize", wait, local, unsupported, cudaSuccess},
      {"cudaEventSynchronize", wait, relaxed, cudaSuccess, cudaSuccess},
      {"cudaMalloc", allocate, global, unsupported, unsupported},
      {"cudaMalloc", allocate, local, unsupported, cudaSuccess},
      {"cudaMalloc", allocate, relaxed, cudaSuccess, cudaSuccess},
      {"cudaMemcpy", copy, global, unsupported, unsupported},
      {"cudaMemcpy", copy, local, unsupported, cudaSuccess},
      {"cudaMemcpy", copy, relaxed, cudaSuccess, cudaSuccess},
      {"cudaDeviceSynchronize", cudaDeviceSynchronize, global, unsupported, unsupported},
      {"cudaDeviceSynchronize", cudaDeviceSynchronize, relaxed, unsupported, unsupported},
      {"cudaStreamSynchronize", on_stream(cudaStreamSynchronize), relaxed, unsupported, unsupported},
      {"cudaStreamQuery", on_stream(cudaStreamQuery), relaxed, unsupported, unsupported},
      {"cudaEventQuery of a captured event", [&] { return cudaEventQuery(within); }, relaxed,
       cudaErrorCapturedEvent, cudaErrorCapturedEvent},
      {"cudaEventSynchronize of a captured event", [&] { return cudaEventSynchronize(within); }, relaxed,
       cudaErrorCapturedEvent, cudaErrorCapturedEvent},
      {"a wait for an event of before", [&] { return cudaStreamWaitEvent(stream, before, 0); }, relaxed,
       cudaErrorStreamCaptureIsolation, cudaErrorStreamCaptureIsolation},
      {"a wait for another capture", [&] { return cudaStreamWaitEvent(stream, of_merged, 0); }, relaxed,
       cudaErrorStreamCaptureMerge, cudaErrorStreamCaptureMerge},
      {"cudaMemcpyAsync to pageable memory",
       [&] { return cudaMemcpyAsync(pageable, device, 64, cudaMemcpyDeviceToHost, stream); }, relaxed,
       unsupported, unsupported},
      {"cudaMemcpyAsync to pinned memory",
       [&] { return cudaMemcpyAsync(host, device, 64, cudaMemcpyDeviceToHost, stream); }, global, cudaSuccess,
       cudaSuccess},
  };
  for (const auto& [call, run, mode, error, error_on_other_thread] : rows) {
    for (const bool on_other_thread : {false, true}) {
      SCOPED_TRACE(std::string(call) + ", mode " + std::to_string(mode) +
                   (on_other_thread ? ", another thread" : ""));
      ASSERT_EQ(cudaEventRecord(before, main_), cudaSuccess);
      main_.synchronize();
      ASSERT_EQ(cudaStreamBeginCapture(stream, mode), cudaSuccess);
      ASSERT_EQ(cudaEventRecord(within, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamBeginCapture(merged, relaxed), cudaSuccess);
      ASSERT_EQ(cudaEventRecord(of_merged, merged), cudaSuccess);
      cudaError_t found = cudaSuccess;
      if (on_other_thread)
        std::thread([&] { found = run(); }).join();
      else
        found = run();
      const cudaError_t expected = on_other_thread ? error_on_other_thread : error;
      EXPECT_STREQ(cudaGetErrorName(found), cudaGetErrorName(expected));
      // A call that isn't allowed ends the capture, and the stream takes no more copies or events.
      const cudaError_t later = expected == cudaSuccess ? cudaSuccess : cudaErrorStreamCaptureInvalidated;
      EXPECT_STREQ(cudaGetErrorName(cudaEventRecord(within, stream)), cudaGetErrorName(later));
      EXPECT_STREQ(cudaGetErrorName(cudaMemsetAsync(device, 0, 64, stream)), cudaGetErrorName(later));
      cudaGraph_t graph = nullptr;
      EXPECT_STREQ(cudaGetErrorName(cudaStreamEndCapture(stream, &graph)), cudaGetErrorName(later));
      if (graph) cudaGraphDestroy(graph);
      graph = nullptr;
      cudaStreamEndCapture(merged, &graph);
      if (graph) cudaGraphDestroy(graph);
      cudaGetLastError();
    }
  }
  EXPECT_EQ(cudaStreamWaitEvent(stream, within, 0), cudaErrorCapturedEvent) << "of a capture that has ended";
  cudaGetLastError();
  for (cudaEvent_t event : {before, within, of_merged}) cudaEventDestroy(event);
  cudaFree(device);
  cudaFreeHost(host);
}

}  // namespace
}  // namespace virtual_gpu_test
