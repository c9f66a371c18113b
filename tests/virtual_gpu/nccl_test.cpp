// NCCL: who waits for whom, what a communicator says meanwhile, what an abort ends, and the numbers of functions that no other test here
// calls. Ranks are threads of this process. Runs under scripts/virtual_gpus.sh, also with VIRTUAL_GPU_NCCL=strict.
// https://docs.nvidia.com/deeplearning/nccl/user-guide, "Creating a Communicator" and "Point-to-point communication".

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <numeric>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "nccl_ranks.h"

namespace virtual_gpu_test {
namespace {

TEST(Nccl, ACollectiveThatAnotherRankDoesNotJoinNeverEnds) {
  const auto ranks = make_ranks(2);
  EXPECT_EQ(ranks[0]->sum(ranks[0]->communicator), ncclSuccess);
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaEventCreate(&event), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event, ranks[0]->stream), cudaSuccess);
  EXPECT_TRUE(ranks[0]->stays_busy());
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  EXPECT_EQ(state_of(ranks[0]->communicator), ncclSuccess) << "nobody has failed";
  EXPECT_EQ(ranks[1]->sum(ranks[1]->communicator), ncclSuccess);
  EXPECT_TRUE(ranks[0]->ends());
  EXPECT_EQ(ranks[0]->first(), 1);
  cudaEventDestroy(event);
}

TEST(Nccl, AnAbortReleasesACollectiveOfItsOwnRankOnly) {
  const auto ranks = make_ranks(3);
  for (const int rank : {0, 1})
    EXPECT_EQ(ranks[rank]->sum(ranks[rank]->communicator, long_message), ncclSuccess);
  EXPECT_TRUE(ranks[0]->stays_busy());
  ranks[0]->abort();
  EXPECT_TRUE(ranks[0]->ends());
  EXPECT_TRUE(ranks[1]->stays_busy()) << "NCCL tells other ranks nothing";
  EXPECT_EQ(state_of(ranks[1]->communicator), ncclSuccess);
  ranks[1]->abort();
  EXPECT_TRUE(ranks[1]->ends());
}

// The later ones of several operations in the queue don't begin.
TEST(Nccl, AnAbortReleasesAllThatIsQueued) {
  const auto ranks = make_ranks(2);
  Rank& rank = *ranks[0];
  ncclComm_t const communicator = rank.communicator;
  for (int i = 0; i < 3; ++i) EXPECT_EQ(rank.sum(communicator), ncclSuccess);
  Rank other_stream;
  EXPECT_EQ(other_stream.sum(communicator), ncclSuccess);
  EXPECT_TRUE(rank.stays_busy());
  rank.abort();
  EXPECT_TRUE(rank.ends());
  EXPECT_TRUE(other_stream.ends());
  EXPECT_EQ(other_stream.first(), 0);
}

TEST(Nccl, AnAbortedParentSaysSoAndTakesNoMoreCalls) {
  auto ranks = make_ranks(3);
  EXPECT_EQ(ranks[0]->sum(ranks[0]->communicator), ncclSuccess);
  EXPECT_TRUE(ranks[0]->stays_busy());
  int excluded = 1;
  ncclComm_t rest[3] = {};
  on_all(ranks, [&](Rank& rank) {
    if (rank.number == excluded) return;
    EXPECT_EQ(ncclCommShrink(rank.communicator, &excluded, 1, &rest[rank.number], nullptr, NCCL_SHRINK_ABORT),
              ncclSuccess);
  });
  EXPECT_TRUE(ranks[0]->ends());
  EXPECT_EQ(state_of(ranks[0]->communicator), ncclRemoteError);
  EXPECT_EQ(ranks[0]->sum(ranks[0]->communicator), ncclRemoteError);
  EXPECT_EQ(ranks[0]->send(2), ncclRemoteError);
  ncclComm_t part = nullptr;
  EXPECT_EQ(ncclCommSplit(ranks[0]->communicator, 0, 0, &part, nullptr), ncclRemoteError);
  for (const int rank : {0, 2}) EXPECT_EQ(ncclCommAbort(rest[rank]), ncclSuccess);
}

