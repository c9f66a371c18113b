// Races between operations, and with the host: each kind is planted, and its sound counterpart isn't reported. Those within a kernel are in
// kernels_test.cpp.

#include <atomic>
#include <chrono>
#include <functional>
#include <regex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/record_function.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include "virtual_gpu_test.h"

namespace virtual_gpu_test {
namespace {

TEST_F(VirtualGpu, FindsAMissingWait) {
  const Tensor x = at::ones({1000}, on_gpu);
  c10::cuda::device_synchronize();
  const auto use_on_side = [&](bool waits) {
    x.add_(1);
    at::cuda::CUDAEvent written;
    written.record();
    if (waits) written.block(side_);
    const CUDAStreamGuard guard(side_);
    x.mul_(2);
  };
  use_on_side(true);
  EXPECT_EQ(new_races(), 0);
  c10::cuda::device_synchronize();
  use_on_side(false);
  EXPECT_EQ(new_races(), 1);
  c10::cuda::device_synchronize();
}

// The ranges of these operations are lists written by hand (kernels/attention.cpp).
TEST_F(VirtualGpu, FindsAMissingWaitForEachInputOfOperationsThatOnlyCudaHas) {
  const auto in_16_bits = on_gpu.dtype(at::kBFloat16);
  const Tensor q = at::ones({1, 2, 8, 64}, in_16_bits), k = q.clone(), v = q.clone(), grad = q.clone(),
               bias = at::ones({1, 2, 8, 8}, in_16_bits), none;
  const auto packed = [](const Tensor& t) { return t[0].transpose(0, 1); };
  const Tensor starts = at::tensor({0, 8}, on_gpu.dtype(at::kInt));
  const auto flash = at::_scaled_dot_product_flash_attention(q, k, v, 0, true);
  const auto cudnn = at::_scaled_dot_product_cudnn_attention(q, k, v, bias, true);
  const auto efficient = at::_scaled_dot_product_efficient_attention(q, k, v, bias, true);
  const auto of_packed =
      at::_flash_attention_forward(packed(q), packed(k), packed(v), starts, starts, 8, 8, 0, true, false);
  const Tensor flash_out = std::get<0>(flash), flash_sums = std::get<1>(flash),
               cudnn_out = std::get<0>(cudnn), cudnn_sums = std::get<1>(cudnn),
               efficient_out = std::get<0>(efficient), efficient_sums = std::get<1>(efficient),
               packed_out = std::get<0>(of_packed), packed_sums = std::get<1>(of_packed);
  const Tensor state = std::get<6>(flash), seed = std::get<6>(cudnn);
  const Tensor x = at::ones({4, 8}, on_gpu), weight = at::ones({8}, on_gpu);
  const Tensor rstd = std::get<1>(at::_fused_rms_norm(x, {8}, weight, 1e-5));
  const Tensor a = at::ones({8, 8}, in_16_bits), b = a.clone(), sum = at::ones({8, 8}, on_gpu);
  struct Row {
    const char* name;
    std::vector<Tensor> inputs;
    std::function<void()> run;
  };
  const Row rows[] = {
      {"flash", {q, k, v}, [&] { at::_scaled_dot_product_flash_attention(q, k, v, 0, true); }},
      {"flash's backward",
       {grad, q, k, v, flash_out, flash_sums},
       [&] {
         at::_scaled_dot_product_flash_attention_backward(grad, q, k, v, flash_out, flash_sums, none, none, 8,
                                                          8, 0, true, state, state);
       }},
      {"cudnn", {q, k, v, bias}, [&] { at::_scaled_dot_product_cudnn_attention(q, k, v, bias, true); }},
      {"cudnn's backward",
       {grad, q, k, v, cudnn_out, cudnn_sums, bias},
       [&] {
         at::_scaled_dot_product_cudnn_attention_backward(grad, q, k, v, cudnn_out, cudnn_sums, seed, seed,
                                                          bias, none, none, 8, 8, 0, false);
       }},
      {"efficient",
       {q, k, v, bias},
       [&] { at::_scaled_dot_product_efficient_attention(q, k, v, bias, true); }},
      {"efficient's backward",
       {grad, q, k, v, bias, efficient_out, efficient_sums},
       [&] {
         at::_scaled_dot_product_efficient_attention_backward(
             grad, q, k, v, bias, efficient_out, efficient_sums, seed, seed, 0, {true, true, true, false});
       }},
      {"packed",
       {q, k, v, starts},
       [&] {
         at::_flash_attention_forward(packed(q), packed(k), packed(v), starts, starts, 8, 8, 0, true, false);
       }},
      {"packed's backward",
       {grad, q, k, v, packed_out, packed_sums, starts},
       [&] {
         at::_flash_attention_backward(packed(grad), packed(q), packed(k), packed(v), packed_out, packed_sums,
                                       starts, starts, 8, 8, 0, true, state, state);
       }},
      {"norm", {x, weight}, [&] { at::_fused_rms_norm(x, {8}, weight, 1e-5); }},
      {"norm's backward",
       {x, rstd, weight, sum},
       [&] {
         at::_fused_rms_norm_backward(sum.narrow(0, 0, 4), x, {8}, rstd, weight, {true, true});
       }},
      {"mm", {a, b}, [&] { at::mm(a, b, at::kFloat); }},
      {"bmm", {a, b}, [&] { at::bmm(a.unsqueeze(0), b.unsqueeze(0), at::kFloat); }},
      {"addmm",
       {sum, a, b},
       [&] {
         Tensor out = at::empty({8, 8}, on_gpu);
         at::addmm_out(out, sum, a, b, at::kFloat);
       }},
  };
  const auto races_with = [&](const Tensor& input, const std::function<void()>& run, bool waits) {
    c10::cuda::device_synchronize();
    const int before = new_races();
    input.mul_(1);
    at::cuda::CUDAEvent written;
    written.record();
    if (waits) written.block(side_);
    const CUDAStreamGuard guard(side_);
    run();
    return new_races() - before;
  };
  for (const auto& [name, inputs, run] : rows) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_EQ(races_with(inputs[i], run, true), 0) << name << ", input " << i;
      EXPECT_EQ(races_with(inputs[i], run, false), 1) << name << ", input " << i;
    }
  }
  c10::cuda::device_synchronize();
}

