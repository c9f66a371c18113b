// Users' policies: registered by name, called in every trainer, saved with it.

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ops/equal.h>

#include "distributed/trainer_case.h"

namespace titan::train {
namespace {

/// The settings of these tests' policy, and the calls that it received.
struct Wanted {
  bool registered = false;  // only for this test's trainers
  int64_t stop_after = -1;  // the bad rank votes to stop after this step
  bool skips = false;       // steps with non-finite numbers
  bool reads_loss = false;
  std::vector<int64_t> judged, ended, saved;
  std::vector<double> losses;
  std::string state = "1";
  std::string loaded;
} wanted;

class WatchfulPolicy final : public TrainerPolicy {
 public:
  Vote vote() override {
    return last_ == wanted.stop_after && world().rank() == bad_rank() ? Vote::Stop : Vote::Go;
  }
  std::optional<StopCause> stop_cause() override { return StopCause{.reason = "the watchful policy"}; }
  bool skip(const std::string&, const std::function<std::string()>&) override { return wanted.skips; }
  bool reads_loss() const override { return wanted.reads_loss; }
  void judge(Trainer& trainer, const StepValues& values) override {
    wanted.losses.push_back(trainer.loss_of_all(values));
    wanted.judged.push_back(values.step);
  }
  bool end_step(Trainer& trainer) override {
    last_ = trainer.step();
    wanted.ended.push_back(last_);
    return false;
  }
  void before_save(Trainer& trainer) override { wanted.saved.push_back(trainer.step()); }
  std::string state() const override { return wanted.state; }
  void load(const std::string& state) override { wanted.loaded = state; }

 private:
  int64_t last_ = 0;
};

class TrainerPolicyTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    trainer_policies().add("watchful", [](TrainerParts& parts) -> std::unique_ptr<TrainerPolicy> {
      EXPECT_FALSE(parts.parameters.empty());
      return wanted.registered ? std::make_unique<WatchfulPolicy>() : nullptr;
    });
  }
  void SetUp() override { wanted = {.registered = true}; }
  void TearDown() override { wanted = {}; }
};

using Steps = std::vector<int64_t>;

TEST_F(TrainerPolicyTest, SeesEachStepAndEachSave) {
  const SharedFolder folder;
  Started job =
      start({.options = {.steps = 4}, .checkpoints = folder.path, .saves_whole = true, .save_interval = 2});
  job.trainer.train();
  EXPECT_EQ(wanted.judged, (Steps{1, 2, 3, 4}));
  EXPECT_EQ(wanted.ended, (Steps{1, 2, 3, 4}));
  EXPECT_EQ(wanted.saved, (Steps{2, 4}));
  world().everyone()->barrier({"test::saved"}).wait();
}

// The losses then come with the step's other numbers, and hosts exchange nothing for them.
TEST_F(TrainerPolicyTest, GetsTheLossWithoutAnExchangeIfItSaysThatItReadsIt) {
  std::vector<double> losses;
  for (const bool reads_loss : {false, true}) {
    wanted = {.registered = true, .reads_loss = reads_loss};
    const uint64_t before = world().recorder().num_calls();
    Started job = start({.options = {.steps = 3, .log_freq = 100}});
    job.trainer.train();
    int64_t exchanges = 0;
    for (const dist::CallRecord& call : world().recorder().snapshot())
      exchanges += call.number >= before && call.phase == std::string_view("train::loss_of_all");
    EXPECT_EQ(exchanges, reads_loss || world().size() == 1 ? 0 : 2);  // the first step is always logged
    ASSERT_EQ(wanted.losses.size(), 3u);
    EXPECT_GT(wanted.losses.back(), 0);
    if (reads_loss)
      for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(wanted.losses[i], losses[i], 1e-12 * losses[i]);
    losses = wanted.losses;
  }
}

TEST_F(TrainerPolicyTest, OneRanksVoteStopsAllRanksAndSaves) {
  const SharedFolder folder;
  wanted.stop_after = 3;
  Started job =
      start({.options = {.steps = 9}, .checkpoints = folder.path, .saves_whole = true, .save_interval = 100});
  const RunEnd end = job.trainer.train();
  EXPECT_EQ(end.step, 3);
  EXPECT_EQ(end.stop.signal, 0);
  EXPECT_EQ(end.stop.reason, "the watchful policy");
  EXPECT_TRUE(folder.has("step-3"));
  world().everyone()->barrier({"test::saved"}).wait();
}

TEST_F(TrainerPolicyTest, MaySkipANonFiniteStep) {
  wanted.skips = true;
  Started job = start({.fault = Fault::InfiniteLoss, .first_faulty_forward = 2, .options = {.steps = 3}});
  EXPECT_EQ(message_of_training(job.trainer), "no error");
  EXPECT_EQ(wanted.judged, Steps{1});
  EXPECT_EQ(wanted.ended, (Steps{1, 2, 3}));
}

TEST_F(TrainerPolicyTest, SavesAndLoadsItsState) {
  const SharedFolder folder;
  wanted.state = R"({"seen":7})";
  for (const int64_t steps : {2, 3}) {
    Started job = start(
        {.options = {.steps = steps}, .checkpoints = folder.path, .saves_whole = true, .schedule_steps = 3});
    job.trainer.train();
    EXPECT_EQ(wanted.loaded, steps == 2 ? "" : wanted.state);
  }
  world().everyone()->barrier({"test::saved"}).wait();
}

}  // namespace
}  // namespace titan::train