TEST(Nccl, SplitsByColorAndKey) {
  auto ranks = make_ranks(5);
  struct Given {
    int color, key;
  };
  // The last three have the same color; of equal keys, the parent's order holds.
  const Given given[] = {{NCCL_SPLIT_NOCOLOR, 0}, {7, 0}, {3, 1}, {3, 1}, {3, 0}};
  ncclComm_t parts[5];
  on_all(ranks, [&](Rank& rank) {
    const auto [color, key] = given[rank.number];
    EXPECT_EQ(ncclCommSplit(rank.communicator, color, key, &parts[rank.number], nullptr), ncclSuccess);
  });
  EXPECT_EQ(parts[0], nullptr);
  const int expected_ranks[] = {0, 0, 1, 2, 0}, expected_sizes[] = {0, 1, 3, 3, 3};
  for (int i = 1; i < 5; ++i) {
    int rank = -1, size = -1;
    EXPECT_EQ(ncclCommUserRank(parts[i], &rank), ncclSuccess);
    EXPECT_EQ(ncclCommCount(parts[i], &size), ncclSuccess);
    EXPECT_EQ(rank, expected_ranks[i]) << i;
    EXPECT_EQ(size, expected_sizes[i]) << i;
  }
  on_all(ranks, [&](Rank& rank) {
    if (ncclComm_t part = parts[rank.number]) EXPECT_EQ(rank.sum(part), ncclSuccess);
  });
  for (int i = 1; i < 5; ++i) EXPECT_EQ(ranks[i]->first(), i == 1 ? 1 : 2 + 3 + 4);
  for (const auto& rank : ranks) EXPECT_EQ(rank->sum(rank->communicator), ncclSuccess);
  for (const auto& rank : ranks) EXPECT_EQ(rank->first(), 0 + 1 + 9 + 9 + 9) << "the parent works on";
  for (int i = 1; i < 5; ++i) EXPECT_EQ(ncclCommDestroy(parts[i]), ncclSuccess);
  EXPECT_EQ(ncclCommSplit(ranks[0]->communicator, -5, 0, &parts[0], nullptr), ncclInvalidArgument);
}

TEST_F(VirtualGpu, CommunicatorsShrink) {
  ncclComm_t all[3], rest[2] = {};
  ASSERT_EQ(ncclCommInitAll(all, 3, nullptr), ncclSuccess);
  int excluded = 1;
  std::thread first([&] { ncclCommShrink(all[0], &excluded, 1, &rest[0], nullptr, NCCL_SHRINK_ABORT); });
  ASSERT_EQ(ncclCommShrink(all[2], &excluded, 1, &rest[1], nullptr, NCCL_SHRINK_ABORT), ncclSuccess);
  first.join();
  const Tensor x = at::tensor({1.f, 2.f}, on_gpu);
  c10::cuda::device_synchronize();
  for (const int i : {0, 1}) {
    int rank = -1;
    EXPECT_EQ(ncclCommUserRank(rest[i], &rank), ncclSuccess);
    EXPECT_EQ(rank, i);
    float* const data = x.mutable_data_ptr<float>() + i;
    EXPECT_EQ(ncclAllReduce(data, data, 1, ncclFloat, ncclSum, rest[i], i == 0 ? side_ : other_),
              ncclSuccess);
  }
  c10::cuda::device_synchronize();
  EXPECT_TRUE(x.cpu().equal(at::tensor({3.f, 3.f})));
  EXPECT_EQ(ncclAllReduce(nullptr, nullptr, 0, ncclFloat, ncclSum, all[0], nullptr), ncclRemoteError);
  for (ncclComm_t communicator : {all[0], all[1], all[2], rest[0], rest[1]}) ncclCommDestroy(communicator);
}

TEST(Nccl, ASplitWaitsForAllRanksOfTheParent) {
  auto ranks = make_ranks(2);
  ncclComm_t parts[2];
  const auto split = [&](int rank, int color) {
    return [&, rank, color] {
      return ncclCommSplit(ranks[rank]->communicator, color, 0, &parts[rank], nullptr);
    };
  };
  Call first(split(0, 4));
  EXPECT_TRUE(first.waits());
  EXPECT_EQ(split(1, NCCL_SPLIT_NOCOLOR)(), ncclSuccess);
  EXPECT_EQ(first.result(), ncclSuccess);
  EXPECT_EQ(parts[1], nullptr);
  EXPECT_EQ(ncclCommDestroy(parts[0]), ncclSuccess);
}