TEST_F(VirtualGpu, ARaceIsReportedWithTheModulesOfBothAccesses) {
  const Tensor x = at::ones({1000}, on_gpu);
  c10::cuda::device_synchronize();
  testing::internal::CaptureStderr();
  {
    RECORD_USER_SCOPE("layers.0");
    x.add_(1);
    num_races();  // it has run
  }
  {
    RECORD_USER_SCOPE("layers.1 backward");
    const CUDAStreamGuard on_side(side_);
    x.sum();
  }
  EXPECT_EQ(new_races(), 1);
  const std::string report = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(std::regex_search(
      report,
      std::regex("RACE: aten::sum in layers\\.1 backward reads 4000 bytes at 0x[0-9a-f]+ on stream [0-9]+, "
                 "and nothing orders it after aten::add_ in layers\\.0, which wrote them on stream -1\n")))
      << report;
  const std::string calls = R"( was called by\n(    \S+\+0x.*\n)*    virtual_gpu_test\+0x.*\n)";
  for (const std::string access : {"aten::sum in layers\\.1 backward", "aten::add_ in layers\\.0"})
    EXPECT_TRUE(std::regex_search(report, std::regex("  " + access + calls))) << report;
  c10::cuda::device_synchronize();
}

TEST_F(VirtualGpu, TwoReadsAreNoRace) {
  const Tensor x = at::ones({1000}, on_gpu);
  c10::cuda::device_synchronize();
  for (const auto& stream : {side_, other_}) {
    const CUDAStreamGuard guard(stream);
    const Tensor y = x + 1;
  }
  c10::cuda::device_synchronize();
  EXPECT_EQ(new_races(), 0);
}

