// The loss head under fully_shard sums its weight's gradient in memory of its group: every gradient equals
// one rank's, and no step allocates a second gradient of the vocabulary's size.

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "distributed/toy_case.h"
#include "memory_meter.h"
#include "titan/nn/layers.h"

namespace titan {
namespace {

using namespace testing;  // NOLINT: the test's own names

constexpr int64_t kWidth = 16, kTokens = 96;

struct HeadCase {
  int64_t vocab = 0;
  bool tied = false;
  at::ScalarType dtype = at::kDouble;
  int calls = 1;
  int64_t chunk_rows = 20;
  bool frozen_embedding = false;  // its gradient is a whole matrix for a moment, too
};

class HeadNetImpl : public nn::Module {
 public:
  explicit HeadNetImpl(const HeadCase& c)
      : calls(c.calls),
        embedding(c.vocab, kWidth, deferred(device(), c.dtype)),
        norm(kWidth, 1e-5, deferred(device(), c.dtype)),
        head(kWidth, c.vocab,
             nn::LossHeadOptions{
                 .init = nn::Init::normal(0, 0.5),
                 .tied_weight = c.tied ? embedding->weight : at::Tensor(),
                 .chunk_bytes = c.chunk_rows * c.vocab * static_cast<int64_t>(c10::elementSize(c.dtype)),
                 .construct = deferred(device(), c.dtype)}) {
    if (c.frozen_embedding) embedding->weight.set_requires_grad(false);
    register_module("embedding", embedding);
    register_module("norm", norm);
    register_module("head", head);
  }
  // The factors show that the loss's own gradient counts.
  at::Tensor forward(const at::Tensor& tokens) {
    const at::Tensor hidden = norm(embedding(tokens));
    at::Tensor loss = 3 * head(hidden, tokens, kTokens);
    for (int call = 1; call < calls; ++call) loss = loss - call * head(hidden.square(), tokens, kTokens);
    return loss;
  }
  int calls;
  nn::Embedding embedding;
  nn::RMSNorm norm;
  nn::LinearCrossEntropy head;
};
TITAN_MODULE(HeadNet);

at::Tensor all_tokens(const HeadCase& c) {
  return (at::arange(kTokens, options_of(at::kLong)) * 7919).remainder(c.vocab);
}

HeadNet sharded_net(const HeadCase& c, FsdpOptions options, const DataLayout& layout) {
  HeadNet net(c);
  options.mesh = mesh_of(layout);
  if (c.tied) {
    fully_shard({net->embedding, net->norm, net->head}, options);
  } else if (c.calls > 1) {
    fully_shard(net->head, options);
  } else {
    fully_shard({net->norm, net->head}, options);
  }
  fully_shard(net, options);
  materialize(net, 1);
  return net;
}

HeadNet reference_net(const HeadCase& c) {
  HeadNet net(c);
  materialize(net, 1);
  net(all_tokens(c)).backward();
  return net;
}

// Each rank computes its tokens in `count` micro-batches.
void run_head(const HeadNet& net, const HeadCase& c, int count) {
  const at::Tensor mine = my_rows(all_tokens(c), world().rank(), world().size());
  for (int m = 0; m < count; ++m) {
    set_last_micro_batch(net, m + 1 == count);
    net(my_rows(mine, m, count)).backward();
  }
}

// Parameters: rows of the vocabulary, tied. With 29 rows the last rank's block is shorter, with 5 rows a rank
// of four has none. With 128,256 rows in fp32, all libraries' products are large enough to be used.
class FsdpLossHead : public ::testing::TestWithParam<std::tuple<int64_t, bool>> {};

TEST_P(FsdpLossHead, HasOneRanksGradients) {
  const auto [vocab, tied] = GetParam();
  const bool large = vocab > 1000;
  const HeadCase c{.vocab = vocab, .tied = tied, .dtype = large ? at::kFloat : at::kDouble};
  const HeadNet reference = reference_net(c);
  for (const DataLayout& layout : layouts(world().size()))
    for (const bool reduce_every : {true, false})
      for (const int micro_batches : {1, 3}) {
        const HeadNet net = sharded_net(c, {.reduce_every_micro_batch = reduce_every}, layout);
        for (int step = 0; step < 3; ++step) {
          forget_gradients(net);
          // A forward without a backward, whose graph is kept or dropped.
          at::Tensor unused = net(my_rows(all_tokens(c), world().rank(), world().size()));
          if (step == 1) unused.reset();
          run_head(net, c, micro_batches);
          expect_equal_gradients(net, reference, large ? 1e-5 : 1e-12,
                                 str("replicate ", layout.replicate, " shard ", layout.shard,
                                     " reduce_every ", reduce_every, " micro-batches ", micro_batches));
        }
      }
}

INSTANTIATE_TEST_SUITE_P(Vocabularies, FsdpLossHead,
                         ::testing::Combine(::testing::Values(128256, 29, 5), ::testing::Bool()));

// The backwards come in the reverse order, and the group reduces after each.
TEST(FsdpLossHeadCalls, MayBeTwoInOneForward) {
  const HeadCase c{.vocab = 29, .calls = 2};
  const HeadNet reference = reference_net(c);
  for (const DataLayout& layout : layouts(world().size())) {
    const HeadNet net = sharded_net(c, {}, layout);
    run_head(net, c, 1);
    expect_equal_gradients(net, reference, 1e-12, str("shard ", layout.shard));
  }
}

// From the third step on nothing of the gradient's size is allocated. One rank takes no buffer from the pool,
// unless it adds up micro-batches: then the later ones use one buffer. On a GPU a step takes its buffers from the allocator:
// that one, or with more ranks those of the gathered weight, of a gradient that is collected and one that is being reduced, and
// of its sum, or over gloo of all ranks' summands. A chunk of the logits has more rows than is asked for there, so micro-batches are small.
TEST(FsdpLossHeadMemory, AllocatesNoGradientOfTheVocabularysSizeInAStep) {
  const HeadCase c{.vocab = 128256, .dtype = at::kFloat, .chunk_rows = 1, .frozen_embedding = true};
  constexpr double unit = 128256.0 * kWidth * sizeof(float);
  const int size = world().size();
  for (const int micro_batches : device().is_cuda() ? std::vector{12} : std::vector{1, 2}) {
    const HeadNet net = sharded_net(c, {.reduce_every_micro_batch = true}, {1, size});
    for (int step = 0; step < 2; ++step) {
      forget_gradients(net);
      run_head(net, c, micro_batches);
    }
    const MemoryMeter third(device().type());
    forget_gradients(net);
    run_head(net, c, micro_batches);
    const double received = world().backend() == "nccl" ? 1.0 / size : 1;
    const double buffers = device().is_cpu() ? 0 : size == 1 ? 1 : 3 + received;
    EXPECT_LE(static_cast<double>(third.peak()), (buffers + 0.6) * unit) << micro_batches;
    if (size == 1 && device().is_cpu()) {
      EXPECT_EQ(fsdp_stats(net).communication_buffer_allocations, std::min(micro_batches - 1, 1));
    }
  }
}

// The second call's gradient needs the place that was lent to the first, whose values move to the pool then.
TEST(FsdpLossHeadMemory, StaysTheSameFromStepToStepIfAForwardCallsTheHeadTwice) {
  const HeadCase c{.vocab = 4096, .dtype = at::kFloat, .calls = 2, .frozen_embedding = true};
  constexpr double unit = 4096.0 * kWidth * sizeof(float);
  const auto step = [&](const HeadNet& net) {
    forget_gradients(net);
    run_head(net, c, 1);
  };
  for (const DataLayout& layout : layouts(world().size())) {
    const HeadNet net = sharded_net(c, {}, layout);
    for (int count = 0; count < 2; ++count) step(net);
    const int64_t allocations = fsdp_stats(net).communication_buffer_allocations;
    const MemoryMeter later(device().type());
    for (int count = 0; count < 3; ++count) step(net);
    const std::string what = str("replicate ", layout.replicate, " shard ", layout.shard);
    EXPECT_LE(static_cast<double>(later.bytes()), 0.1 * unit) << what;
    if (device().is_cpu()) EXPECT_EQ(fsdp_stats(net).communication_buffer_allocations, allocations) << what;
  }
}

}  // namespace
}  // namespace titan