// Hosts split over the network, and devices reduce with each other.
TEST(Nccl, ASplitLeavesOperationsInProgressAlone) {
  auto ranks = make_ranks(2);
  EXPECT_EQ(ranks[0]->sum(ranks[0]->communicator, long_message), ncclSuccess);
  EXPECT_TRUE(ranks[0]->stays_busy());
  ncclComm_t parts[2];
  std::vector<std::unique_ptr<Call>> calls;
  for (const int rank : {0, 1})
    calls.push_back(std::make_unique<Call>(
        [&, rank] { return ncclCommSplit(ranks[rank]->communicator, 0, rank, &parts[rank], nullptr); }));
  EXPECT_TRUE(holds_soon([&] { return calls[0]->has_returned() && calls[1]->has_returned(); }));
  EXPECT_FALSE(ranks[0]->is_done());
  EXPECT_EQ(ranks[1]->sum(ranks[1]->communicator, long_message), ncclSuccess);
  for (const auto& rank : ranks)
    EXPECT_EQ(rank->numbers(long_message), std::vector<float>(long_message, 0 + 1));
  for (ncclComm_t part : parts) EXPECT_EQ(ncclCommDestroy(part), ncclSuccess);
}

TEST(Nccl, ACommunicatorThatDoesNotBlockIsInProgressUntilAllRanksCome) {
  ncclUniqueId id;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  ncclConfig_t config = non_blocking();
  Rank first(0), second(1);
  ASSERT_EQ(ncclCommInitRankConfig(&first.communicator, 2, id, 0, &config), ncclInProgress);
  ASSERT_TRUE(first.communicator);
  std::this_thread::sleep_for(a_while);
  EXPECT_EQ(state_of(first.communicator), ncclInProgress);
  EXPECT_EQ(first.sum(first.communicator), ncclInvalidArgument) << "before it is ready";
  EXPECT_NE(std::string_view(ncclGetLastError(first.communicator)), "");
  EXPECT_EQ(first.send(1), ncclInvalidArgument);
  EXPECT_TRUE(first.is_done()) << "a refused call queues nothing";
  ASSERT_EQ(ncclCommInitRankConfig(&second.communicator, 2, id, 1, &config), ncclInProgress);
  for (Rank* rank : {&first, &second}) EXPECT_TRUE(becomes_ready(rank->communicator));
  ncclGroupStart();
  for (Rank* rank : {&first, &second}) EXPECT_EQ(rank->sum(rank->communicator), ncclSuccess);
  ncclGroupEnd();
  for (Rank* rank : {&first, &second}) EXPECT_TRUE(becomes_ready(rank->communicator));
  for (Rank* rank : {&first, &second}) EXPECT_EQ(rank->first(), 1);
}

TEST(Nccl, AnAbortEndsTheMakingOfACommunicator) {
  ncclUniqueId id;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  ncclConfig_t config = non_blocking();
  Rank alone(0);
  ASSERT_EQ(ncclCommInitRankConfig(&alone.communicator, 2, id, 0, &config), ncclInProgress);
  alone.abort();
}

// The parent waits in the call, and has made the new communicator when it's ready.
TEST(Nccl, ASplitThatDoesNotBlockIsTheParentsProgress) {
  auto ranks = make_ranks(2, non_blocking());
  ncclComm_t parts[2];
  EXPECT_EQ(ncclCommSplit(ranks[0]->communicator, 0, 1, &parts[0], nullptr), ncclInProgress);
  std::this_thread::sleep_for(a_while);
  EXPECT_EQ(state_of(ranks[0]->communicator), ncclInProgress);
  EXPECT_EQ(parts[0], nullptr);
  EXPECT_EQ(ranks[0]->sum(ranks[0]->communicator), ncclInvalidArgument);
  EXPECT_EQ(ncclCommSplit(ranks[1]->communicator, 0, 0, &parts[1], nullptr), ncclInProgress);
  for (const auto& rank : ranks) EXPECT_TRUE(becomes_ready(rank->communicator));
  for (const int i : {0, 1}) {
    ASSERT_TRUE(parts[i]);
    EXPECT_EQ(state_of(parts[i]), ncclSuccess);
  }
  on_all(ranks, [&](Rank& rank) {
    rank.sum(parts[rank.number]);
    EXPECT_TRUE(becomes_ready(parts[rank.number]));
  });
  for (const auto& rank : ranks) EXPECT_EQ(rank->first(), 1);
  // Without a configuration of its own, the new one doesn't block either.
  ncclComm_t part_of_part = nullptr;
  EXPECT_EQ(ncclCommSplit(parts[0], NCCL_SPLIT_NOCOLOR, 0, &part_of_part, nullptr), ncclInProgress);
  for (ncclComm_t part : parts) EXPECT_EQ(ncclCommAbort(part), ncclSuccess);
}