TEST_F(VirtualGpu, FindsAMissingRecordStream) {
  const auto use_freed = [&](bool records) {
    c10::cuda::device_synchronize();
    {
      const Tensor x = at::ones({1 << 20}, on_gpu);
      at::cuda::CUDAEvent written;
      written.record();
      written.block(side_);
      const CUDAStreamGuard guard(side_);
      x.mul_(2);
      if (records) x.record_stream(side_);
    }
    at::ones({1 << 20}, on_gpu);
  };
  use_freed(true);
  EXPECT_EQ(new_races(), 0);
  use_freed(false);
  EXPECT_GE(new_races(), 1);
}

TEST_F(VirtualGpu, FindsAHostReadBeforeTheSynchronization) {
  const Tensor x = at::ones({1000}, on_gpu);
  const auto read = [&](bool waits) {
    Tensor host = at::empty({1000}, pinned);
    host.copy_(x, /*non_blocking=*/true);
    if (waits) main_.synchronize();
    at::sum(host);
    main_.synchronize();
  };
  read(true);
  EXPECT_EQ(new_races(), 0);
  read(false);
  EXPECT_GE(new_races(), 1);  // the copy may find the read, too
}

TEST_F(VirtualGpu, FindsACopyOnTheHostBeforeTheSynchronization) {
  const Tensor x = at::ones({1000}, on_gpu), copied = at::empty({1000});
  const auto copy = [&](bool waits) {
    Tensor host = at::empty({1000}, pinned);
    host.copy_(x, /*non_blocking=*/true);
    if (waits) main_.synchronize();
    copied.copy_(host);
    main_.synchronize();
  };
  copy(true);
  EXPECT_EQ(new_races(), 0);
  copy(false);
  EXPECT_GE(new_races(), 1);
}

TEST_F(VirtualGpu, FindsAMissingWaitWithinAGraph) {
  const Tensor x = at::ones({1000}, on_gpu), y = at::zeros({1000}, on_gpu);
  c10::cuda::device_synchronize();
  const auto replay = [&](bool waits) {
    const CUDAStreamGuard guard(side_);
    at::cuda::CUDAGraph graph;
    graph.capture_begin();
    at::cuda::CUDAEvent begun, written, read;
    begun.record();
    begun.block(other_);
    x.add_(1);
    written.record();
    if (waits) written.block(other_);
    {
      const CUDAStreamGuard on_other(other_);
      y.add_(x);
      read.record();
    }
    read.block(side_);
    graph.capture_end();
    graph.replay();
    graph.replay();
    c10::cuda::device_synchronize();
  };
  replay(true);
  EXPECT_EQ(new_races(), 0);
  replay(false);
  EXPECT_GE(new_races(), 1);
}

// The origin's operations before a launch come before all lanes, and those after it come after them.
TEST_F(VirtualGpu, OrdersAGraphsLanesWithTheStreamThatLaunchesIt) {
  const Tensor x = at::ones({1000}, on_gpu), y = at::zeros({1000}, on_gpu);
  c10::cuda::device_synchronize();
  const CUDAStreamGuard guard(side_);
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  at::cuda::CUDAEvent begun, done;
  begun.record();
  begun.block(other_);
  {
    const CUDAStreamGuard on_other(other_);
    y.add_(x);
    done.record();
  }
  done.block(side_);
  graph.capture_end();
  for (int step = 0; step < 3; ++step) {
    x.add_(1);
    graph.replay();
    y.mul_(2);
  }
  EXPECT_EQ(new_races(), 0);
  const CUDAStreamGuard on_other(other_);  // the captured stream itself has seen nothing of the launches
  y.add_(1);
  EXPECT_GE(new_races(), 1);
  c10::cuda::device_synchronize();
}

