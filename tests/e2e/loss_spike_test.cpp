// A batch makes the loss jump: the run rewinds to a checkpoint and skips that batch, as if it had never been
// in the data.

#include <random>

#include "e2e/recorded_batches.h"

namespace titan::testing {
namespace {

/// Tokens that count up and are soon learned; `strange` batches (from 1) hold random ones.
fs::path write_recording(const std::string& name, int num_batches, const std::vector<int>& strange,
                         const std::vector<int>& left_out = {}) {
  Recording recording;
  std::mt19937 random(1);
  for (int batch = 1; batch <= num_batches; ++batch) {
    if (std::count(left_out.begin(), left_out.end(), batch)) continue;
    const bool is_strange = std::count(strange.begin(), strange.end(), batch) > 0;
    auto& input = recording.inputs.emplace_back();
    auto& label = recording.labels.emplace_back();
    for (int i = 0; i < kRecordedRows * kRecordedLength; ++i) {
      const int start = (i / kRecordedLength + batch) % 8;
      const auto token = [&](int at) {
        return is_strange ? static_cast<int>(random() % 100) + 100 : (start + at) % 8;
      };
      input.push_back(token(i % kRecordedLength));
      label.push_back(token(i % kRecordedLength + 1));
    }
  }
  return write(recording, name);
}

Words recorded_run(const fs::path& config, const fs::path& recording, int steps) {
  return resumable(config) + of_recording(recording, steps) +
         Words{"--lr_scheduler.total_steps", "35", "--checkpoint.no_last_save_model_only"};
}

const Words kRule = {"--fault_tolerance.spike_sigma",        "6", "--fault_tolerance.spike_window", "5",
                     "--fault_tolerance.spike_rewind_steps", "1"};

struct SpikeCase {
  const char* name;
  Words words;
};

void PrintTo(const SpikeCase& layout, std::ostream* out) { *out << layout.name; }

class LossSpike : public ::testing::TestWithParam<SpikeCase> {
 protected:
  Words layout() const { return GetParam().words; }
  fs::path config_ = fresh_folder("config"), run_ = fresh_folder("run"), straight_ = fresh_folder("straight");
};

// After step 20 come the batches 26, 27, ...: those that a run without 21 to 25 sees there.
TEST_P(LossSpike, RewindsTheRunAndSkipsItsBatch) {
  const fs::path data = write_recording("data", 40, {25}),
                 without = write_recording("without", 40, {}, {21, 22, 23, 24, 25});
  train_log(straight_, recorded_run(config_, without, 35) + layout());
  const std::string log = train_log(run_, recorded_run(config_, data, 35) + kRule + layout());
  EXPECT_THAT(log,
              AllOf(HasSubstr("step 25: the loss of"),
                    HasSubstr("Rewinding to step 20 and skipping the data through step 25: rewind 1 of 3")));
  EXPECT_EQ(curve_of(run_).size(), 35u);
  EXPECT_EQ(curve_of(run_), curve_of(straight_));
}

// The losses that the rule compares with are in the checkpoint.
TEST_P(LossSpike, IsTheSameAfterARestart) {
  const fs::path data = write_recording("data", 40, {25});
  train_log(straight_, recorded_run(config_, data, 35) + kRule + layout());
  train_log(run_, recorded_run(config_, data, 23) + kRule + layout());
  const std::string log = train_log(run_, recorded_run(config_, data, 35) + kRule + layout());
  EXPECT_THAT(log, HasSubstr("Rewinding to step 23 and skipping"));
  const Curve curve = curve_of(run_), expected = curve_of(straight_);
  for (int step = 1; step <= 20; ++step) EXPECT_EQ(curve.at(step), expected.at(step)) << step;
  EXPECT_EQ(curve.size(), 35u);
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, LossSpike,
    ::testing::Values(SpikeCase{"OneRank", ranks(1)},
                      SpikeCase{"TwoRanksSavedBeside",
                                ranks(2, {"--checkpoint.async_mode", "async_with_pinned_mem"})},
                      SpikeCase{"TensorParallel", ranks(2, {"--parallelism.tensor_parallel_degree", "2"})},
                      SpikeCase{"Pipeline", ranks(2, {"--parallelism.pipeline_parallel_degree", "2",
                                                      "--training.local_batch_size", "4"})}),
    [](const auto& info) { return info.param.name; });

// The configured distance, or as far as there are checkpoints; a spike soon after a rewind doubles it. The
// new state is saved after the next step.
TEST(LossSpikes, RewindByTheConfiguredNumberOfSteps) {
  const fs::path config = fresh_folder("config"), run = fresh_folder("run");
  const Words words =
      recorded_run(config, write_recording("data", 80, {28, 45}), 50) + kRule + ranks(2) +
      Words{"--fault_tolerance.spike_rewind_steps", "6", "--fault_tolerance.spike_window", "12",
            "--fault_tolerance.spike_sigma",        "3", "--checkpoint.keep_latest_k",     "0"};
  const std::string log = train_log(run, words);
  // 28 - 6 = 22; after step 20 come the batches 29 ..., so 45 is the batch of step 37: 37 - 12 = 25.
  EXPECT_THAT(log, AllOf(HasSubstr("step 28: the loss of"), HasSubstr("Rewinding to step 20 and skipping")));
  EXPECT_THAT(log, AllOf(HasSubstr("step 37: the loss of"), HasSubstr("Rewinding to step 25 and skipping")));
  EXPECT_TRUE(fs::exists(step_folder(run, 21))) << "saved after the first step of the rewound run";
  EXPECT_EQ(curve_of(run).size(), 50u);
}

// The number of rewinds is in the checkpoint that is saved right after one.
TEST(LossSpikes, AreCountedAcrossARestart) {
  const fs::path config = fresh_folder("config"), run = fresh_folder("run");
  const Words words = recorded_run(config, write_recording("data", 80, {25, 45}), 22) + kRule + ranks(2) +
                      Words{"--fault_tolerance.max_rewinds", "1"};
  EXPECT_THAT(train_log(run, words + Words{"--training.steps", "26"}), HasSubstr("rewind 1 of 1"));
  EXPECT_THAT(train_log(run, words + Words{"--training.steps", "60"}, 3),
              HasSubstr("has gone back 1 times already"));
}

// Three ranks' random numbers don't fit two ranks: the state is from more ranks than rewind to it.
TEST(LossSpikes, RewindOnFewerRanksAfterALoss) {
  const fs::path config = fresh_folder("config"), run = fresh_folder("run");
  const Words words = recorded_run(config, write_recording("data", 60, {24}), 20) + kRule;
  train_log(run, words + ranks(3));
  const std::string log = train_log(run, words + ranks(2) + Words{"--training.steps", "30"});
  EXPECT_THAT(log, AllOf(HasSubstr("Rewinding to step 20"), HasSubstr("random numbers are reseeded")));
  EXPECT_EQ(curve_of(run).size(), 30u);
}

// The folder holds another run's steps, after the one that this run resumed from.
TEST(LossSpikes, DoNotRewindToAnotherRun) {
  const fs::path config = fresh_folder("config"), run = fresh_folder("run");
  const Words words = recorded_run(config, write_recording("data", 80, {24}), 22) + kRule;
  train_log(run, words);
  const std::string log = train_log(run, words + Words{"--checkpoint.load_step", "15", "--training.steps",
                                                       "30", "--checkpoint.interval", "100"});
  EXPECT_THAT(log, HasSubstr("Rewinding to step 15"));
}

// The newest step before the spike is damaged: one byte of a tensor differs.
TEST(LossSpikes, RewindPastDamagedCheckpoints) {
  const fs::path config = fresh_folder("config"), run = fresh_folder("run");
  const Words words = recorded_run(config, write_recording("data", 60, {24}), 22) + kRule;
  train_log(run, words);
  const fs::path file = step_folder(run, 20) / "rank_00000.safetensors";
  std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
  bytes.seekp(-5, std::ios::end);
  bytes.put('\x55');
  bytes.close();
  const std::string log =
      train_log(run, words + Words{"--training.steps", "30", "--fault_tolerance.spike_rewind_steps", "4"});
  EXPECT_THAT(log, AllOf(HasSubstr("skipped: "), HasSubstr("rank_00000.safetensors"),
                         HasSubstr("Rewinding to step 15")));
}

TEST(LossSpikes, StopARunAfterTheLastAllowedRewind) {
  const fs::path config = fresh_folder("config"), run = fresh_folder("run");
  const Words words = recorded_run(config, write_recording("data", 60, {25, 36}), 35) + kRule + ranks(2);
  const std::string log = train_log(run, words + Words{"--fault_tolerance.max_rewinds", "1"}, 3);
  EXPECT_THAT(log, AllOf(HasSubstr("rewind 1 of 1"), HasSubstr("has gone back 1 times already")));
  EXPECT_TRUE(fs::exists(step_folder(run, 30)));
  EXPECT_FALSE(fs::exists(step_folder(run, 35)));
}

// There is nothing to rewind to.
TEST(LossSpikes, AreReportedBeforeTheFirstCheckpoint) {
  const fs::path config = fresh_folder("config");
  const Words words = recorded_run(config, write_recording("data", 40, {25}), 30) + kRule +
                      Words{"--checkpoint.interval", "100"};
  EXPECT_THAT(train_log(fresh_folder("run"), words),
              HasSubstr("there is no complete checkpoint to go back to"));
}

TEST(LossSpikes, AreIgnoredWithoutTheRule) {
  const fs::path config = fresh_folder("config");
  const std::string log =
      train_log(fresh_folder("run"), recorded_run(config, write_recording("data", 40, {25}), 30));
  EXPECT_THAT(log, Not(HasSubstr("spike")));
}

TEST(LossSpikes, RequireCheckpoints) {
  const fs::path config = fresh_folder("config");
  const CommandResult result = try_train(recorded_run(config, write_recording("data", 40, {}), 30) + kRule +
                                         Words{"--checkpoint.no_enable"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("fault_tolerance.spike_sigma"));
}

}  // namespace
}  // namespace titan::testing
