#include "titan/models/llama3.h"

#include <ctime>
#include <fstream>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tensor/memory.h"
#include "titan/core/error.h"
#include "titan/parallel/parameters.h"
#include "unit/golden.h"
#include "unit/models/small_llama.h"

namespace titan::models {
namespace {

int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * 4096;
}

TEST(Llama3, NamesItsParametersAsTorchTitan) {
  const Llama3 model(small_llama(false, 2), deferred(at::kMeta));
  const std::vector<std::string> in_block{
      "attention.wq.weight",    "attention.wk.weight",    "attention.wv.weight",
      "attention.wo.weight",    "feed_forward.w1.weight", "feed_forward.w2.weight",
      "feed_forward.w3.weight", "attention_norm.weight",  "ffn_norm.weight"};
  std::vector<std::string> expected{"tok_embeddings.weight"};
  for (const char* layer : {"layers.0.", "layers.1."})
    for (const std::string& name : in_block) expected.push_back(layer + name);
  expected.push_back("norm.weight");
  expected.push_back("output.weight");
  std::vector<std::string> names;
  for (const Parameter& parameter : parameters(model)) names.push_back(parameter.name);
  EXPECT_EQ(names, expected);
}

TEST(Llama3, HasAsManyParametersAsNumParamsSays) {
  for (const auto& [name, args] : llama3_flavors()) {
    const Llama3 model(args, deferred(at::kMeta));
    int64_t count = 0;
    for (const Parameter& parameter : parameters(model)) count += parameter.compute.numel();
    EXPECT_EQ(count, num_params(args)) << name;
  }
}

class Deferred405B : public ::testing::TestWithParam<at::DeviceType> {};

TEST_P(Deferred405B, IsBuiltInOneSecondAnd200MB) {
  const int64_t before = resident_bytes();
  const std::clock_t start = std::clock();
  const Llama3 model(llama3_flavors().at("405B"), deferred(GetParam()));
  EXPECT_LT(static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC, 1.0);  // processor time
  EXPECT_LT(resident_bytes() - before, 200'000'000);
  EXPECT_EQ(model->layers.size(), 126u);
}

INSTANTIATE_TEST_SUITE_P(Devices, Deferred405B, ::testing::Values(at::kCPU, at::kMeta));

TEST(Llama3, DrawsTheDeclaredDistributions) {
  Llama3Args args = small_llama(false, 2);
  args.dim = 256;
  const Llama3 model(args, deferred(at::kCPU));
  materialize(model, 1);
  const auto std_of = [](const at::Tensor& weight) { return weight.to(at::kDouble).std().item<double>(); };
  EXPECT_NEAR(std_of(model->tok_embeddings->weight), 1, 0.03);
  EXPECT_NEAR(std_of(model->layers[1]->attention->wq->weight), 0.02, 5e-4);
  EXPECT_NEAR(std_of(model->layers[1]->feed_forward->w1->weight), 0.02, 5e-4);
  EXPECT_NEAR(std_of(model->layers[0]->attention->wo->weight), 0.02 / std::sqrt(2.0), 5e-4);
  EXPECT_NEAR(std_of(model->layers[1]->feed_forward->w3->weight), 0.02 / 2, 3e-4);
  EXPECT_NEAR(std_of(model->output->weight), 0.9866 / 16, 2e-3);
  EXPECT_TRUE(model->norm->weight.eq(1).all().item<bool>());
}

TEST(Llama3, StartsFromTheSameBitsForTheSameSeed) {
  const Llama3 first(small_llama(false, 2), deferred(at::kCPU)),
      second(small_llama(false, 2), deferred(at::kCPU)), third(small_llama(false, 2), deferred(at::kCPU));
  materialize(first, 5);
  materialize(second, 5);
  materialize(third, 6);
  const auto weight = [](const Llama3& model) { return model->layers[1]->attention->wk->weight; };
  EXPECT_TRUE(weight(first).equal(weight(second)));
  EXPECT_FALSE(weight(first).equal(weight(third)));
}

TEST(Llama3, ReturnsLogitsOrTheirLoss) {
  const Llama3 model(small_llama(false, 2), deferred(at::kCPU));
  materialize(model, 1);
  const at::Tensor tokens = at::randint(50, {3, 16}), labels = at::randint(50, {3, 16});
  const at::Tensor logits = model(tokens);
  EXPECT_EQ(logits.sizes(), at::IntArrayRef({3, 16, 50}));
  EXPECT_CLOSE(model(tokens, labels, 48), at::cross_entropy_loss(logits.flatten(0, 1), labels.flatten()),
               1e-6);
}

TEST(Llama3, ATiedModelHasOneMatrixWithBothGradients) {
  const Llama3 model(small_llama(/*tied=*/true, 2), deferred(at::kCPU));
  materialize(model, 1);
  EXPECT_TRUE(model->output->weight.is_same(model->tok_embeddings->weight));
  EXPECT_EQ(parameters(model).front().name, "tok_embeddings.weight");
  EXPECT_EQ(parameters(model).back().name, "norm.weight");
  EXPECT_NEAR(model->output->weight.std().item<double>(), 0.9866 / std::sqrt(32.0),
              1e-2);  // the head's distribution
  const at::Tensor tokens = at::randint(10, {2, 8}), labels = at::randint(10, 20, {2, 8});
  model(tokens, labels, 16).backward();
  const at::Tensor row_norms = model->output->weight.grad().norm(2, {1});
  EXPECT_GT(row_norms.min().item<float>(), 0);
}

TEST(Llama3, DoesNotLookAhead) {
  const Llama3 model(small_llama(false, 2), deferred(at::kCPU));
  materialize(model, 1);
  at::NoGradGuard no_grad;
  const at::Tensor tokens = at::randint(50, {1, 16});
  at::Tensor changed = tokens.clone();
  changed[0][9] = (changed[0][9] + 1) % 50;
  const at::Tensor before = model(tokens), after = model(changed);
  EXPECT_CLOSE(after.narrow(1, 0, 9), before.narrow(1, 0, 9), 1e-6);
  EXPECT_GT(testing::relative_error(after.narrow(1, 9, 1), before.narrow(1, 9, 1)), 1e-3);
}

// Token 49 ends documents.
Llama3Args in_documents() {
  Llama3Args args = small_llama(false, 2);
  args.attn_mask_type = "block_causal";
  return args;
}

// Rotary angles matter only by their differences, so a document's logits don't depend on where it lies in its row.
TEST(Llama3, ADocumentHasTheLogitsThatItHasAlone) {
  const Llama3 model(in_documents(), deferred(at::kCPU));
  materialize(model, 1);
  at::NoGradGuard no_grad;
  const at::Tensor tokens = at::randint(49, {2, 16}, at::kLong);
  tokens[0][4] = tokens[0][11] = tokens[1][15] = 49;
  const auto logits_of = [&](const at::Tensor& rows) {
    return model(rows, at::Tensor(), 0, ops::documents_ending_with(49, rows));
  };
  const at::Tensor packed = logits_of(tokens);
  for (const auto& [row, first, count] : {std::tuple{0, 0, 5}, {0, 5, 7}, {0, 12, 4}, {1, 0, 16}}) {
    const auto part = [&](const at::Tensor& x) {
      return x.narrow(0, row, 1).narrow(1, first, count).contiguous();
    };
    EXPECT_CLOSE(part(packed), logits_of(part(tokens)), 1e-5) << row << " " << first;
  }
}

TEST(Llama3, NeedsTheDocumentsThatItsMaskIsFor) {
  const Llama3 masked(in_documents(), deferred(at::kCPU)), causal(small_llama(false, 2), deferred(at::kCPU));
  materialize(masked, 1);
  materialize(causal, 1);
  const at::Tensor tokens = at::zeros({1, 4}, at::kLong);
  EXPECT_THROW(masked(tokens), Error);
  EXPECT_THROW(causal(tokens, at::Tensor(), 0, ops::documents_ending_with(0, tokens)), Error);
}

TEST(Llama3, RefusesSequencesBeyondItsTable) {
  const Llama3 model(small_llama(false, 2), deferred(at::kCPU));
  materialize(model, 1);
  EXPECT_THROW(model(at::zeros({1, 17}, at::kLong)), Error);
}

// A dry run: all sizes, no data.
TEST(Llama3, RunsForwardAndBackwardOnMeta) {
  const Llama3 model(llama3_flavors().at("debugmodel"), deferred(at::kMeta, at::kBFloat16));
  materialize(model, 1);
  const at::Tensor tokens = at::empty({2, 64}, at::TensorOptions().dtype(at::kLong).device(at::kMeta));
  const at::Tensor loss = model(tokens, tokens, 128);
  EXPECT_TRUE(loss.is_meta());
  loss.backward();
  for (const Parameter& parameter : parameters(model))
    EXPECT_TRUE(parameter.compute.grad().defined()) << parameter.name;
}

}  // namespace
}  // namespace titan::models