TEST_F(VirtualGpu, AWaitForTheDeviceCoversDestroyedStreams) {
  const Tensor x = at::ones({1000}, on_gpu);
  Tensor host = at::zeros({1000}, pinned);
  const auto use_on_another = [&](bool waits) {
    c10::cuda::device_synchronize();
    cudaStream_t stream = nullptr;
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(cudaMemsetAsync(x.mutable_data_ptr(), 0, 4000, stream), cudaSuccess);
    EXPECT_EQ(
        cudaMemcpyAsync(host.mutable_data_ptr(), x.const_data_ptr(), 4000, cudaMemcpyDeviceToHost, stream),
        cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    num_races();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // it has run, and the stream is deleted
    if (waits) c10::cuda::device_synchronize();
    x.add_(1);
  };
  host.fill_(7);
  use_on_another(true);
  EXPECT_EQ(new_races(), 0);
  EXPECT_EQ(host.const_data_ptr<float>()[999], 0) << "bytes that its copy brought";
  use_on_another(false);
  EXPECT_GE(new_races(), 1);
  c10::cuda::device_synchronize();
}

// New streams may get the addresses of destroyed ones.
TEST_F(VirtualGpu, StreamsThatAreDestroyedDuringACaptureStayLanesOfTheirOwn) {
  constexpr int num_streams = 30;
  const Tensor x = at::ones({1000}, on_gpu);
  c10::cuda::device_synchronize();
  cudaEvent_t begun = nullptr, done = nullptr;
  for (cudaEvent_t* event : {&begun, &done}) ASSERT_EQ(cudaEventCreate(event), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(side_, cudaStreamCaptureModeRelaxed), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(begun, side_), cudaSuccess);
  for (int i = 0; i < num_streams; ++i) {
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(stream, begun, 0), cudaSuccess);
    ASSERT_EQ(cudaMemsetAsync(x.mutable_data_ptr(), 0, 4000, stream), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(done, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(side_, done, 0), cudaSuccess);
    ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    at::ones({1}, on_gpu);  // the scheduler looks for streams to delete
    num_races();
  }
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(side_, &graph), cudaSuccess);
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(executable, side_), cudaSuccess);
  EXPECT_EQ(new_races(), num_streams - 1);
  side_.synchronize();
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  for (cudaEvent_t event : {begun, done}) cudaEventDestroy(event);
}

TEST_F(VirtualGpu, FindsThatAPinnedBufferIsReusedTooSoon) {
  const Tensor x = at::empty({1000}, on_gpu);
  Tensor host = at::ones({1000}, pinned);
  const auto reuse = [&](bool waits) {
    x.copy_(host, /*non_blocking=*/true);
    if (waits) main_.synchronize();
    host.fill_(2);
    main_.synchronize();
  };
  reuse(true);
  EXPECT_EQ(new_races(), 0);
  reuse(false);
  EXPECT_EQ(new_races(), 1);
}

TEST_F(VirtualGpu, AnotherThreadsWaitDoesNotHideAMissingOne) {
  const Tensor x = at::ones({1000}, on_gpu);
  c10::cuda::device_synchronize();
  const auto use_on_two_streams = [&](bool hands_over) {
    {
      const CUDAStreamGuard guard(side_);
      x.mul_(2);
    }
    at::cuda::CUDAEvent done;
    done.record(side_);
    std::atomic<bool> has_waited = false, ends = false;
    std::thread other([&] {
      done.synchronize();
      has_waited = true;
      while (!hands_over && !ends) std::this_thread::yield();
    });
    if (hands_over) other.join();
    while (!has_waited) std::this_thread::yield();
    x.add_(1);
    ends = true;
    if (!hands_over) other.join();
    c10::cuda::device_synchronize();
  };
  use_on_two_streams(true);
  EXPECT_EQ(new_races(), 0);
  use_on_two_streams(false);
  EXPECT_EQ(new_races(), 1);
}

