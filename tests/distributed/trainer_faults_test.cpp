// Steps that go wrong, and ranks that compute different numbers: all ranks skip the same steps, or stop
// together.

#include <signal.h>
#include <unistd.h>

#include <ATen/ops/equal.h>

#include "distributed/trainer_case.h"
#include "guard/policies.h"
#include "titan/train/run_end.h"
#include "train/policies/fault_tolerance.h"
#include "train/policies/interruption.h"

namespace titan::train {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

/// The current weights and moments.
struct Snapshot {
  std::map<std::string, at::Tensor> tensors;

  static std::map<std::string, at::Tensor> of(const Started& job) {
    std::map<std::string, at::Tensor> tensors;
    for (const Parameter& parameter : job.parameters) tensors[parameter.name] = parameter.data.local.detach();
    for (const auto& [name, state] : job.moments) {
      for (const auto& [key, tensor] : state) tensors[name + "." + key] = tensor.local;
    }
    return tensors;
  }
  void take(const Started& job) {
    for (const auto& [name, tensor] : of(job)) tensors[name] = tensor.clone();
  }
  bool equals(const Started& job) const {
    for (const auto& [name, tensor] : of(job))
      if (!at::equal(tensor, tensors.at(name))) return false;
    return true;
  }
};

struct SkipCase {
  const char* name;
  double value;
  bool late;
};

class Skip : public ::testing::TestWithParam<SkipCase> {
 protected:
  static TrainerOptions options(int64_t steps) {
    return {.steps = steps, .log_freq = 1, .read_late = GetParam().late};
  }
  static FaultToleranceSettings skip(FaultToleranceSettings settings = {}) {
    settings.on_nonfinite = "skip";
    return settings;
  }
};

// One rank's gradient shard: its peers see it only through the norm.
TEST_P(Skip, LeavesWeightsAndMomentsBitEqual) {
  constexpr int64_t kBad = 3;
  data::TemporaryFolder folder;
  Snapshot before;
  const Started* started = nullptr;
  int compared = 0;
  Started job = start({.options = options(5),
                       .fault_tolerance = skip(),
                       .folder = folder.path(),
                       .at_phase = [&](Phase phase, int64_t step, const std::vector<Parameter>& parameters) {
                         if (phase == Phase::Optimizer && step == kBad) {
                           before.take(*started);
                           spoil_gradient(parameters, GetParam().value);
                         }
                         if (phase == Phase::Data && step == kBad + 1) {
                           EXPECT_TRUE(before.equals(*started));
                           ++compared;
                         }
                       }});
  started = &job;
  EXPECT_EQ(message_of_training(job.trainer), "no error");
  EXPECT_EQ(compared, 1);
  EXPECT_FALSE(before.equals(job)) << "nothing was trained after the skipped step";
  if (world().rank() != 0) return;
  std::vector<int64_t> skipped;
  for (const auto& line : logged(folder.path())) skipped.push_back(line.at("skipped_steps"));
  EXPECT_EQ(skipped, (std::vector<int64_t>{0, 0, 1, 1, 1}));
}

TEST_P(Skip, HasALimitOfConsecutiveSteps) {
  Started job = start({.options = options(9),
                       .fault_tolerance = skip({.max_nonfinite_in_a_row = 2}),
                       .at_phase = [](Phase phase, int64_t step, const std::vector<Parameter>& parameters) {
                         if (phase == Phase::Optimizer && step >= 2)
                           spoil_gradient(parameters, GetParam().value);
                       }});
  const std::string message = message_of_training(job.trainer);
  EXPECT_TRUE(contains(message, "step 4: the gradient norm isn't finite")) << message;
  EXPECT_TRUE(contains(message, "number 3 in a row")) << message;
}

TEST_P(Skip, HasALimitForTheWholeRun) {
  Started job = start({.options = options(20),
                       .fault_tolerance = skip({.max_nonfinite_steps = 3}),
                       .at_phase = [](Phase phase, int64_t step, const std::vector<Parameter>& parameters) {
                         if (phase == Phase::Optimizer && step % 2 == 0)
                           spoil_gradient(parameters, GetParam().value);
                       }});
  const std::string message = message_of_training(job.trainer);
  EXPECT_TRUE(contains(message, "step 8: ") && contains(message, "number 4 of this run")) << message;
}

// Rotation doesn't remove it either, however many steps go wrong after it.
TEST_P(Skip, KeepsTheLastFiniteCheckpoint) {
  const SharedFolder folder;
  Started job = start({.options = options(16),
                       .fault_tolerance = skip({.max_nonfinite_in_a_row = 50}),
                       .checkpoints = folder.path,
                       .saves_whole = true,
                       .keep_latest = 2,
                       .at_phase = [&](Phase phase, int64_t step, const std::vector<Parameter>& parameters) {
                         if (phase == Phase::Optimizer && step > 4)
                           spoil_gradient(parameters, GetParam().value);
                         if (phase == Phase::Data && step == 16 && world().rank() == 0) {
                           EXPECT_TRUE(folder.has("step-4"));
                           EXPECT_FALSE(folder.has("step-15"));
                         }
                       }});
  EXPECT_EQ(message_of_training(job.trainer), "no error");
  if (world().rank() != 0) return;
  EXPECT_TRUE(folder.has("step-4"));
  EXPECT_TRUE(folder.has("step-16"));  // the last one is the run's result
}

// Until the next finite step, not by a whole interval.
TEST_P(Skip, PostponesASave) {
  const SharedFolder folder;
  Started job = start({.options = options(12),
                       .fault_tolerance = skip(),
                       .checkpoints = folder.path,
                       .saves_whole = true,
                       .save_interval = 5,
                       .at_phase = [&](Phase phase, int64_t step, const std::vector<Parameter>& parameters) {
                         if (phase == Phase::Optimizer && (step == 5 || step == 6))
                           spoil_gradient(parameters, GetParam().value);
                       }});
  EXPECT_EQ(message_of_training(job.trainer), "no error");
  if (world().rank() != 0) return;
  EXPECT_FALSE(folder.has("step-5"));
  EXPECT_FALSE(folder.has("step-6"));
  EXPECT_TRUE(folder.has("step-7"));
  EXPECT_FALSE(folder.has("step-8"));
  EXPECT_TRUE(folder.has("step-10"));
}

// A stop has no later step to wait for: it saves what there is of the run.
TEST_P(Skip, SavesAnywayWhenStopped) {
  const SharedFolder folder;
  const SignalWatch watch;
  Started job = start({.options = options(16),
                       .fault_tolerance = skip({.max_nonfinite_in_a_row = 50}),
                       .checkpoints = folder.path,
                       .saves_whole = true,
                       .at_phase = [&](Phase phase, int64_t step, const std::vector<Parameter>& parameters) {
                         if (phase == Phase::Optimizer && step > 4)
                           spoil_gradient(parameters, GetParam().value);
                         if (phase == Phase::Optimizer && step == 6 && world().rank() == bad_rank()) {
                           ::kill(::getpid(), SIGTERM);
                           for (int i = 0; i < 20'000 && noted_signal() == 0; ++i) ::usleep(1000);
                         }
                       }});
  EXPECT_EQ(message_of_training(job.trainer), "no error");
  if (world().rank() != 0) return;
  EXPECT_FALSE(folder.has("step-5"));
  EXPECT_TRUE(folder.has("step-6") || folder.has("step-7"));
  EXPECT_FALSE(folder.has("step-16"));
}

INSTANTIATE_TEST_SUITE_P(Trainer, Skip,
                         ::testing::Values(SkipCase{"NanReadAtOnce", kNan, false},
                                           SkipCase{"NanReadLate", kNan, true},
                                           SkipCase{"InfReadAtOnce", kInf, false},
                                           SkipCase{"InfReadLate", kInf, true}),
                         [](const auto& info) { return info.param.name; });

// The count continues across restarts.
TEST(Trainer, CountsSkippedStepsAcrossRestarts) {
  const SharedFolder folder;
  FaultToleranceSettings settings{.on_nonfinite = "skip", .max_nonfinite_steps = 3};
  std::string message;
  for (const int64_t steps : {6, 12}) {
    Started job = start({.options = {.steps = steps},
                         .fault_tolerance = settings,
                         .checkpoints = folder.path,
                         .saves_whole = true,
                         .schedule_steps = 12,
                         .at_phase = [](Phase phase, int64_t step, const std::vector<Parameter>& parameters) {
                           if (phase == Phase::Optimizer && step % 2 == 1) spoil_gradient(parameters, kNan);
                         }});
    message = message_of_training(job.trainer);
  }
  EXPECT_TRUE(contains(message, "step 7: ") && contains(message, "number 4 of this run")) << message;
}

// A run that rewinds has still skipped its earlier steps.
TEST(NonFiniteSteps, AreStillCountedAfterARewind) {
  NonFiniteSteps steps({.on_nonfinite = "skip", .max_nonfinite_steps = 3});
  const std::string before = steps.state();
  const auto explain = [] { return std::string(); };
  EXPECT_TRUE(steps.skip("step 1", explain));
  EXPECT_TRUE(steps.skip("step 2", explain));
  steps.load(before);
  EXPECT_EQ(steps.total(), 2);
  EXPECT_EQ(steps.in_a_row(), 0);
}

// Storage that doesn't answer may do so at the next start: the settings themselves aren't refused.
TEST(Trainer, AnUnlistableFolderIsNotAConfigError) {
  const SharedFolder folder;
  const std::filesystem::path checkpoints = folder.path / "checkpoint";
  Started job = start({.options = {.steps = 2}, .checkpoints = checkpoints, .saves_whole = true});
  world().everyone()->barrier({"test::folder"}).wait();
  if (world().rank() == 0) {
    std::filesystem::remove_all(checkpoints);
    std::filesystem::create_symlink(checkpoints, checkpoints);  // to itself
  }
  world().everyone()->barrier({"test::folder"}).wait();
  try {
    job.trainer.train();
    FAIL() << "the folder was listed";
  } catch (const ConfigError& error) {
    FAIL() << "reported as a wrong setting: " << error.what();
  } catch (const Error& error) {
    EXPECT_TRUE(contains(error.what(), "checkpoint")) << error.what();
  }
}

TEST(BitSum, SeesSwappedAndCompensatingElements) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const at::Tensor tensor = at::arange(1, 6, at::dtype(dtype)), swapped = tensor.clone();
    swapped[1] = tensor[3];
    swapped[3] = tensor[1];
    EXPECT_NE(bit_sum(swapped).item<int64_t>(), bit_sum(tensor).item<int64_t>()) << dtype;
  }
  const at::Tensor tensor = at::ones({5}), changed = tensor.clone();
  changed.view(at::kInt)[0].add_(7);
  changed.view(at::kInt)[4].sub_(7);
  EXPECT_NE(bit_sum(changed).item<int64_t>(), bit_sum(tensor).item<int64_t>());
}