TEST(Nccl, FinalizingWaitsForWhatIsQueued) {
  for (const bool blocks : {true, false}) {
    const auto ranks = make_ranks(2, blocks ? ncclConfig_t NCCL_CONFIG_INITIALIZER : non_blocking());
    EXPECT_EQ(ranks[0]->sum(ranks[0]->communicator), ncclSuccess);
    Call finalize([&] { return ncclCommFinalize(ranks[0]->communicator); });
    EXPECT_EQ(finalize.waits(), blocks);
    EXPECT_EQ(state_of(ranks[0]->communicator), blocks ? ncclSuccess : ncclInProgress);
    EXPECT_EQ(ranks[1]->sum(ranks[1]->communicator), ncclSuccess);
    EXPECT_EQ(finalize.result(), blocks ? ncclSuccess : ncclInProgress);
    EXPECT_TRUE(becomes_ready(ranks[0]->communicator));
    EXPECT_TRUE(ranks[0]->is_done());
  }
}

// In a call that groups them, sends and receives of both ranks meet; one by one, both ranks' sends wait for receives that come after them.
TEST(Nccl, SendsAndReceivesOutsideAGroupRunOneAfterAnother) {
  for (const bool are_grouped : {true, false}) {
    for (const bool have_streams_of_their_own : {false, true}) {
      SCOPED_TRACE(std::string(are_grouped ? "grouped" : "one by one") +
                   (have_streams_of_their_own ? ", each on a stream of its own" : ""));
      auto ranks = make_ranks(2);
      std::vector<std::unique_ptr<Rank>> receivers;
      for (int i = 0; i < 2; ++i) receivers.push_back(std::make_unique<Rank>());
      const auto exchange = [&](Rank& rank, size_t count) {
        Rank& receiver = *receivers[rank.number];
        const int peer = 1 - rank.number;
        if (are_grouped) ncclGroupStart();
        EXPECT_EQ(rank.send(peer, count), ncclSuccess);
        EXPECT_EQ(ncclRecv(receiver.data, count, ncclFloat, peer, rank.communicator,
                           have_streams_of_their_own ? receiver.stream : rank.stream),
                  ncclSuccess);
        if (are_grouped) EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
      };
      // Connects in both directions, so that no call waits for its peer later.
      on_all(ranks, [](Rank& rank) {
        EXPECT_EQ(ncclGroupStart(), ncclSuccess);
        EXPECT_EQ(rank.send(1 - rank.number, 0), ncclSuccess);
        EXPECT_EQ(rank.receive(1 - rank.number, 0), ncclSuccess);
        EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
      });
      on_all(ranks, [&](Rank& rank) { exchange(rank, 1); });  // short ones are in transit
      for (const auto& rank : ranks) EXPECT_TRUE(rank->ends());
      for (const auto& receiver : receivers) EXPECT_TRUE(receiver->ends());
      on_all(ranks, [&](Rank& rank) { exchange(rank, long_message); });
      if (are_grouped) {
        for (const auto& rank : ranks) EXPECT_TRUE(rank->ends());
        for (const auto& receiver : receivers) EXPECT_TRUE(receiver->ends());
        for (const int i : {0, 1})
          EXPECT_EQ(receivers[i]->numbers(long_message), std::vector<float>(long_message, 1 - i));
      } else {
        for (const auto& rank : ranks) EXPECT_TRUE(rank->stays_busy());
        if (have_streams_of_their_own)
          for (const auto& receiver : receivers) EXPECT_FALSE(receiver->is_done());
        for (const auto& rank : ranks) rank->abort();
        for (const auto& rank : ranks) EXPECT_TRUE(rank->ends());
        for (const auto& receiver : receivers) EXPECT_TRUE(receiver->ends());
      }
    }
  }
}

