// Sends and receives of overlapped products on a backend that processes each rank's messages one after the
// other and starts none before the peer has reached it.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "dist/flight_record.h"
#include "float8/products.h"
#include "operator_calls.h"
#include "parallel/tensor/exchanges.h"
#include "titan/core/error.h"
#include "titan/dist/device_mesh.h"
#include "titan/dist/world.h"
#include "titan/ops/functional.h"
#include "titan/ops/linear.h"
#include "unit/golden.h"
#include "unit/parallel/overlapped_mlp.h"
#include "unit/parallel/serial_queues.h"
#include "unit/parallel/thread_peer_memory.h"

namespace titan::tp {
namespace {

using testing::Message;

// The messages of a gather and a scatter, in the order in which a rank issues them. One process plays each
// rank in turn.
std::deque<Message> messages_of(int rank, int size) {
  const dist::World world = dist::init({.backend = "fake", .fake_rank = rank, .fake_world_size = size});
  const DeviceMesh axis = DeviceMesh::create(world, {{"tp", size}});
  const auto exchange = choose_exchange(axis, OverlapTransport::SendReceive)("").exchange;
  const at::Tensor part = at::ones({1, 2, 3});
  const auto gather = exchange->gather(part);
  while (gather->next() >= 0) {
  }
  const auto scatter = exchange->scatter();
  while (scatter->next() >= 0) scatter->give(part);
  scatter->finish();
  std::deque<Message> messages;
  for (const dist::CallRecord& call : world.recorder().snapshot())
    if (call.peer >= 0) messages.push_back({call.peer, call.op == dist::CollectiveOp::Send});
  return messages;
}

class ExchangeOrder : public ::testing::TestWithParam<int> {};

TEST_P(ExchangeOrder, FinishesWithOneQueuePerRank) {
  const int size = GetParam();
  std::vector<std::deque<Message>> queues;
  for (int rank = 0; rank < size; ++rank) queues.push_back(messages_of(rank, size));
  EXPECT_TRUE(testing::all_arrive(queues));
}

TEST_P(ExchangeOrder, SendsOneMessageToEachPeerInEachExchange) {
  const int size = GetParam();
  for (int rank = 0; rank < size; ++rank) {
    std::vector<int> sent(static_cast<size_t>(size)), received = sent, expected(sent.size(), 2);
    expected[static_cast<size_t>(rank)] = 0;
    for (const Message& message : messages_of(rank, size))
      ++(message.is_send ? sent : received)[static_cast<size_t>(message.peer)];
    EXPECT_EQ(sent, expected);
    EXPECT_EQ(received, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, ExchangeOrder, ::testing::Values(2, 3, 4, 5, 7, 8, 16));

// The second product of each part adds to the first one's result, and SwiGLU's output is computed again in the
// pass of its backward.
TEST(OverlappedBackward, TakesNoPassForASumOrForSwigluAlone) {
  constexpr int ranks = 2;
  const dist::World world = dist::init({.backend = "fake", .fake_world_size = ranks});
  const DeviceMesh axis = DeviceMesh::create(world, {{"tp", ranks}});
  const auto exchange = choose_exchange(axis, OverlapTransport::SendReceive)("").exchange;
  const testing::MlpTensors mlp = testing::part_of(testing::whole_mlp(8, at::kDouble), 0, ranks);
  const ops::SharedProducts products = ops::default_products();
  const std::vector<at::Tensor> hidden =
      ops::gathered_linears(mlp.x, {mlp.gate, mlp.up}, {products, products}, exchange);
  std::map<std::string, int> calls = testing::operators_of_backward(
      ops::scattered_linear(ops::swiglu(hidden[0], hidden[1]), mlp.down, products, exchange).sum());
  EXPECT_EQ(calls["aten::addmm_"], ranks);
  EXPECT_EQ(calls["titan::swiglu_with_backward"], 1);
  EXPECT_EQ(calls["titan::swiglu"], 0);
  EXPECT_EQ(calls["titan::swiglu_backward"], 0);
}

}  // namespace

// Compares overlapped products through shared memory with plain products, and checks that all accesses to the
// memory are ordered. The ranks are threads.

namespace {

using namespace titan::testing;  // NOLINT: the test's own names

std::shared_ptr<const PeerMemoryExchange> exchange_of(const std::shared_ptr<MeetingPlace>& place, int rank,
                                                      Queues queues) {
  return std::make_shared<const PeerMemoryExchange>(
      std::make_shared<PeerPieces>(PeerPieces{std::make_unique<ThreadPeerMemory>(place, rank, queues)}));
}

std::vector<at::Tensor> with_gradients(const MlpTensors& mlp, const at::Tensor& output) {
  std::vector<at::Tensor> results{output.detach()};
  for (const at::Tensor& leaf : mlp.leaves()) results.push_back(leaf.grad());
  return results;
}

struct Case {
  int ranks;
  Queues queues;
};
class PeerMemoryExchangeTest : public ::testing::TestWithParam<Case> {};

// The buffers grow for the second sequence and are reused for a shorter one after it.
TEST_P(PeerMemoryExchangeTest, EqualsPlainProducts) {
  const auto [ranks, queues] = GetParam();
  const std::vector<int64_t> sequences{12, 24, 12, 24};
  const auto place = std::make_shared<MeetingPlace>(ranks);
  using Results = std::vector<std::vector<at::Tensor>>;  // by sequence
  std::vector<Results> got(static_cast<size_t>(ranks));
  run_ranks(ranks, [&, queues = queues, ranks = ranks](int rank) {
    const auto exchange = exchange_of(place, rank, queues);
    for (const int64_t sequence : sequences) {
      const MlpTensors mlp = part_of(whole_mlp(sequence, at::kDouble), rank, ranks);
      const at::Tensor output = overlapped_output(mlp, exchange);
      backward(mlp, output);
      got[static_cast<size_t>(rank)].push_back(with_gradients(mlp, output));
    }
  });
  EXPECT_EQ(place->problems(), std::vector<std::string>{});
  for (size_t i = 0; i < sequences.size(); ++i) {
    const MlpTensors whole = whole_mlp(sequences[i], at::kDouble);
    const at::Tensor output = plain_output(whole);
    backward(whole, output);
    for (int rank = 0; rank < ranks; ++rank)
      for (size_t which = 0; which < 5; ++which)
        EXPECT_CLOSE(got[static_cast<size_t>(rank)][i][which],
                     expected_part(whole, output, which, rank, ranks), 1e-10)
            << "sequence " << i << ", rank " << rank << ", result " << which;
  }
}

// Counts what isn't written to its place at once.
class PlacedProducts final : public ops::Products {
 public:
  at::Tensor forward(const ops::Operand& x, const ops::Operand& weight) const override {
    num_unplaced += x.values.size(0) == kRows;
    return plain_->forward(x, weight);
  }
  at::Tensor grad_input(const ops::Operand& grad, const ops::Operand& weight) const override {
    return plain_->grad_input(grad, weight);
  }
  at::Tensor grad_weight(const ops::Operand& grad, const ops::Operand& x) const override {
    return plain_->grad_weight(grad, x);
  }
  bool put_product(const at::Tensor& out, ops::Pass pass, const ops::Operand& rows,
                   const ops::Operand& weight) const override {
    ++num_placed;
    return plain_->put_product(out, pass, rows, weight);
  }

  static constexpr int64_t kRows = 4;  // tokens that a rank has
  mutable int num_placed = 0, num_unplaced = 0;

 private:
  ops::SharedProducts plain_ = ops::default_products();
};

TEST_P(PeerMemoryExchangeTest, PartsOfOneRowArriveAndAreMultipliedInTheirPlaces) {
  const auto [ranks, queues] = GetParam();
  const int64_t sequence = ranks * PlacedProducts::kRows;
  const auto place = std::make_shared<MeetingPlace>(ranks);
  std::vector<std::vector<at::Tensor>> got(static_cast<size_t>(ranks));
  run_ranks(ranks, [&, queues = queues, ranks = ranks](int rank) {
    const auto exchange = exchange_of(place, rank, queues);
    const MlpTensors mlp = part_of(whole_mlp(sequence, at::kDouble, /*batch=*/1), rank, ranks);
    {
      const auto gather = exchange->gather(mlp.x.detach());
      while (gather->next() >= 0) continue;
      for (int part = 0; part < ranks; ++part)
        EXPECT_EQ(gather->whole().narrow(1, part * PlacedProducts::kRows, PlacedProducts::kRows).data_ptr(),
                  gather->part(part).data_ptr());
    }
    const auto up = std::make_shared<PlacedProducts>();
    const at::Tensor output =
        overlapped_output(mlp, exchange, {.up = up, .gate = up, .down = ops::default_products()});
    EXPECT_EQ(up->num_placed, ranks);
    EXPECT_EQ(up->num_unplaced, 0);
    backward(mlp, output);
    got[static_cast<size_t>(rank)] = with_gradients(mlp, output);
  });
  EXPECT_EQ(place->problems(), std::vector<std::string>{});
  const MlpTensors whole = whole_mlp(sequence, at::kDouble, /*batch=*/1);
  const at::Tensor output = plain_output(whole);
  backward(whole, output);
  for (int rank = 0; rank < ranks; ++rank)
    for (size_t which = 0; which < 5; ++which)
      EXPECT_CLOSE(got[static_cast<size_t>(rank)][which], expected_part(whole, output, which, rank, ranks),
                   1e-10)
          << "rank " << rank << ", result " << which;
}

// ---- in Float8

constexpr int64_t kNarrowSequence = 24;

std::shared_ptr<const ops::Products> narrow_products(const char* recipe) {
  return float8::products(float8::recipes().get(recipe), float8::Arithmetic::Emulated,
                          ops::default_products());
}

MlpProducts products_of_parts(const char* recipe, const std::shared_ptr<const ops::RankParts>& parts) {
  const auto whole = narrow_products(recipe);
  return {.up = whole->for_parts({.out = parts}),
          .gate = whole->for_parts({.out = parts}),
          .down = whole->for_parts({.in = parts})};
}

// The output's gradient is given, so that no cast depends on the order of a sum over ranks.
void backward_of_factor(const MlpTensors& mlp, const at::Tensor& output) {
  (output * mlp.factor).sum().backward();
}

// Bytes that a rank receives in a forward and a backward: x and the output's gradient, in Float8 if one cast
// serves all products with them, and summands in fp32.
int64_t bytes_received(const MlpTensors& part, int ranks, bool gathered_in_bytes) {
  const int64_t each = part.x.numel() + part.factor.numel();
  return (ranks - 1) * each * ((gathered_in_bytes ? 1 : 4) + 4);
}

TEST_P(PeerMemoryExchangeTest, EqualsOneRankInFloat8) {
  const auto [ranks, queues] = GetParam();
  for (const char* recipe : {"tensorwise", "rowwise", "rowwise_with_gw_hp"}) {
    const auto place = std::make_shared<MeetingPlace>(ranks);
    const auto shared = std::make_shared<ThreadRankParts::Shared>(ranks);
    std::vector<std::vector<at::Tensor>> got(static_cast<size_t>(ranks));
    run_ranks(ranks, [&, queues = queues, ranks = ranks](int rank) {
      const auto exchange = exchange_of(place, rank, queues);
      const MlpTensors mlp = part_of(whole_mlp(kNarrowSequence, at::kFloat), rank, ranks);
      const auto products = products_of_parts(recipe, std::make_shared<const ThreadRankParts>(shared, rank));
      const at::Tensor output = overlapped_output(mlp, exchange, products);
      backward_of_factor(mlp, output);
      got[static_cast<size_t>(rank)] = with_gradients(mlp, output);
      EXPECT_EQ(exchange->traffic()->bytes, bytes_received(mlp, ranks, std::string(recipe) == "tensorwise"))
          << recipe;
    });
    EXPECT_EQ(place->problems(), std::vector<std::string>{});
    const MlpTensors whole = whole_mlp(kNarrowSequence, at::kFloat);
    const auto multiply = [&](const at::Tensor& x, const at::Tensor& weight) {
      return ops::linear(x, weight, {}, narrow_products(recipe));
    };
    const at::Tensor output =
        multiply(activation(multiply(whole.x, whole.up), multiply(whole.x, whole.gate)), whole.down);
    backward_of_factor(whole, output);
    for (int rank = 0; rank < ranks; ++rank)
      for (size_t which = 0; which < 5; ++which)
        EXPECT_LT(relative_error(got[static_cast<size_t>(rank)][which],
                                 expected_part(whole, output, which, rank, ranks)),
                  1e-6)
            << recipe << ", rank " << rank << ", result " << which;
  }
}

// ---- sums

// Scatters in sequence, whose summands are distinguished only by their order.
TEST_P(PeerMemoryExchangeTest, SumsSixteenBitNumbersInFp32InRankOrder) {
  const auto [ranks, queues] = GetParam();
  constexpr int rounds = 3;
  const auto summand = [](int from, int to, int round) {
    return at::sin(at::arange(40, at::kFloat) * (from + 1) + to + 10 * round)
        .to(at::kBFloat16)
        .view({2, 4, 5});
  };
  const auto place = std::make_shared<MeetingPlace>(ranks);
  std::vector<std::vector<at::Tensor>> sums(static_cast<size_t>(ranks));
  run_ranks(ranks, [&, queues = queues](int rank) {
    const auto exchange = exchange_of(place, rank, queues);
    for (int round = 0; round < rounds; ++round) {
      const auto scatter = exchange->scatter();
      for (int to = scatter->next(); to >= 0; to = scatter->next()) scatter->give(summand(rank, to, round));
      sums[static_cast<size_t>(rank)].push_back(scatter->finish());
    }
  });
  EXPECT_EQ(place->problems(), std::vector<std::string>{});
  for (int to = 0; to < ranks; ++to)
    for (int round = 0; round < rounds; ++round) {
      at::Tensor expected = summand(0, to, round).to(at::kFloat);
      for (int from = 1; from < ranks; ++from) expected.add_(summand(from, to, round));
      EXPECT_TRUE(
          at::equal(sums[static_cast<size_t>(to)][static_cast<size_t>(round)], expected.to(at::kBFloat16)));
    }
}

// Gathers may leave some or all parts unused.
TEST_P(PeerMemoryExchangeTest, GathersMayEndEarly) {
  const auto [ranks, queues] = GetParam();
  const auto place = std::make_shared<MeetingPlace>(ranks);
  run_ranks(ranks, [&, queues = queues](int rank) {
    const auto exchange = exchange_of(place, rank, queues);
    for (int round = 0; round < 3; ++round) {
      const auto gather = exchange->gather(at::full({1, 2, 3}, rank + round));
      for (int i = 0; i < round; ++i) {
        const int from = gather->next();
        if (from >= 0) {
          EXPECT_TRUE(at::equal(gather->part(from), at::full({1, 2, 3}, from + round)));
        }
      }
    }
  });
  EXPECT_EQ(place->problems(), std::vector<std::string>{});
}

INSTANTIATE_TEST_SUITE_P(All, PeerMemoryExchangeTest,
                         ::testing::Values(Case{2, Queues::Beside}, Case{3, Queues::Beside},
                                           Case{4, Queues::Beside}, Case{2, Queues::InOrder},
                                           Case{3, Queues::InOrder}, Case{4, Queues::InOrder}),
                         [](const auto& info) {
                           return str(info.param.ranks, "Ranks",
                                      info.param.queues == Queues::Beside ? "Beside" : "InOrder");
                         });

TEST(PeerMemoryExchange, CountsReceivedBytes) {
  const auto place = std::make_shared<MeetingPlace>(3);
  run_ranks(3, [&](int rank) {
    const auto exchange = exchange_of(place, rank, Queues::Beside);
    const MlpTensors mlp = part_of(whole_mlp(12, at::kDouble), rank, 3);
    const at::Tensor output = overlapped_output(mlp, exchange);
    const int64_t in = 2 * 2 * 4 * 5 * 8, out = 2 * 2 * 4 * 7 * 8;  // two peers, [2, 4, features], fp64
    EXPECT_EQ(exchange->traffic()->bytes, in + out);
    EXPECT_EQ(exchange->traffic()->calls, 2);
    backward(mlp, output);
    EXPECT_EQ(exchange->traffic()->bytes, 2 * (in + out));
    EXPECT_EQ(exchange->traffic()->calls, 4);
  });
}

TEST(PeerMemoryExchange, RefusesOneRankAndTwoScattersAtOnce) {
  EXPECT_THROW(exchange_of(std::make_shared<MeetingPlace>(1), 0, Queues::InOrder), Error);
  const auto exchange = exchange_of(std::make_shared<MeetingPlace>(2), 0, Queues::InOrder);
  const auto scatter = exchange->scatter();
  EXPECT_THROW(exchange->scatter(), std::exception);
}

// The test double reports accesses that a schedule must not make.

std::string problems_of(const std::function<void(dist::SymmetricMemory&)>& rank) {
  const auto place = std::make_shared<MeetingPlace>(2);
  run_ranks(2, [&](int r) {
    ThreadPeerMemory memory(place, r, Queues::Beside);
    memory.reserve(256);
    rank(memory);
  });
  std::string all;
  for (const std::string& problem : place->problems()) all += problem + "\n";
  return all;
}

const at::Tensor& kept() {
  static const at::Tensor tensor = at::zeros({32}, at::kDouble);
  return tensor;
}

TEST(ThreadPeerMemory, AcceptsACorrectOrder) {
  const std::string problems = problems_of([](dist::SymmetricMemory& memory) {
    for (int i = 0; i < 3; ++i) {
      memory.write(1 - memory.rank(), 0, kept());
      memory.barrier();
      memory.wait(memory.now());
      memory.mine(0, {32}, at::kDouble);
      memory.barrier();
    }
  });
  EXPECT_EQ(problems, "");
}

TEST(ThreadPeerMemory, FindsReadsBeforeABarrier) {
  const std::string problems = problems_of([](dist::SymmetricMemory& memory) {
    const at::Tensor target = at::empty({32}, at::kDouble);
    memory.write(memory.rank(), 0, kept());
    memory.read(target, 1 - memory.rank(), 0);
    memory.wait(memory.now());
  });
  EXPECT_NE(problems.find("isn't ordered after"), std::string::npos) << problems;
}

TEST(ThreadPeerMemory, FindsASumThatDoesntWait) {
  const std::string problems = problems_of([](dist::SymmetricMemory& memory) {
    memory.write(1 - memory.rank(), 0, kept());
    memory.barrier();
    memory.mine(0, {32}, at::kDouble);
  });
  EXPECT_NE(problems.find("isn't ordered after"), std::string::npos) << problems;
}

TEST(ThreadPeerMemory, FindsWritesDuringAPeersRead) {
  const std::string problems = problems_of([](dist::SymmetricMemory& memory) {
    for (int i = 0; i < 2; ++i) {
      memory.write(1 - memory.rank(), 0, kept());
      memory.barrier();
      memory.wait(memory.now());
      memory.mine(0, {32}, at::kDouble);
    }
  });
  EXPECT_NE(problems.find("write by"), std::string::npos) << problems;
}

TEST(ThreadPeerMemory, FindsTensorsFreedTooEarly) {
  const std::string problems = problems_of([](dist::SymmetricMemory& memory) {
    memory.barrier();  // delays the queue
    for (int i = 0; i < 8; ++i) memory.write(memory.rank(), 0, at::zeros({32}, at::kDouble));
    memory.wait(memory.now());
  });
  EXPECT_NE(problems.find("is freed before the queue"), std::string::npos) << problems;
}

}  // namespace
}  // namespace titan::tp