TEST(BitSum, SeesEveryBit) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const at::Tensor tensor = at::randn({3, 5}, at::dtype(dtype));
    const auto sum = bit_sum(tensor).item<int64_t>();
    const size_t num_bits = tensor.nbytes() * 8;
    auto* bytes = static_cast<uint8_t*>(tensor.mutable_data_ptr());
    for (size_t bit = 0; bit < num_bits; ++bit) {
      bytes[bit / 8] ^= static_cast<uint8_t>(1U << (bit % 8));
      EXPECT_NE(bit_sum(tensor).item<int64_t>(), sum) << dtype << " bit " << bit;
      bytes[bit / 8] ^= static_cast<uint8_t>(1U << (bit % 8));
    }
    EXPECT_EQ(bit_sum(tensor).item<int64_t>(), sum);
  }
  EXPECT_EQ(bit_sum(at::empty({0})).item<int64_t>(), 0);
}

TEST(Differing, NamesRanksThatDifferFromTheMajority) {
  using Ranks = std::vector<size_t>;
  EXPECT_EQ(differing({7}), Ranks());
  EXPECT_EQ(differing({7, 7, 7}), Ranks());
  EXPECT_EQ(differing({7, 8, 7}), Ranks{1});
  EXPECT_EQ(differing({7, 8}), (Ranks{0, 1}));
  EXPECT_EQ(differing({7, 7, 8, 8}), (Ranks{0, 1, 2, 3}));
  EXPECT_EQ(differing({7, 7, 7, 8, 9}), (Ranks{3, 4}));
}

