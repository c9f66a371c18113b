// The training loop itself, with a model small enough to be followed: what it logs, when it ends, what it
// refuses.

#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <numeric>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "distributed/world.h"
#include "titan/core/error.h"
#include "titan/data/byte_tokenizer.h"
#include "titan/data/packed_feed.h"
#include "titan/train/trainer.h"
#include "unit/data/fake_source.h"
#include "unit/data/temporary_folder.h"
#include "unit/train/toy_model.h"

namespace titan::train {
namespace {

using titan::testing::world;

constexpr int64_t kVocabSize = 258;
constexpr int64_t kRows = 6;
constexpr int64_t kSeqLen = 8;

// The rank whose numbers go wrong: one in the middle, where there are three.
int bad_rank() { return world().size() / 2; }

// What is wrong, at every step.
enum class Fault { None, InfiniteLoss, InfiniteGradient };

// Recorded steps in memory: the tokens count up, and `empty_step` has no label.
class CountedFeed : public data::Feed {
 public:
  explicit CountedFeed(int64_t num_steps, int64_t empty_step = -1)
      : num_steps_(num_steps), empty_step_(empty_step) {}

  void check_shape(int64_t, int64_t) const override {}
  data::LaneState start(int64_t lane, int64_t) const override { return {.lane = lane}; }
  std::unique_ptr<data::Lane> open(const data::LaneState& state, int64_t) const override {
    return std::make_unique<CountedLane>(state, empty_step_);
  }
  std::vector<data::LaneState> redeal(const std::vector<data::LaneState>& lanes, int64_t) const override {
    return lanes;
  }
  std::optional<int64_t> num_steps() const override { return num_steps_; }
  std::string fingerprint() const override { return "counted"; }

 private:
  class CountedLane : public data::Lane {
   public:
    CountedLane(const data::LaneState& state, int64_t empty_step) : state_(state), empty_step_(empty_step) {}
    int64_t fill(data::Row row) override {
      const bool is_empty = ++state_.position == empty_step_;
      std::iota(row.input.begin(), row.input.end(), state_.lane + state_.position);
      std::iota(row.labels.begin(), row.labels.end(), state_.lane + state_.position + 1);
      if (is_empty) std::fill(row.labels.begin(), row.labels.end(), data::kIgnoredLabel);
      return is_empty ? 0 : static_cast<int64_t>(row.labels.size());
    }
    data::LaneState state() const override { return state_; }

   private:
    data::LaneState state_;
    int64_t empty_step_;
  };

  int64_t num_steps_;
  int64_t empty_step_;
};

class FaultyModel : public BigramModel {
 public:
  FaultyModel(const nn::Construct& construct, Fault fault, std::function<void()> at_forward)
      : BigramModel(kVocabSize, construct), fault_(fault), at_forward_(std::move(at_forward)) {}

  at::Tensor loss(const at::Tensor& tokens_BS, const at::Tensor& labels_BS, int64_t global_count) override {
    if (at_forward_) at_forward_();
    at::Tensor loss = BigramModel::loss(tokens_BS, labels_BS, global_count);
    if (world().rank() != bad_rank()) return loss;
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (fault_ == Fault::InfiniteLoss) return loss * kInfinity;
    if (fault_ == Fault::InfiniteGradient)
      loss.register_hook([](at::Tensor grad) { return grad * kInfinity; });
    return loss;
  }

 private:
  Fault fault_;
  std::function<void()> at_forward_;
};

struct Job {
  Fault fault = Fault::None;
  std::shared_ptr<const data::Feed> feed = {};  // unset: documents without end
  TrainerOptions options = {};
  std::filesystem::path folder = {};  // of rank 0's metrics; empty: none
  std::function<void()> at_forward = {};
};

std::shared_ptr<const data::Feed> documents() {
  return std::make_shared<data::PackedFeed>(std::make_shared<data::FakeSource>(data::numbered_documents(20)),
                                            std::make_shared<data::ByteTokenizer>(), data::PackingOptions{});
}

// A trainer, and the weights it began with.
struct Started {
  Trainer trainer;
  std::vector<Parameter> parameters;
  std::map<std::string, at::Tensor> before;