ncclComm_t communicator_of_one_rank() {
  ncclUniqueId id;
  ncclComm_t communicator = nullptr;
  EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  EXPECT_EQ(ncclCommInitRank(&communicator, 1, id, 0), ncclSuccess);
  return communicator;
}

TEST_F(VirtualGpu, FindsACollectiveOnTheWrongStream) {
  ncclComm_t const communicator = communicator_of_one_rank();
  const Tensor x = at::ones({1000}, on_gpu);
  c10::cuda::device_synchronize();
  const auto add_and_reduce_on = [&](const at::cuda::CUDAStream& stream) {
    x.add_(1);
    float* const data = x.mutable_data_ptr<float>();
    EXPECT_EQ(ncclAllReduce(data, data, 1000, ncclFloat, ncclSum, communicator, stream), ncclSuccess);
    c10::cuda::device_synchronize();
  };
  add_and_reduce_on(main_);
  EXPECT_EQ(new_races(), 0);
  add_and_reduce_on(side_);
  EXPECT_GE(new_races(), 1);
  EXPECT_EQ(ncclCommDestroy(communicator), ncclSuccess);
}

TEST_F(VirtualGpu, FindsAMissingWaitForACollectiveOfAGraph) {
  ncclComm_t const communicator = communicator_of_one_rank();
  const Tensor x = at::ones({1000}, on_gpu);
  float* const data = x.mutable_data_ptr<float>();
  c10::cuda::device_synchronize();
  {
    const CUDAStreamGuard guard(side_);
    at::cuda::CUDAGraph graph;
    graph.capture_begin();
    EXPECT_EQ(ncclAllReduce(data, data, 1000, ncclFloat, ncclSum, communicator, side_), ncclSuccess);
    graph.capture_end();
    const auto replay_and_read = [&](bool waits) {
      c10::cuda::device_synchronize();
      graph.replay();
      at::cuda::CUDAEvent replayed;
      replayed.record();
      if (waits) replayed.block(other_);
      const CUDAStreamGuard on_other(other_);
      x.sum();
      return new_races();
    };
    EXPECT_EQ(replay_and_read(true), 0);
    EXPECT_EQ(replay_and_read(false), 1);
    c10::cuda::device_synchronize();
  }
  EXPECT_EQ(ncclCommDestroy(communicator), ncclSuccess);
}

// The rank sends to itself.
TEST_F(VirtualGpu, FindsMissingWaitsOfASendAndForAReceive) {
  ncclComm_t const communicator = communicator_of_one_rank();
  const Tensor sent = at::ones({1000}, on_gpu), received = at::zeros({1000}, on_gpu);
  const auto pass_message = [&](bool send_waits, bool reader_waits) {
    c10::cuda::device_synchronize();
    const int before = new_races();
    at::cuda::CUDAEvent written, arrived;
    sent.add_(1);
    written.record();
    if (send_waits) written.block(side_);
    EXPECT_EQ(ncclGroupStart(), ncclSuccess);
    EXPECT_EQ(ncclSend(sent.const_data_ptr(), 1000, ncclFloat, 0, communicator, side_), ncclSuccess);
    EXPECT_EQ(ncclRecv(received.mutable_data_ptr(), 1000, ncclFloat, 0, communicator, side_), ncclSuccess);
    EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
    arrived.record(side_);
    if (reader_waits) arrived.block(main_);
    received.sum();
    return new_races() - before;
  };
  EXPECT_EQ(pass_message(true, true), 0);
  EXPECT_EQ(pass_message(false, true), 1);
  EXPECT_EQ(pass_message(true, false), 1);
  c10::cuda::device_synchronize();
  EXPECT_TRUE(received.equal(sent));
  EXPECT_EQ(ncclCommDestroy(communicator), ncclSuccess);
}

}  // namespace
}  // namespace virtual_gpu_test