void flip_a_bit(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  *static_cast<uint8_t*>(tensor.detach().mutable_data_ptr()) ^= 1;
}

// Compared every other step, so that a flip in the third is found after the fourth.
TEST(Replicas, AllRanksNameOneThatDiffers) {
  const int size = world().size();
  Started job = start({.options = {.steps = 9},
                       .fault_tolerance = {.check_replicas_freq = 2},
                       .replicate = size,
                       .at_phase = [](Phase phase, int64_t step, const std::vector<Parameter>& parameters) {
                         if (phase == Phase::Data && step == 3 && world().rank() == bad_rank())
                           flip_a_bit(parameters.front().data.local);
                       }});
  const std::string message = message_of_training(job.trainer);
  const std::string who =
      size == 1   ? "no error"
      : size == 2 ? "after step 4 replicas of parameters differ: table: ranks 0, 1 differ from each other"
                  : "table: rank 1 differs from the other 2 that have a copy";
  EXPECT_TRUE(contains(message, who)) << message;
}

// One copy is saved and all ranks load it, so the copies are compared before every save.
TEST(Replicas, AreNotSavedIfTheyDiffer) {
  if (world().size() == 1) return;
  const SharedFolder folder;
  Started job = start({.options = {.steps = 9},
                       .fault_tolerance = {.check_replicas_freq = 100},
                       .checkpoints = folder.path,
                       .saves_whole = true,
                       .save_interval = 4,
                       .replicate = world().size(),
                       .at_phase = [](Phase phase, int64_t step, const std::vector<Parameter>& parameters) {
                         if (phase == Phase::Data && step == 6 && world().rank() == bad_rank())
                           flip_a_bit(parameters.front().data.local);
                       }});
  EXPECT_THROW(
      try { job.trainer.train(); } catch (const UnsoundRun& error) {
        EXPECT_TRUE(contains(error.what(), "after step 8 replicas")) << error.what();
        throw;
      },
      UnsoundRun);
  if (world().rank() != 0) return;
  EXPECT_TRUE(folder.has("step-4"));
  EXPECT_FALSE(folder.has("step-8"));
}

TEST(Replicas, StayEqualInASoundRun) {
  int compared = 0;
  Started job = start({.options = {.steps = 4},
                       .fault_tolerance = {.check_replicas_freq = 1},
                       .replicate = world().size(),
                       .at_phase = [&](Phase phase, int64_t, const std::vector<Parameter>&) {
                         compared += phase == Phase::CheckReplicas;
                       }});
  EXPECT_EQ(message_of_training(job.trainer), "no error");
  EXPECT_EQ(compared, 4);
}

}  // namespace
}  // namespace titan::train
