#include "train/whole_model_runner.h"

#include <gtest/gtest.h>

#include "train/pipeline/pipeline_runner.h"
#include "train/policies/validation.h"
#include "unit/train/toy_model.h"

namespace titan::train {
namespace {

data::Batch batch_of(at::Tensor tokens, at::Tensor labels) {
  int64_t valid = labels.ne(-100).sum().item<int64_t>();
  return {std::move(tokens), std::move(labels), valid};
}

std::vector<data::Batch> random_batches(int count, int64_t rows) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  std::vector<data::Batch> batches;
  for (int i = 0; i < count; ++i) {
    at::Tensor tokens = at::randint(16, {rows, 9}, generator, at::TensorOptions(at::kLong));
    at::Tensor labels = tokens.slice(1, 1).contiguous();
    labels[0].slice(0, 0, i + 1).fill_(-100);  // unequal padding, so that a mean of means would differ
    batches.push_back(batch_of(tokens.slice(1, 0, 8).contiguous(), labels));
  }
  return batches;
}

data::Batch joined(const std::vector<data::Batch>& batches) {
  std::vector<at::Tensor> tokens, labels;
  for (const auto& batch : batches) {
    tokens.push_back(batch.input_BS);
    labels.push_back(batch.labels_BS);
  }
  return batch_of(at::cat(tokens), at::cat(labels));
}

at::Tensor run(TrainableModel& model, const std::vector<data::Batch>& batches, int64_t tokens) {
  return WholeModelRunner(model, at::kCPU).forward_backward(batches, tokens);
}

std::optional<ValidationResult> validate_whole(TrainableModel& model, const ValidationBatches& batches,
                                               int64_t max_batches) {
  WholeModelRunner runner(model, at::kCPU);
  return validate(runner, DeviceMesh(), batches, max_batches);
}

class HalfPrecisionLoss : public BigramModel {
 public:
  using BigramModel::BigramModel;
  at::Tensor loss(const at::Tensor& tokens_BS, const at::Tensor& labels_BS,
                  const ops::ValidTokens& tokens) override {
    return BigramModel::loss(tokens_BS, labels_BS, tokens).to(at::kBFloat16);
  }
};

TEST(WholeModelRunner, RefusesALossInHalfPrecision) {
  HalfPrecisionLoss model(16);
  try {
    run(model, random_batches(1, 2), 14);
    ADD_FAILURE() << "the loss was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("must be a scalar in float32 or float64, but is BFloat16"),
              std::string::npos)
        << error.what();
    EXPECT_NE(std::string(error.what()).find("logits.to(at::kFloat)"), std::string::npos) << error.what();
  }
}

TEST(SplitRows, KeepsOrder) {
  const data::Batch whole = joined(random_batches(2, 2));
  const auto parts = split_rows({whole}, 1);
  ASSERT_EQ(parts.size(), 4u);
  EXPECT_TRUE(at::equal(joined(parts).labels_BS, whole.labels_BS));
  EXPECT_THROW(split_rows({whole}, 3), Error);
}

TokenCounts counted(const std::vector<data::Batch>& batches) {
  const dist::World world = dist::init({.backend = "fake"});
  return agree(batches, {}, build_meshes(world, {}), world).tokens;
}

TEST(TokenCounts, AddUpOverMicroBatches) {
  auto batches = random_batches(3, 2);
  TokenCounts counts = counted(batches);
  EXPECT_EQ(counts.local, 3 * 2 * 8 - (1 + 2 + 3));
  EXPECT_EQ(counts.global, counts.local);
}

TEST(StepRunner, AccumulationEqualsOneLargeBatch) {
  auto parts = random_batches(4, 2);
  std::vector<data::Batch> whole = {joined(parts)};
  BigramModel a(16, {.dtype = at::kDouble}), b(16, {.dtype = at::kDouble});
  int64_t tokens = counted(parts).global;

  double loss_a = run(a, parts, tokens).item<double>();
  double loss_b = run(b, whole, tokens).item<double>();
  EXPECT_NEAR(loss_a, loss_b, 1e-14);
  at::Tensor gradient_a = a.model->parameters()[0].grad(), gradient_b = b.model->parameters()[0].grad();
  EXPECT_LT((gradient_a - gradient_b).norm().item<double>(), 1e-14 * 16);
}

TEST(StepRunner, ForwardLeavesNoGradient) {
  auto batches = random_batches(1, 2);
  BigramModel model(16);
  at::NoGradGuard no_grad;
  at::Tensor loss = WholeModelRunner(model, at::kCPU).forward(batches[0], 10);
  EXPECT_EQ(loss.scalar_type(), at::kDouble);
  EXPECT_FALSE(model.model->parameters()[0].grad().defined());
}

TEST(StepRunner, RefusesAStepWithoutTokens) {
  BigramModel model(16);
  EXPECT_THROW(run(model, random_batches(1, 1), 0), Error);
}

// Gives `batches` one after the other, then nothing.
ValidationBatches one_by_one(std::vector<data::Batch>& batches, size_t& next, bool run_dry = false) {
  return {[&]() -> std::optional<data::Batch> {
            return next < batches.size() ? std::optional(batches[next++]) : std::nullopt;
          },
          [](const data::Batch& batch) { return std::optional(counted({batch})); }, run_dry};
}

TEST(Validate, IsTheMeanOverAllTokensAndReturnsToTraining) {
  auto batches = random_batches(3, 2);
  BigramModel model(16, {.dtype = at::kDouble});
  size_t next = 0;
  auto result = validate_whole(model, one_by_one(batches, next), -1);
  data::Batch whole = joined(batches);
  at::NoGradGuard no_grad;
  EXPECT_NEAR(result->loss, model.loss(whole.input_BS, whole.labels_BS, whole.valid_tokens).item<double>(),
              1e-13);
  EXPECT_EQ(result->tokens, whole.valid_tokens);
  EXPECT_TRUE(model.model->is_training());
}

TEST(Validate, StopsAfterMaxBatches) {
  auto batches = random_batches(3, 2);
  BigramModel model(16);
  size_t next = 0;
  validate_whole(model, one_by_one(batches, next), 2);
  EXPECT_EQ(next, 2u);
}

// A recording may have such a batch anywhere; a packed set has only such batches after its end.
TEST(Validate, BatchWithoutLabelsEndsASetThatRunsDry) {
  auto batches = random_batches(3, 2);
  at::Tensor none = at::full({2, 8}, -100, at::kLong);
  batches[1] = batch_of(batches[1].input_BS, none);
  BigramModel model(16);
  size_t next = 0;
  auto result = validate_whole(model, one_by_one(batches, next, /*run_dry=*/true), -1);
  EXPECT_EQ(next, 2u);
  EXPECT_EQ(result->tokens, batches[0].valid_tokens);
  next = 0;
  result = validate_whole(model, one_by_one(batches, next), -1);
  EXPECT_EQ(next, 3u);
  EXPECT_EQ(result->tokens, batches[0].valid_tokens + batches[2].valid_tokens);
}

TEST(Validate, RefusesAnEmptySet) {
  BigramModel model(16);
  std::vector<data::Batch> none;
  size_t next = 0;
  EXPECT_THROW(validate_whole(model, one_by_one(none, next), -1), ConfigError);
}

}  // namespace
}  // namespace titan::train