// Whether a short message that nobody receives yet lets the sender's stream continue.
[[noreturn]] void print_a_short_send() {
  auto ranks = make_ranks(2);
  on_all(ranks, [](Rank& rank) {  // connects them
    ncclGroupStart();
    rank.send(1 - rank.number, 0);
    rank.receive(1 - rank.number, 0);
    ncclGroupEnd();
  });
  ranks[0]->set(7);
  ranks[0]->send(1);
  const bool lasts = ranks[0]->stays_busy();
  ranks[1]->receive(0);
  const bool ends = ranks[0]->ends();
  fprintf(stderr, "the send %s, and %s: %g;\n", lasts ? "lasts" : "is buffered", ends ? "ends" : "hangs",
          ranks[1]->first());
  _exit(0);
}

TEST(Nccl, ASendLastsUntilItIsReceivedWithoutBuffers) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(print_a_short_send(), testing::ExitedWithCode(0), "the send is buffered, and ends: 7;");
  setenv("VIRTUAL_GPU_NCCL_BUFFERS", "0", 1);
  EXPECT_EXIT(print_a_short_send(), testing::ExitedWithCode(0), "the send lasts, and ends: 7;");
  unsetenv("VIRTUAL_GPU_NCCL_BUFFERS");
}

// ---- numbers

TEST(Nccl, GivesTheNumbersOfFunctionsThatNoOtherTestCalls) {
  auto ranks = make_ranks(3);
  ncclUniqueId id;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  const auto reduce_to_1 = [](const Rank& r, ncclComm_t with, ncclRedOp_t op) {
    return ncclReduce(r.data, r.data + 3, 2, ncclFloat, op, 1, with, r.stream);
  };
  using Rows = std::vector<std::vector<float>>;
  const Rows sums_on_1 = {{0, 1, 2, 3, 4, 5}, {10, 11, 12, 30, 33, 15}, {20, 21, 22, 23, 24, 25}};
  const struct {
    const char* function;
    std::function<ncclResult_t(const Rank&)> call;
    Rows expected;  ///< each rank's numbers
  } cases[] = {
      {"ncclReduce", [&](const Rank& r) { return reduce_to_1(r, r.communicator, ncclSum); }, sums_on_1},
      {"ncclBcast",
       [](const Rank& r) { return ncclBcast(r.data + 1, 2, ncclFloat, 2, r.communicator, r.stream); },
       {{0, 21, 22, 3, 4, 5}, {10, 21, 22, 13, 14, 15}, {20, 21, 22, 23, 24, 25}}},
      {"ncclAlltoAll",
       [](const Rank& r) { return ncclAlltoAll(r.data, r.data + 3, 1, ncclFloat, r.communicator, r.stream); },
       {{0, 1, 2, 0, 10, 20}, {10, 11, 12, 1, 11, 21}, {20, 21, 22, 2, 12, 22}}},
      {"ncclRedOpDestroy",  // after the last call of the operator, which may not have run yet
       [&](const Rank& r) {
         ncclRedOp_t half = ncclSum;
         float factor = 0.5f;
         EXPECT_EQ(
             ncclRedOpCreatePreMulSum(&half, &factor, ncclFloat, ncclScalarHostImmediate, r.communicator),
             ncclSuccess);
         EXPECT_EQ(reduce_to_1(r, r.communicator, half), ncclSuccess);
         return ncclRedOpDestroy(half, r.communicator);
       },
       {{0, 1, 2, 3, 4, 5}, {10, 11, 12, 15, 16.5f, 15}, {20, 21, 22, 23, 24, 25}}},
      {"ncclCommInitRankScalable",
       [&](const Rank& r) {
         ncclComm_t made = nullptr;
         EXPECT_EQ(ncclCommInitRankScalable(&made, 3, r.number, 1, &id, nullptr), ncclSuccess);
         EXPECT_EQ(reduce_to_1(r, made, ncclSum), ncclSuccess);
         EXPECT_TRUE(r.ends());
         return ncclCommDestroy(made);
       },
       sums_on_1}};
  for (const auto& [function, call, expected] : cases) {
    on_all(ranks, [&call = call](Rank& r) {
      std::vector<float> values(6);
      std::iota(values.begin(), values.end(), 10.f * static_cast<float>(r.number));
      EXPECT_EQ(cudaMemcpyAsync(r.data, values.data(), 6 * sizeof(float), cudaMemcpyHostToDevice, r.stream),
                cudaSuccess);
      EXPECT_EQ(cudaStreamSynchronize(r.stream), cudaSuccess);
      EXPECT_EQ(call(r), ncclSuccess);
    });
    for (const auto& r : ranks)
      EXPECT_EQ(r->numbers(6), expected[static_cast<size_t>(r->number)]) << function;
  }
}

