// When a ring's messages are launched and waited for, in which order, and their bytes. One process simulates
// each rank in turn and reads its record of calls. Where ranks copy instead, they are threads.

#include <algorithm>
#include <string_view>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include "dist/flight_record.h"
#include "parallel/context/distributed_attention.h"
#include "titan/dist/world.h"
#include "unit/golden.h"
#include "unit/parallel/serial_queues.h"
#include "unit/parallel/thread_peer_memory.h"

namespace titan::context {
namespace {

using testing::Message;

constexpr dist::Label kForward{.phase = "test::forward"}, kBackward{.phase = "test::backward"};

/// One of `size` ranks that attend; data from the other ranks is arbitrary.
class PlayedRank {
 public:
  PlayedRank(int rank, int size, const ContextParallelOptions& options)
      : world_(dist::init({.backend = "fake", .fake_rank = rank, .fake_world_size = size})) {
    const SequenceLayout layout(size, options.load_balancer);
    attention_ = make_attention(world_.everyone(), world_.everyone(), layout, options);
  }

  void forward() { sum_ = attention_->forward(q_, kv_, kv_, kForward); }
  void backward() {
    const at::Tensor out = sum_.out_BSHD.to(at::kBFloat16);
    attention_->backward({q_, kv_, kv_, out, sum_.log_sum_exp_BHS}, out, kBackward);
  }

  std::vector<dist::CallRecord> calls(std::string_view phase) const {
    std::vector<dist::CallRecord> calls;
    for (const dist::CallRecord& call : world_.recorder().snapshot())
      if (call.phase == phase) calls.push_back(call);
    return calls;
  }
  int64_t bytes_of_keys_and_values() const { return 2 * static_cast<int64_t>(kv_.nbytes()); }

