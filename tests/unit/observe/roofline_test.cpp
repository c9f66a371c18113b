#include "observe/roofline.h"

#include <chrono>
#include <functional>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include "dist/stream_clock.h"
#include "titan/models/llama3.h"
#include "titan/ops/functional.h"
#include "titan/ops/linear.h"
#include "unit/models/small_llama.h"

namespace titan::train {
namespace {

CountedOperations counted(const std::function<void()>& action) {
  OperationCounter counter(at::kCPU);
  action();
  return counter.finish();
}

/// The calls of a kind, which have to be of one dtype; none: zeros.
OperationTotals of_kind(const CountedOperations& all, const std::string& kind) {
  OperationTotals found;
  for (const OperationTotals& total : all.operations) {
    if (total.kind != kind) continue;
    EXPECT_TRUE(found.kind.empty()) << "two dtypes of " << kind;
    found = total;
  }
  return found;
}

/// The only operation that `action` calls.
OperationTotals only(const std::function<void()>& action) {
  const CountedOperations all = counted(action);
  EXPECT_EQ(all.operations.size(), 1U);
  EXPECT_EQ(all.operations.empty() ? 0 : all.operations[0].calls, 1);
  return all.operations.empty() ? OperationTotals{} : all.operations[0];
}

void expect_cost(const OperationTotals& total, const std::string& kind, double read, double written,
                 double flops = 0) {
  EXPECT_EQ(total.kind, kind);
  EXPECT_EQ(total.cost.bytes_read, read) << kind;
  EXPECT_EQ(total.cost.bytes_written, written) << kind;
  EXPECT_EQ(total.cost.flops, flops) << kind;
  EXPECT_GT(total.seconds, 0) << kind;
}

TEST(OperationCosts, CountTheBytesAndOperationsOfProducts) {
  const at::Tensor a = at::randn({3, 5}), b = at::randn({5, 7}), sum = at::randn({3, 7});
  expect_cost(only([&] { at::mm(a, b); }), "products", 4 * (15 + 35), 4 * 21, 2 * 3 * 5 * 7);
  expect_cost(only([&] { at::addmm(sum, a, b); }), "products", 4 * (15 + 35 + 21), 4 * 21, 2 * 3 * 5 * 7);
  const at::Tensor many = at::randn({2, 3, 5}), others = at::randn({2, 5, 7});
  expect_cost(only([&] { at::matmul(many, others); }), "products", 8 * (15 + 35), 8 * 21, 4 * 3 * 5 * 7);
}

// Large products in fp32 are oneDNN's.
TEST(OperationCosts, CountProductsOfEitherLibraryAlike) {
  const at::Tensor x = at::randn({256, 128}), weight = at::randn({300, 128});
  for (const ops::CpuMatmul library : {ops::CpuMatmul::Mkl, ops::CpuMatmul::OneDnn})
    expect_cost(only([&] { ops::default_products(library)->forward({x}, {weight}); }), "products",
                4 * 128 * (256 + 300), 4 * 256 * 300, 2.0 * 256 * 128 * 300);
}

TEST(OperationCosts, CountEachElementThatHasToMoveOnce) {
  const at::Tensor x = at::randn({4, 8}), weight = at::randn({8});
  expect_cost(only([&] { ops::rms_norm(x, weight, 1e-5); }), "norms", 4 * (32 + 8), 4 * (32 + 4));
  expect_cost(only([&] { ops::swiglu(x, x); }), "swiglu", 4 * 64, 4 * 32);
  expect_cost(only([&] { x.to(at::kBFloat16); }), "copies", 4 * 32, 2 * 32);
  expect_cost(only([&] { x.clone(); }), "copies", 4 * 32, 4 * 32);
  expect_cost(only([&] { x.add(weight.expand({4, 8})); }), "other", 4 * (32 + 8), 4 * 32);
  expect_cost(only([&] { at::zeros({16}); }), "other", 0, 4 * 16);
  expect_cost(only([&] { x.sum(); }), "other", 4 * 32, 4);
}

TEST(OperationCosts, LeaveOutRowsThatNobodyReads) {
  const at::Tensor table = at::randn({100, 8}), tokens = at::tensor({3, 5, 3}, at::kLong);
  expect_cost(only([&] { at::embedding(table, tokens); }), "embedding", 8 * 3 + 4 * 24, 4 * 24);
  const at::Tensor heads = at::randn({1, 6, 2, 8});
  expect_cost(only([&] { ops::rotary(heads, table); }), "rotary", 4 * (96 + 6 * 8), 4 * 96);
}

TEST(OperationCosts, CountNoViewsAllocationsAndQuestions) {
  const at::Tensor x = at::randn({4, 8});
  const CountedOperations all = counted([&] {
    x.t().view({8, 4});
    x.reshape({2, 16}).unsqueeze(0).expand({3, 2, 16});
    at::empty_like(x).resize_({2});
    EXPECT_EQ(x.to(at::kFloat).size(0), 4);
  });
  EXPECT_TRUE(all.operations.empty()) << all.operations[0].kind;
}

TEST(OperationCosts, CountThePairsThatCausalAttentionSees) {
  const at::Tensor q = at::randn({2, 4, 6, 8});  // LibTorch's: heads first
  const double pairs = 2 * 4 * (1 + 2 + 3 + 4 + 5 + 6);
  const auto all = counted([&] { at::scaled_dot_product_attention(q, q, q, {}, 0.0, /*is_causal=*/true); });
  EXPECT_EQ(of_kind(all, "attention").calls, 1);
  EXPECT_EQ(of_kind(all, "attention").cost.flops, pairs * 4 * 8);
  // Ours: query i of a part sees the keys 0 .. 1 + i, at most 3 of them.
  at::Tensor out = at::zeros({1, 4, 2, 8}), log_sum_exp = at::full({1, 2, 4}, -1e30);
  using Attend =
      void(at::Tensor&, at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t);
  const auto attend = c10::Dispatcher::singleton().findSchemaOrThrow("titan::attend_", "").typed<Attend>();
  const at::Tensor queries = at::randn({1, 4, 2, 8}), keys = at::randn({1, 3, 2, 8});
  const auto part =
      of_kind(counted([&] { attend.call(out, log_sum_exp, queries, keys, keys, 1); }), "attention");
  EXPECT_EQ(part.cost.flops, 2.0 * (2 + 3 + 3 + 3) * 4 * 8);
  EXPECT_EQ(part.cost.bytes_read, 4 * (2 * 64 + 8 + 2 * 48));
  EXPECT_EQ(part.cost.bytes_written, 4 * (64 + 8));
}

// Six operations for each parameter and token, and attention's, which are counted with the discount for the
// causal mask and with the scores that the backward computes again: seven products where the formula has six.
TEST(OperationCounter, FindsTheModelsFlopsInForwardAndBackward) {
  const models::Llama3Args args = models::small_llama(/*tied=*/false, 2);
  models::Llama3 model(args);
  constexpr int64_t kRows = 3, kTokens = 12;
  const at::Tensor tokens = at::randint(args.vocab_size, {kRows, kTokens}, at::kLong);
  const CountedOperations all = counted([&] { model->forward(tokens, tokens, kRows * kTokens).backward(); });
  const double num_tokens = kRows * kTokens;
  const auto norms = static_cast<double>((2 * args.n_layers + 1) * args.dim);
  const auto looked_up = static_cast<double>(args.vocab_size * args.dim);
  const auto parameters = static_cast<double>(models::num_params(args)) - looked_up;
  EXPECT_DOUBLE_EQ(of_kind(all, "products").cost.flops, 6 * (parameters - norms) * num_tokens);
  EXPECT_NEAR(of_kind(all, "products").cost.flops / (6 * parameters * num_tokens), 1, 0.02);
  const double attention = (models::flops_per_token(args, kTokens) - 6 * parameters) * num_tokens;
  EXPECT_DOUBLE_EQ(of_kind(all, "attention").cost.flops, attention * 7 / 6 * (kTokens + 1) / (2 * kTokens));
  EXPECT_EQ(of_kind(all, "attention").calls, 4);
  EXPECT_EQ(of_kind(all, "norms").calls, 10);
  EXPECT_EQ(of_kind(all, "rotary").calls, 4);
  EXPECT_EQ(of_kind(all, "swiglu").calls, 4);  // w2's input is computed again by the backward's
  EXPECT_EQ(of_kind(all, "loss").calls, 1);
  EXPECT_EQ(of_kind(all, "embedding").calls, 2);
}

TEST(OperationCounter, CountsItsThreadAsLongAsItLives) {
  const at::Tensor x = at::randn({4, 4});
  const CountedOperations all = counted([&] {
    at::mm(x, x);
    std::thread([&] { at::mm(x, x); }).join();
  });
  EXPECT_EQ(of_kind(all, "products").calls, 1);
  at::mm(x, x);
  EXPECT_TRUE(counted([] {}).operations.empty());
}

TEST(OperationCounter, CountsMemoryBoundOperationsOfTheOptimizerAsIts) {
  at::Tensor x = at::randn({4, 4});
  OperationCounter counter(at::kCPU);
  x.mul_(2);
  counter.begin_optimizer();
  x.mul_(2);
  x.copy_(at::mm(x, x));
  const CountedOperations all = counter.finish();
  EXPECT_EQ(of_kind(all, "other").calls, 1);
  EXPECT_EQ(of_kind(all, "optimizer").calls, 2);
  EXPECT_EQ(of_kind(all, "products").calls, 1);
}

TEST(OperationCounter, TellsWaitsForRanksFromOperations) {
  const CountedOperations all = counted([] {
    const dist::PeerWait waiting("all_gather");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  });
  ASSERT_TRUE(all.exposed_s.contains("all_gather"));
  EXPECT_GE(all.exposed_s.at("all_gather"), 0.02);
  EXPECT_GE(all.span_s, all.exposed_s.at("all_gather"));
  EXPECT_LT(all.idle_s, all.span_s - 0.02 + 1e-9);
}

}  // namespace
}  // namespace titan::train