// ---- registered memory

/// Numbers in memory that NCCL allocated, registered or not with a rank's communicator.
struct Registered {
  Registered(Rank& rank, bool is_registered) : communicator(rank.communicator) {
    EXPECT_EQ(ncclMemAlloc(reinterpret_cast<void**>(&data), kBytes), ncclSuccess);
    if (is_registered) EXPECT_EQ(ncclCommRegister(communicator, data, kBytes, &handle), ncclSuccess);
  }
  ~Registered() {
    if (handle) EXPECT_EQ(ncclCommDeregister(communicator, handle), ncclSuccess);
    EXPECT_EQ(ncclMemFree(data), ncclSuccess);
  }

  static constexpr size_t kBytes = 4096;
  ncclComm_t communicator;
  void* handle = nullptr;
  float* data = nullptr;
};

uint64_t num_registered_calls(const char* name, int count) {
  return function<uint64_t(const char*, int)>("virtual_gpu_registered_calls")(name, count);
}

TEST(NcclRegistration, AllRanksMayPassRegisteredMemoryAtTheSameOffsets) {
  auto ranks = make_ranks(2);
  std::vector<std::unique_ptr<Registered>> memory;
  for (const auto& rank : ranks) memory.push_back(std::make_unique<Registered>(*rank, true));
  const uint64_t before = num_registered_calls("ncclAllGather", 2);
  on_all(ranks, [&](Rank& rank) {
    float* all = memory[static_cast<size_t>(rank.number)]->data + 4;
    EXPECT_EQ(ncclAllGather(all + 8 * rank.number, all, 8, ncclFloat, rank.communicator, rank.stream),
              ncclSuccess);
    EXPECT_TRUE(rank.ends());
  });
  EXPECT_EQ(num_registered_calls("ncclAllGather", 2) - before, 2u);
}

TEST(NcclRegistration, EndsTheProgramWhereNcclWouldBeUndefined) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto sum = [](bool second_is_registered, size_t second_offset) {
    auto ranks = make_ranks(2);
    std::vector<std::unique_ptr<Registered>> memory;
    memory.push_back(std::make_unique<Registered>(*ranks[0], true));
    memory.push_back(std::make_unique<Registered>(*ranks[1], second_is_registered));
    on_all(ranks, [&](Rank& rank) {
      float* data = memory[static_cast<size_t>(rank.number)]->data + (rank.number == 1 ? second_offset : 0);
      ncclAllReduce(data, data, 8, ncclFloat, ncclSum, rank.communicator, rank.stream);
      rank.ends();
    });
  };
  sum(true, 0);
  EXPECT_DEATH(sum(false, 0), "NCCL asks that all ranks register");
  EXPECT_DEATH(sum(true, 2), "at other offsets");
  EXPECT_DEATH(
      {
        auto ranks = make_ranks(2);
        const Registered memory(*ranks[0], true);
        ncclMemFree(memory.data);
      },
      "registered with a communicator");
}

// ---- calls that don't match

using CallOf = std::function<void(Rank&)>;
void call_on_two(const CallOf& first, const CallOf& second) {
  auto ranks = make_ranks(2);
  on_all(ranks, [&](Rank& rank) {
    (rank.number == 0 ? first : second)(rank);
    EXPECT_TRUE(rank.ends());
  });
}