 private:
  dist::World world_;
  std::unique_ptr<DistributedAttention> attention_;
  at::Tensor q_ = at::randn({1, 4, 2, 8}).to(at::kBFloat16), kv_ = at::randn({1, 4, 1, 8}).to(at::kBFloat16);
  ops::AttentionSum sum_;
};

// ---- transfers during the kernels

/// Numbers of calls when a kernel starts.
struct Moment {
  size_t launched, under_way;
  bool operator==(const Moment&) const = default;
};

void PrintTo(const Moment& moment, std::ostream* out) {
  *out << moment.launched << " launched, " << moment.under_way << " running";
}

Moment moment_of(const std::vector<dist::CallRecord>& calls) {
  const auto is_under_way = [](const auto& call) { return call.state == dist::CallState::Launched; };
  return {calls.size(), static_cast<size_t>(std::count_if(calls.begin(), calls.end(), is_under_way))};
}

// State for the observer of LibTorch's calls, which is a plain function.
struct Watched {
  const PlayedRank* rank;
  const char* kernel;
  std::string_view phase;
  std::vector<Moment> moments;
};
Watched* watched = nullptr;

std::unique_ptr<at::ObserverContext> note_kernel(const at::RecordFunction& function) {
  if (std::string_view(function.name()) == watched->kernel)
    watched->moments.push_back(moment_of(watched->rank->calls(watched->phase)));
  return nullptr;
}

template <class Run>
std::vector<Moment> moments_of(const PlayedRank& rank, const char* kernel, dist::Label label, Run run) {
  Watched now{&rank, kernel, label.phase, {}};
  watched = &now;
  const auto observer =
      at::addThreadLocalCallback(at::RecordFunctionCallback(note_kernel).scopes({at::RecordScope::FUNCTION}));
  run();
  at::removeCallback(observer);
  watched = nullptr;
  EXPECT_EQ(moment_of(rank.calls(label.phase)).under_way, 0u) << "all are waited for";
  return now.moments;
}

constexpr int kRanks = 4;
constexpr ContextLoadBalancer kHeadTail = ContextLoadBalancer::HeadTail;

class RingOverlap : public ::testing::TestWithParam<int> {};  // a rank of kRanks

// A send and a receive run during each block but the last, or one gather runs during the first block.
TEST_P(RingOverlap, ReceivesKeysDuringTheBlockBefore) {
  PlayedRank hops(GetParam(), kRanks, {kHeadTail, ContextRotateMethod::AllToAll, ContextAttention::Ring});
  EXPECT_EQ(moments_of(hops, "titan::attend_", kForward, [&] { hops.forward(); }),
            (std::vector<Moment>{{2, 2}, {4, 2}, {6, 2}, {6, 0}}));
  PlayedRank gather(GetParam(), kRanks, {kHeadTail, ContextRotateMethod::AllGather, ContextAttention::Ring});
  EXPECT_EQ(moments_of(gather, "titan::attend_", kForward, [&] { gather.forward(); }),
            (std::vector<Moment>{{1, 1}, {1, 0}, {1, 0}, {1, 0}}));
}

// The sums of gradients so far are passed on during each block but the first.
TEST_P(RingOverlap, ReceivesGradientsDuringTheNextBlock) {
  PlayedRank hops(GetParam(), kRanks, {kHeadTail, ContextRotateMethod::AllToAll, ContextAttention::Ring});
  hops.forward();
  EXPECT_EQ(moments_of(hops, "titan::attend_backward_", kBackward, [&] { hops.backward(); }),
            (std::vector<Moment>{{2, 2}, {6, 4}, {10, 4}, {12, 2}}));
  PlayedRank gather(GetParam(), kRanks, {kHeadTail, ContextRotateMethod::AllGather, ContextAttention::Ring});
  gather.forward();
  EXPECT_EQ(moments_of(gather, "titan::attend_backward_", kBackward, [&] { gather.backward(); }),
            (std::vector<Moment>{{1, 1}, {3, 2}, {5, 2}, {7, 2}}));
}

INSTANTIATE_TEST_SUITE_P(Ranks, RingOverlap, ::testing::Range(0, kRanks));

// ---- one queue per rank

class RingOrder : public ::testing::TestWithParam<std::tuple<int, ContextLoadBalancer, ContextRotateMethod>> {
};

TEST_P(RingOrder, FinishesWithOneQueuePerRank) {
  const auto& [size, balancer, rotate] = GetParam();
  std::vector<std::deque<Message>> queues(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    PlayedRank played(rank, size, {balancer, rotate, ContextAttention::Ring});
    played.forward();
    played.backward();
    for (const dist::Label& label : {kForward, kBackward})
      for (const dist::CallRecord& call : played.calls(label.phase))
        if (call.peer >= 0)
          queues[static_cast<size_t>(rank)].push_back({call.peer, call.op == dist::CollectiveOp::Send});
  }
  EXPECT_FALSE(queues[0].empty());
  EXPECT_TRUE(testing::all_arrive(queues));
}

INSTANTIATE_TEST_SUITE_P(Sizes, RingOrder,
                         ::testing::Combine(::testing::Values(2, 3, 4, 5, 8),
                                            ::testing::Values(kHeadTail, ContextLoadBalancer::None),
                                            ::testing::Values(ContextRotateMethod::AllGather,
                                                              ContextRotateMethod::AllToAll)));

// A test of the test double: if all ranks send first, none reaches its receive.
TEST(SerialQueues, DeadlockWhereAllSendFirst) {
  std::vector<std::deque<Message>> queues;
  for (int rank = 0; rank < 3; ++rank) queues.push_back({{(rank + 1) % 3, true}, {(rank + 2) % 3, false}});
  EXPECT_FALSE(testing::all_arrive(queues));
}

// ---- copies from the previous rank's memory

struct CopyCase {
  int ranks;
  testing::Queues queues;
};
class RingOfCopies : public ::testing::TestWithParam<CopyCase> {};

// The pieces grow for the second sequence.
TEST_P(RingOfCopies, EqualsAttentionOverTheWholeSequence) {
  const auto [ranks, queues] = GetParam();
  const auto keys = std::make_shared<testing::MeetingPlace>(ranks),
             gradients = std::make_shared<testing::MeetingPlace>(ranks);
  const SequenceLayout layout(ranks, kHeadTail);
  at::manual_seed(4);
  struct Whole {
    at::Tensor q, k, v, grad, out;
  };
  std::vector<Whole> sequences;
  for (const int64_t chunk : {3, 5, 3}) {
    const auto make = [&](int64_t heads) { return at::randn({2, chunk * 2 * ranks, heads, 8}, at::kDouble); };
    Whole whole{make(4).requires_grad_(), make(2).requires_grad_(), make(2).requires_grad_(), make(4), {}};
    whole.out = ops::causal_attention(whole.q, whole.k, whole.v);
    whole.out.backward(whole.grad);
    sequences.push_back(whole);
  }
  testing::run_ranks(ranks, [&, ranks = ranks, queues = queues](int rank) {
    const auto memory = [&](const auto& place) {
      return std::make_unique<testing::ThreadPeerMemory>(place, rank, queues);
    };
    const auto attention = make_ring_attention(memory(keys), memory(gradients), layout);
    for (const Whole& whole : sequences) {
      const auto part = [&](const at::Tensor& x) { return layout.part(x.detach(), 1, rank); };
      const at::Tensor q = part(whole.q), k = part(whole.k), v = part(whole.v);
      const ops::AttentionSum sum = attention->forward(q, k, v, kForward);
      EXPECT_CLOSE(sum.out_BSHD, part(whole.out), 1e-12);
      const ops::AttentionGradients got =
          attention->backward({q, k, v, sum.out_BSHD, sum.log_sum_exp_BHS}, part(whole.grad), kBackward);
      EXPECT_CLOSE(got.q_BSHD, part(whole.q.grad()), 1e-12);
      EXPECT_CLOSE(got.k_BTKD, part(whole.k.grad()), 1e-12);
      EXPECT_CLOSE(got.v_BTKD, part(whole.v.grad()), 1e-12);
    }
  });
  EXPECT_EQ(keys->problems(), std::vector<std::string>{});
  EXPECT_EQ(gradients->problems(), std::vector<std::string>{});
}

INSTANTIATE_TEST_SUITE_P(Ranks, RingOfCopies,
                         ::testing::Values(CopyCase{2, testing::Queues::Beside},
                                           CopyCase{3, testing::Queues::Beside},
                                           CopyCase{4, testing::Queues::Beside},
                                           CopyCase{3, testing::Queues::InOrder}),
                         [](const auto& info) {
                           return str(info.param.ranks, "_ranks",
                                      info.param.queues == testing::Queues::InOrder ? "_in_order" : "");
                         });

// ---- received bytes

/// Received data, in units of a rank's own keys and values.
int64_t units_received(const PlayedRank& rank, dist::Label label) {
  int64_t bytes = 0;
  for (const dist::CallRecord& call : rank.calls(label.phase)) {
    if (call.op == dist::CollectiveOp::Receive) bytes += call.bytes;
    // Records have the size of the larger side, which includes the rank's own part.
    if (call.op == dist::CollectiveOp::AllGather || call.op == dist::CollectiveOp::ReduceScatter)
      bytes += call.bytes / kRanks * (kRanks - 1);
  }
  return bytes / rank.bytes_of_keys_and_values();
}

// The table in docs/context_parallel.md; an fp32 number counts as two in bfloat16.
TEST(ContextTraffic, MatchesTheDocs) {
  constexpr int kOthers = kRanks - 1;
  struct Row {
    ContextParallelOptions options;
    int forward, backward;
  };
  for (const Row& row : {Row{{kHeadTail, ContextRotateMethod::AllGather, ContextAttention::Ring},
                             kOthers,
                             kOthers + 2 * kRanks},
                         Row{{kHeadTail, ContextRotateMethod::AllToAll, ContextAttention::Ring},
                             kOthers,
                             kOthers + 2 * kRanks},
                         Row{{kHeadTail, ContextRotateMethod::AllGather, ContextAttention::AllGatherKv},
                             kOthers,
                             kOthers + 2 * kOthers}}) {
    PlayedRank rank(1, kRanks, row.options);
    rank.forward();
    rank.backward();
    EXPECT_EQ(units_received(rank, kForward), row.forward);
    EXPECT_EQ(units_received(rank, kBackward), row.backward);
  }
}

}  // namespace
}  // namespace titan::context
