// NCCL's calls in CUDA graphs. Runs under scripts/virtual_gpus.sh.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

#include <c10/core/AllocatorConfig.h>

#include "nccl_ranks.h"

namespace virtual_gpu_test {
namespace {

/// A recording of one call on a rank's stream.
class Recording {
 public:
  Recording(const Rank& rank, const std::function<ncclResult_t()>& call) : stream_(rank.stream) {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), cudaSuccess);
    EXPECT_EQ(call(), ncclSuccess);
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&executable_, graph, 0), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
  ~Recording() { end(); }
  void launch() const { EXPECT_EQ(cudaGraphLaunch(executable_, stream_), cudaSuccess); }
  void end() {
    if (executable_) EXPECT_EQ(cudaGraphExecDestroy(std::exchange(executable_, nullptr)), cudaSuccess);
  }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t executable_ = nullptr;
};

TEST(Nccl, ARecordedCollectiveRunsAtEachLaunch) {
  const auto ranks = make_ranks(2);
  start_counting();
  std::vector<std::unique_ptr<Recording>> recordings;
  for (const auto& rank : ranks)
    recordings.push_back(
        std::make_unique<Recording>(*rank, [&] { return rank->sum(rank->communicator, long_message); }));
  for (const auto& rank : ranks) EXPECT_TRUE(rank->is_done());
  EXPECT_EQ(count("launches", "ncclAllReduce"), 0u);
  for (const float sum : {0 + 1, 1 + 1}) {
    recordings[0]->launch();
    EXPECT_TRUE(ranks[0]->stays_busy()) << "until the other rank's launch";
    recordings[1]->launch();
    for (const auto& rank : ranks)
      EXPECT_EQ(rank->numbers(long_message), std::vector<float>(long_message, sum));
  }
  EXPECT_EQ(count("launches", "ncclAllReduce"), 2u * 2);
  EXPECT_EQ(count("bytes_written", "ncclAllReduce"), 2u * 2 * long_message * sizeof(float));
}

TEST(Nccl, ACommunicatorEndsAfterItsRecordings) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const auto end : {ncclCommDestroy, ncclCommAbort}) {
    const auto ranks = make_ranks(1);
    Recording recording(*ranks[0], [&] { return ranks[0]->sum(ranks[0]->communicator); });
    Call call([&] { return end(std::exchange(ranks[0]->communicator, nullptr)); });
    EXPECT_TRUE(call.waits());
    recording.end();
    EXPECT_EQ(call.result(), ncclSuccess);
  }
  setenv("VIRTUAL_GPU_RECORDING_LIMIT_MS", "100", 1);
  EXPECT_DEATH(
      {
        const auto ranks = make_ranks(1);
        const Recording recording(*ranks[0], [&] { return ranks[0]->sum(ranks[0]->communicator); });
        ncclCommDestroy(ranks[0]->communicator);
      },
      "ncclCommDestroy while a recording has calls of the communicator");
  unsetenv("VIRTUAL_GPU_RECORDING_LIMIT_MS");
}

// LibTorch's expandable segments consist of pieces of 20 MiB for large tensors.
[[noreturn]] void record_a_sum_of(size_t floats) {
  c10::CachingAllocator::setAllocatorSettings("expandable_segments:True");
  const Tensor x = at::ones({static_cast<int64_t>(floats)}, on_gpu);
  const auto ranks = make_ranks(1);
  c10::cuda::device_synchronize();
  const Recording recording(*ranks[0], [&] {
    return ncclAllReduce(x.const_data_ptr(), x.mutable_data_ptr(), floats, ncclFloat, ncclSum,
                         ranks[0]->communicator, ranks[0]->stream);
  });
  fprintf(stderr, "it is recorded;\n");
  _exit(0);
}

TEST(Nccl, ARecordedCallWhoseBufferHasSeveralPiecesEndsTheProgram) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  constexpr size_t one_piece = size_t{4} << 20, several = size_t{12} << 20;
  EXPECT_EXIT(record_a_sum_of(one_piece), testing::ExitedWithCode(0), "it is recorded;");
  EXPECT_DEATH(record_a_sum_of(several), "a recorded ncclAllReduce whose buffer has several pieces");
  setenv("NCCL_GRAPH_REGISTER", "0", 1);
  EXPECT_EXIT(record_a_sum_of(several), testing::ExitedWithCode(0), "it is recorded;");
  unsetenv("NCCL_GRAPH_REGISTER");
}

}  // namespace
}  // namespace virtual_gpu_test