TEST(Nccl, RanksThatMakeDifferentCallsEndTheProgram) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto sum = [](size_t count, ncclDataType_t type = ncclFloat, ncclRedOp_t op = ncclSum) {
    return [=](Rank& r) { ncclAllReduce(r.data, r.data, count, type, op, r.communicator, r.stream); };
  };
  const auto broadcast = [](int root) {
    return [=](Rank& r) { ncclBroadcast(r.data, r.data, 4, ncclFloat, root, r.communicator, r.stream); };
  };
  const auto gather = [](Rank& r) { ncclAllGather(r.data, r.data, 1, ncclFloat, r.communicator, r.stream); };
  const auto both = [](const CallOf& first, const CallOf& second) {
    return [=](Rank& r) {
      ncclGroupStart();
      first(r);
      second(r);
      ncclGroupEnd();
    };
  };
  const auto scaled = [](float factor, int num_before) {
    return [=](Rank& r) mutable {
      ncclRedOp_t op = ncclSum;
      for (int i = 0; i <= num_before; ++i)
        ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat, ncclScalarHostImmediate, r.communicator);
      ncclReduceScatter(r.data, r.data + 8, 1, ncclFloat, op, r.communicator, r.stream);
    };
  };
  call_on_two(both(sum(4), gather), both(sum(4), gather));
  call_on_two(scaled(2, 0), scaled(3, 1));
  const char* const other_count =
      "rank [01] begins with ncclAllReduce of [23] elements of type 7, .* same calls";
  EXPECT_DEATH(call_on_two(sum(2), sum(3)), other_count);
  EXPECT_DEATH(call_on_two(sum(4), sum(4, ncclFloat, ncclMax)), "operation [02], .* same calls");
  EXPECT_DEATH(call_on_two(broadcast(0), broadcast(1)), "ncclBroadcast of 4 .* root [01].* same calls");
  if (!is_strict())  // there, the rank that gathers waits for the other to connect
    EXPECT_DEATH(call_on_two(both(sum(4), gather), both(sum(4), sum(1))), "same calls");
}

TEST(Nccl, AMessageOfAnotherSizeEndsTheProgram) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto send = [](Rank& r) { r.send(1, 1); };
  const auto receive = [](size_t count) { return [=](Rank& r) { r.receive(0, count); }; };
  call_on_two(send, receive(1));
  EXPECT_DEATH(call_on_two(send, receive(4)), "a message of 4 bytes from rank 0 where rank 1 receives 16");
}

TEST(Nccl, RefusesPeersAndRootsThatAreNoRanks) {
  const auto ranks = make_ranks(2);
  const Rank& rank = *ranks[0];
  const auto broadcast = [&](int root) {
    return ncclBroadcast(rank.data, rank.data, 1, ncclFloat, root, rank.communicator, rank.stream);
  };
  for (const int number : {-1, 2}) {
    EXPECT_EQ(rank.send(number), ncclInvalidArgument);
    EXPECT_EQ(rank.receive(number), ncclInvalidArgument);
    EXPECT_EQ(std::string_view(ncclGetLastError(rank.communicator)),
              "peer " + std::to_string(number) + " of 2 ranks");
    EXPECT_EQ(broadcast(number), ncclInvalidArgument);
  }
  EXPECT_TRUE(rank.is_done());
}

// ---- a peer whose process goes

// The peer, in a program of its own.
TEST(NcclPeer, ComesAndGoes) {
  const char* name = std::getenv("NCCL_TEST_ID");
  if (!name) GTEST_SKIP() << "is started by Nccl.ALostPeerIsAnAsynchronousError";
  ncclUniqueId id{};
  std::strncpy(id.internal, name, sizeof id.internal - 1);
  ncclComm_t communicator = nullptr;
  _exit(ncclCommInitRank(&communicator, 2, id, 1));
}

TEST(Nccl, ALostPeerIsAnAsynchronousError) {
  const char* reports = std::getenv("VIRTUAL_GPU_NCCL_ERRORS");
  ncclUniqueId id;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  setenv("NCCL_TEST_ID", id.internal, 1);
  char program[] = "/proc/self/exe", filter[] = "--gtest_filter=NcclPeer.*";
  char* const arguments[] = {program, filter, nullptr};
  pid_t peer = 0;
  ASSERT_EQ(posix_spawn(&peer, program, nullptr, nullptr, arguments, environ), 0);
  unsetenv("NCCL_TEST_ID");
  Rank rank;
  ASSERT_EQ(ncclCommInitRank(&rank.communicator, 2, id, 0), ncclSuccess);
  int status = 0;
  ASSERT_EQ(waitpid(peer, &status, 0), peer);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(state_of(rank.communicator), reports ? ncclRemoteError : ncclSuccess);
}

// ---- the first contact of two ranks

TEST(Nccl, TheFirstSendWaitsForItsPeerOnTheHostInStrictMode) {
  const auto ranks = make_ranks(2);
  Call send([&] { return ranks[0]->send(1); });
  EXPECT_EQ(send.waits(), is_strict());
  EXPECT_EQ(ranks[1]->receive(0), ncclSuccess);
  EXPECT_EQ(send.result(), ncclSuccess);
  EXPECT_EQ(ranks[1]->first(), 0);
  EXPECT_TRUE(ranks[0]->ends());
  // Later ones don't, in this direction.
  EXPECT_EQ(ranks[0]->send(1), ncclSuccess);
  EXPECT_EQ(ranks[1]->receive(0), ncclSuccess);
  EXPECT_TRUE(ranks[1]->ends());
  Call back([&] { return ranks[0]->receive(1); });
  EXPECT_EQ(back.waits(), is_strict());
  EXPECT_EQ(ranks[1]->send(0), ncclSuccess);
  EXPECT_EQ(back.result(), ncclSuccess);
}