  bool weights_are_unchanged() const {
    for (const Parameter& parameter : parameters)
      if (!at::equal(parameter.data.local.detach(), before.at(parameter.name))) return false;
    return true;
  }
};

std::unique_ptr<TrainableModel> build_model(const Meshes& meshes, const Job& job) {
  auto model = std::make_unique<FaultyModel>(deferred(at::kCPU, at::kFloat), job.fault, job.at_forward);
  fully_shard(model->model, {.mesh = meshes.fsdp});
  materialize(model->root(), 1);
  return model;
}

data::DataLoader build_loader(const Job& job, const Meshes& meshes) {
  return {job.feed ? job.feed : documents(),
          {.dp_rank = meshes.dp_rank(),
           .dp_size = meshes.dp_degree(),
           .global_batch_size = kRows,
           .local_batch_size = kRows / world().size(),
           .seq_len = kSeqLen}};
}

std::unique_ptr<MetricsLogger> build_logger(const Job& job) {
  const bool writes = world().rank() == 0 && !job.folder.empty();
  return std::make_unique<MetricsLogger>(
      MetricsLogger::Options{.settings = {}, .folder = job.folder, .writes = writes});
}

Started start(const Job& job) {
  Meshes meshes = build_meshes(world(), {.dp_shard = world().size()});
  auto model = build_model(meshes, job);
  auto list = titan::parameters(model->root());
  auto loader = build_loader(job, meshes);
  std::map<std::string, at::Tensor> before;
  for (const Parameter& parameter : list) before[parameter.name] = parameter.data.local.detach().clone();
  return {
      Trainer({.world = world(),
               .meshes = meshes,
               .device = at::kCPU,
               .stages = whole_model(std::move(model), loader.num_micro_batches(), kRows / world().size()),
               .parameters = list,
               .tied = {},
               .optimizer = optim::Optimizer(list, {.lr = 0.1}),
               .schedule = optim::LrSchedule({.warmup_steps = 2}, job.options.steps),
               .loader = std::move(loader),
               .logger = build_logger(job),
               .window = MetricsWindow(at::kCPU, {}),
               .validator = {}},
              job.options),
      list, std::move(before)};
}

std::string message_of_training(Trainer& trainer) {
  try {
    trainer.train();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

TEST(Trainer, StepsChangeTheWeights) {
  Started job = start({.options = {.steps = 2}});
  job.trainer.train();
  EXPECT_FALSE(job.weights_are_unchanged());
}

// The verdict on the host at once, and on the device with the host a step behind.
class NonFinite : public ::testing::TestWithParam<bool> {
 protected:
  static TrainerOptions options() { return {.steps = 3, .read_late = GetParam()}; }
  // The one that is told, though a second step may have been launched by then.
  static void expect_first_step(const std::string& message) {
    EXPECT_TRUE(contains(message, "step 1: ")) << message;
  }
};

// Its peers' gradients are infinite too, as soon as they are reduced: only the loss tells whose it is.
TEST_P(NonFinite, ALossIsToldByAllRanksWithItsRank) {
  Started job = start({.fault = Fault::InfiniteLoss, .options = options()});
  std::string message = message_of_training(job.trainer);
  expect_first_step(message);
  EXPECT_TRUE(contains(message, str("the loss isn't finite on rank ", bad_rank()))) << message;
  EXPECT_EQ(contains(message, "(inf)"), world().rank() == bad_rank()) << message;
  EXPECT_TRUE(job.weights_are_unchanged());
}

// It is in every shard of the sum, so the name is the first shard's.
TEST_P(NonFinite, AGradientIsToldByAllRanksWithItsShard) {
  Started job = start({.fault = Fault::InfiniteGradient, .options = options()});
  std::string message = message_of_training(job.trainer);
  expect_first_step(message);
  EXPECT_TRUE(contains(message, "the losses of all ranks are; first seen in the shard of rank 0")) << message;
  EXPECT_TRUE(job.weights_are_unchanged());
}

INSTANTIATE_TEST_SUITE_P(Trainer, NonFinite, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "ReadLate" : "ReadAtOnce"; });

TEST(Trainer, ReadingLateChangesNoWeight) {
  std::vector<at::Tensor> weights;
  for (bool late : {false, true}) {
    Started job = start({.options = {.steps = 5, .read_late = late}});
    job.trainer.train();
    weights.push_back(job.parameters.at(0).data.local.detach().clone());
  }
  EXPECT_LE((weights[0] - weights[1]).abs().max().item<double>(), 1e-6);
}

std::vector<nlohmann::json> logged(const std::filesystem::path& folder) {
  std::ifstream file(folder / "metrics.jsonl");
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

TEST(Trainer, AStepWithoutLabelsLeavesTheWeights) {
  Started job = start({.feed = std::make_shared<CountedFeed>(1, /*empty_step=*/1), .options = {.steps = 1}});
  job.trainer.train();
  EXPECT_TRUE(job.weights_are_unchanged());
}

TEST(Trainer, AStepWithoutLabelsIsAStepOfTheSchedule) {
  data::TemporaryFolder folder;
  Started job = start({.feed = std::make_shared<CountedFeed>(4, /*empty_step=*/2),
                       .options = {.steps = 4, .log_freq = 1},
                       .folder = folder.path()});
  job.trainer.train();
  if (world().rank() != 0) return;
  optim::LrSchedule schedule({.warmup_steps = 2}, 4);
  auto lines = logged(folder.path());
  ASSERT_EQ(lines.size(), 4u);
  for (size_t i = 0; i < lines.size(); ++i) {
    EXPECT_DOUBLE_EQ(lines[i].at("lr"), 0.1 * schedule.factor(static_cast<int64_t>(i)));
    EXPECT_EQ(lines[i].at("loss") > 0, i != 1);
  }
}

TEST(Trainer, LogsTheFirstStepAndEveryLogFreq) {
  data::TemporaryFolder folder;
  Started job = start({.options = {.steps = 7, .log_freq = 3}, .folder = folder.path()});
  job.trainer.train();
  if (world().rank() != 0) return;
  std::vector<int64_t> steps;
  for (const auto& line : logged(folder.path())) steps.push_back(line.at("step"));
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 3, 6}));
}

// Of a loop with data of one's own: a training set of the config's has no end.
TEST(Trainer, EndsWithItsDataAndSavesTheModel) {
  data::TemporaryFolder folder;
  const auto file = folder.path() / "model.safetensors";  // rank 0 writes its own
  int64_t forwards = 0;
  Started job = start({.feed = std::make_shared<CountedFeed>(2),
                       .options = {.steps = 5, .final_model = file},
                       .at_forward = [&] { ++forwards; }});
  job.trainer.train();
  EXPECT_EQ(forwards, 2);
  if (world().rank() == 0) EXPECT_TRUE(std::filesystem::exists(file));
}

// The first step may take long, as it sets things up; a rank that is late in a later one is lost.
TEST(Trainer, TheTrainTimeoutHoldsFromTheSecondStepOn) {
  const std::chrono::seconds before = world().timeout();
  std::vector<std::chrono::seconds> timeouts;
  Started job = start({.options = {.steps = 3, .train_timeout_s = 17},
                       .at_forward = [&] { timeouts.push_back(world().timeout()); }});
  job.trainer.train();
  world().set_timeout(before);
  const std::chrono::seconds late(17);
  EXPECT_EQ(timeouts, (std::vector<std::chrono::seconds>{before, late, late}));
}

}  // namespace
}  // namespace titan::train