TEST(Nccl, TheFirstContactIsTheProgressOfACommunicatorThatDoesNotBlock) {
  const auto ranks = make_ranks(2, non_blocking());
  const ncclResult_t first = is_strict() ? ncclInProgress : ncclSuccess;
  EXPECT_EQ(ranks[0]->receive(1), first);
  std::this_thread::sleep_for(a_while);
  EXPECT_EQ(state_of(ranks[0]->communicator), first);
  EXPECT_EQ(ranks[0]->is_done(), is_strict()) << "it is queued when the ranks are connected";
  ncclGroupStart();
  EXPECT_EQ(ranks[1]->send(0), ncclSuccess) << "within a group";
  const ncclResult_t end = ncclGroupEnd();
  EXPECT_TRUE(end == ncclSuccess || end == ncclInProgress);
  for (const auto& rank : ranks) EXPECT_TRUE(becomes_ready(rank->communicator));
  EXPECT_TRUE(ranks[0]->ends());
  EXPECT_EQ(ranks[0]->first(), 1);
}

// NCCL connects the ranks for each of its algorithms, which it chooses by function and size.
TEST(Nccl, TheFirstCollectiveOfAnAlgorithmWaitsForAllRanksOnTheHostInStrictMode) {
  const auto ranks = make_ranks(3);
  for (const size_t count : {size_t{1}, long_message / 3}) {
    const auto gather = [&](int rank) {
      return [&, rank] { return ranks[rank]->gather(ranks[rank]->communicator, count); };
    };
    Call first(gather(0)), second(gather(1));
    EXPECT_EQ(first.waits(), is_strict());
    EXPECT_EQ(second.waits(), is_strict());
    EXPECT_EQ(gather(2)(), ncclSuccess);
    for (Call* call : {&first, &second}) EXPECT_EQ(call->result(), ncclSuccess);
    for (const auto& rank : ranks) EXPECT_TRUE(rank->ends());
    for (const int rank : {0, 1, 2}) EXPECT_EQ(gather(rank)(), ncclSuccess) << "later ones don't wait";
    for (const auto& rank : ranks) EXPECT_TRUE(rank->ends());
  }
}

TEST(Nccl, AGroupConnectsAllOfItsCommunicatorsAtOnce) {
  auto ranks = make_ranks(2);
  on_all(ranks, [&](Rank& rank) {
    ncclComm_t part = nullptr;
    EXPECT_EQ(ncclCommSplit(rank.communicator, 0, rank.number, &part, nullptr), ncclSuccess);
    Rank other_stream(rank.number);
    ncclGroupStart();
    if (rank.number == 0) EXPECT_EQ(rank.gather(rank.communicator), ncclSuccess);
    EXPECT_EQ(other_stream.gather(part), ncclSuccess);
    if (rank.number == 1) EXPECT_EQ(rank.gather(rank.communicator), ncclSuccess);
    EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
    for (const Rank* gathered : {&rank, &other_stream}) {
      EXPECT_TRUE(gathered->ends());
      EXPECT_EQ(gathered->numbers(2), (std::vector<float>{0, 1}));
    }
    EXPECT_EQ(ncclCommDestroy(part), ncclSuccess);
  });
}

TEST(Nccl, AnAbortEndsAFirstContact) {
  for (const bool sends : {true, false}) {
    const auto ranks = make_ranks(2);
    ncclComm_t const communicator = ranks[0]->communicator;
    Call call([&] { return sends ? ranks[0]->send(1, long_message) : ranks[0]->gather(communicator); });
    EXPECT_EQ(call.waits(), is_strict());
    ranks[0]->communicator = nullptr;
    EXPECT_EQ(ncclCommAbort(communicator), ncclSuccess);
    EXPECT_EQ(call.result(), is_strict() ? ncclRemoteError : ncclSuccess);
    EXPECT_TRUE(ranks[0]->ends());
  }
}

}  // namespace
}  // namespace virtual_gpu_test
