// The training loop itself, with a model small enough to follow: its log, its end, and its errors.

#include <gmock/gmock.h>

#include <map>
#include <string>

#include <ATen/ops/equal.h>

#include "dist/device_backend.h"
#include "dist/flight_record.h"
#include "distributed/trainer_case.h"
#include "observe/stragglers.h"

namespace titan::train {
namespace {

using ::testing::ElementsAre;

TEST(Trainer, StepsChangeTheWeights) {
  Started job = start({.options = {.steps = 2}});
  job.trainer.train();
  EXPECT_FALSE(job.weights_are_unchanged());
}

// The host judges at once, or one step late with the device's verdict.
class NonFinite : public ::testing::TestWithParam<bool> {
 protected:
  static TrainerOptions options() { return {.steps = 3, .read_late = GetParam()}; }
  // The step that is reported, although a second step may have been launched by then.
  static void expect_first_step(const std::string& message) {
    EXPECT_TRUE(contains(message, "step 1: ")) << message;
  }
};

// Once gradients are reduced, they are infinite on all ranks: only the loss shows which rank caused it.
TEST_P(NonFinite, AllRanksReportTheRankOfALoss) {
  Started job = start({.fault = Fault::InfiniteLoss, .options = options()});
  std::string message = message_of_training(job.trainer);
  expect_first_step(message);
  EXPECT_TRUE(contains(message, str("the loss isn't finite on rank ", bad_rank()))) << message;
  EXPECT_EQ(contains(message, "(inf)"), world().rank() == bad_rank()) << message;
  EXPECT_TRUE(job.weights_are_unchanged());
}

// The number is in every shard of the sum, so the first shard's rank is named.
TEST_P(NonFinite, AllRanksReportTheShardOfAGradient) {
  Started job = start({.fault = Fault::InfiniteGradient, .options = options()});
  std::string message = message_of_training(job.trainer);
  expect_first_step(message);
  EXPECT_TRUE(contains(message, "the losses of all ranks are; first seen in the shard of rank 0")) << message;
  EXPECT_TRUE(job.weights_are_unchanged());
}

// From the second step on, the host may judge a step after launching the next one.
TEST_P(NonFinite, TracesAGradientToItsRankAndModule) {
  for (const int step : {1, 2}) {
    Started job =
        start({.fault = Fault::InfiniteGradient, .first_faulty_forward = step, .options = options()});
    const std::string message = message_of_training(job.trainer);
    EXPECT_TRUE(contains(message, str("The replay found the source. step ", step, ", rank ", bad_rank(),
                                      ": the gradient of the output of module model isn't finite")))
        << message;
    EXPECT_FALSE(contains(message, "have non-finite values")) << message;
  }
}

// The replay finds nothing wrong, as after a processor fault. With late reads the next step has begun.
TEST_P(NonFinite, ReportsAGradientThatIsFiniteOnReplay) {
  std::vector<at::Tensor> batches;
  Started job = start({.options = options(),
                       .at_forward = [&](const at::Tensor& tokens) { batches.push_back(tokens.clone()); },
                       .at_phase =
                           [&](Phase phase, int64_t step, const std::vector<Parameter>& parameters) {
                             if (phase == Phase::Optimizer && step == 2)
                               spoil_gradient(parameters, std::numeric_limits<double>::infinity());
                           }});
  const std::string message = message_of_training(job.trainer);
  EXPECT_TRUE(contains(message, str("step 2: the gradient norm isn't finite, though the losses of all ranks "
                                    "are; first seen in the shard of rank ",
                                    bad_rank())))
      << message;
  EXPECT_TRUE(contains(message, "In the replay all numbers were finite")) << message;
  ASSERT_EQ(batches.size(), GetParam() ? 4u : 3u);
  EXPECT_TRUE(at::equal(batches.back(), batches[1])) << "the replayed batch";
  EXPECT_FALSE(at::equal(batches[0], batches[1])) << "each step has its own batch";
}

// No module has a non-finite output or gradient, so the parameter is named.
TEST_P(NonFinite, NamesAWeightWithItsOwnGradient) {
  for (const int step : {1, 2}) {
    Started job =
        start({.fault = Fault::InfiniteWeightGradient, .first_faulty_forward = step, .options = options()});
    const std::string message = message_of_training(job.trainer);
    EXPECT_TRUE(contains(message, str("step ", step, ": the gradient norm isn't finite"))) << message;
    EXPECT_TRUE(contains(message, "the gradient of parameter 'table' is")) << message;
  }
}

// The added term passes no gradient.
TEST_P(NonFinite, ReplayBlamesTheLossOnly) {
  Started job = start({.fault = Fault::LossAlone, .first_faulty_forward = 2, .options = options()});
  const std::string message = message_of_training(job.trainer);
  EXPECT_TRUE(contains(message, str("step 2: the loss isn't finite on rank ", bad_rank()))) << message;
  EXPECT_TRUE(contains(message, str("In the replay only the loss wasn't finite, on ranks ", bad_rank(), ":")))
      << message;
}

TEST_P(NonFinite, AFailingReplayDoesNotHideTheProblem) {
  int calls = 0;
  Started job =
      start({.fault = Fault::InfiniteGradient, .options = options(), .at_forward = [&](const at::Tensor&) {
               if (++calls > 1) throw Error("no memory");
             }});
  const std::string message = message_of_training(job.trainer);
  expect_first_step(message);
  EXPECT_TRUE(contains(message, "the gradient norm isn't finite")) << message;
  EXPECT_TRUE(contains(message, "The replay that looks for the source failed: no memory")) << message;
}

INSTANTIATE_TEST_SUITE_P(Trainer, NonFinite, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "ReadLate" : "ReadAtOnce"; });

TEST(Trainer, LateReadsChangeNoWeight) {
  std::vector<at::Tensor> weights;
  for (bool late : {false, true}) {
    Started job = start({.options = {.steps = 5, .read_late = late}});
    job.trainer.train();
    weights.push_back(job.parameters.at(0).data.local.detach().clone());
  }
  EXPECT_LE((weights[0] - weights[1]).abs().max().item<double>(), 1e-6);
}

struct NotesReads : TrainerPolicy {
  explicit NotesReads(std::vector<std::string>& events) : events(events) {}
  void judge(Trainer& /*trainer*/, const StepValues& values) override {
    events.push_back(str("read ", values.step));
  }
  std::vector<std::string>& events;
};

struct NotesLogs : RunObserver {
  explicit NotesLogs(std::vector<std::string>& events) : events(events) {}
  void begin(Phase phase, int64_t step) override {
    if (phase == Phase::ForwardBackward) events.push_back(str("forward ", step));
  }
  void logged(const StepMetrics& metrics) override { events.push_back(str("log ", metrics.step)); }
  std::vector<std::string>& events;
};

// A device that is read late always has the next step's work when the host waits for it, whether steps are logged or
// not. The first step isn't late: only then does the shorter time limit begin.
TEST(Trainer, LateReadsAndLogsFollowTheNextForward) {
  const auto events_of = [](bool late, int64_t log_freq) {
    std::vector<std::string> events;
    Started job = start({.options = {.steps = 4, .log_freq = log_freq, .read_late = late}});
    job.trainer.parts().policies.push_back({"reads", std::make_unique<NotesReads>(events)});
    job.trainer.parts().observers.push_back(std::make_unique<NotesLogs>(events));
    job.trainer.train();
    return events;
  };
  EXPECT_THAT(events_of(/*late=*/true, 1),
              ElementsAre("forward 1", "read 1", "log 1", "forward 2", "forward 3", "read 2", "log 2",
                          "forward 4", "read 3", "log 3", "read 4", "log 4"));
  EXPECT_THAT(events_of(/*late=*/true, 100),
              ElementsAre("forward 1", "read 1", "log 1", "forward 2", "forward 3", "read 2", "forward 4",
                          "read 3", "read 4"));
  EXPECT_THAT(events_of(/*late=*/false, 2),
              ElementsAre("forward 1", "read 1", "log 1", "forward 2", "read 2", "log 2", "forward 3",
                          "read 3", "forward 4", "read 4", "log 4"));
}

// How often each exchange but the model's own is made in six steps, while stragglers are looked for.
std::map<std::string, int> exchanges_of(bool late, int64_t log_freq) {
  Started job = start({.options = {.steps = 6, .log_freq = log_freq, .read_late = late}});
  auto watch = std::make_unique<StragglerWatch>(world(), /*stage=*/0, StragglerSettings{}, nullptr);
  const StragglerWatch& stragglers = *watch;
  job.trainer.parts().observers.push_back(std::move(watch));
  const uint64_t before = world().recorder().num_calls();
  job.trainer.train();
  // The first step includes set-up, so it isn't compared.
  const size_t num_compared = log_freq == 1 ? static_cast<size_t>(world().size()) : 0;
  EXPECT_EQ(stragglers.paces().size(), num_compared) << late;
  for (const RankPace& pace : stragglers.paces()) EXPECT_GT(pace.step_s, 0) << late;
  std::map<std::string, int> exchanges;
  for (const dist::CallRecord& call : world().recorder().snapshot())
    if (call.number >= before && !std::string(call.phase).starts_with("fsdp::")) ++exchanges[call.phase];
  return exchanges;
}

// Each step has one between hosts, for its tokens, whether to stop, and the ranks' own times up to the logged step before; two come before the first
// step, and one after the last, if that is logged. All others are the device's, if there is one, and a step that is logged has one more of these, or another one if the host has read its loss.
TEST(Trainer, LoggedStepsMakeNoFurtherExchangeBetweenHosts) {
  if (world().size() == 1) GTEST_SKIP() << "nothing is exchanged";
  using Counts = std::map<std::string, int>;
  constexpr int kSteps = 6, kAtStart = 2;
  for (const bool late : {false, true}) {
    Counts expected{{"train::count_valid_tokens", kSteps + kAtStart},
                    {"optim::grad_norm", kSteps},
                    {"train::check_finite", kSteps}};
    expected["train::losses"] = 1;  // the first step is always logged
    if (!late) --expected["train::check_finite"];
    EXPECT_EQ(exchanges_of(late, 100), expected) << late;
    expected["train::losses"] = kSteps;
    ++expected["train::count_valid_tokens"];
    if (!late) expected.erase("train::check_finite");
    EXPECT_EQ(exchanges_of(late, 1), expected) << late;
  }
}

// Gives all ranks `count` figures after each logged step.
struct SharesFigures : RunObserver {
  SharesFigures(size_t count, std::vector<std::string>& events) : count(count), events(events) {}
  void logged(const StepMetrics& metrics) override {
    for (size_t i = 0; i < count; ++i)
      mine.push_back(static_cast<double>(metrics.step) + 0.25 * world().rank() +
                     static_cast<double>(100 * i));
  }
  std::vector<double> figures() const override { return mine; }
  void receive_figures(const std::vector<double>& of_ranks) override {
    ASSERT_EQ(of_ranks.size(), count * static_cast<size_t>(world().size()));
    const auto step = static_cast<int64_t>(mine.front());
    for (size_t at = 0; at < of_ranks.size(); ++at)
      EXPECT_EQ(of_ranks[at], static_cast<double>(step) + 0.25 * static_cast<double>(at / count) +
                                  static_cast<double>(100 * (at % count)));
    mine.clear();
    events.push_back(str(count, " of ", step));
  }
  size_t count;
  std::vector<double> mine;
  std::vector<std::string>& events;
};

// Each observer gets its own ones, those of the last step at the end.
TEST(Trainer, FiguresOfObserversTravelWithTheNextExchange) {
  std::vector<std::string> events;
  Started job = start({.options = {.steps = 4, .log_freq = 2, .read_late = false}});
  RunObservers& observers = job.trainer.parts().observers;
  observers.push_back(std::make_unique<SharesFigures>(2, events));
  observers.push_back(std::make_unique<NotesLogs>(events));
  observers.push_back(std::make_unique<SharesFigures>(3, events));
  job.trainer.train();
  EXPECT_THAT(events, ElementsAre("forward 1", "log 1", "2 of 1", "3 of 1", "forward 2", "log 2", "2 of 2",
                                  "3 of 2", "forward 3", "forward 4", "log 4", "2 of 4", "3 of 4"));
}

// Also around a step without labels, which has nothing to read.
TEST(Trainer, LateReadsLogTheSameNumbers) {
  std::vector<std::vector<nlohmann::json>> rows;
  for (const bool late : {false, true}) {
    data::TemporaryFolder folder;
    Started job = start({.feed = std::make_shared<CountedFeed>(5, /*empty_step=*/3),
                         .options = {.steps = 5, .log_freq = 1, .read_late = late},
                         .folder = folder.path()});
    job.trainer.train();
    if (world().rank() == 0) rows.push_back(logged(folder.path()));
  }
  if (world().rank() != 0) return;
  ASSERT_EQ(rows[0].size(), 5u);
  ASSERT_EQ(rows[1].size(), 5u);
  for (size_t i = 0; i < 5; ++i) {
    for (const char* key : {"step", "lr", "n_tokens_seen"})
      EXPECT_EQ(rows[0][i].at(key), rows[1][i].at(key)) << i << " " << key;
    for (const char* key : {"loss", "max_loss", "grad_norm"}) {
      ASSERT_EQ(rows[0][i].at(key).is_number(), rows[1][i].at(key).is_number()) << i << " " << key;
      if (rows[0][i].at(key).is_number())
        EXPECT_NEAR(rows[0][i].at(key), rows[1][i].at(key), 1e-6) << i << " " << key;
    }
  }
}

TEST(Trainer, LateReadsLogTheTimeOfLoadingWithItsStep) {
  for (const bool late : {false, true}) {
    data::TemporaryFolder folder;
    Started job = start({.feed = std::make_shared<CountedFeed>(5, /*empty_step=*/-1, /*slow_step=*/3),
                         .options = {.steps = 5, .log_freq = 1, .read_late = late},
                         .folder = folder.path()});
    job.trainer.train();
    if (world().rank() != 0) continue;  // which has lane 0
    const auto rows = logged(folder.path());
    ASSERT_EQ(rows.size(), 5u);
    for (const size_t other : {1, 3})
      EXPECT_GT(rows[2].at("data_loading_s"), rows[other].at("data_loading_s")) << late;
  }
}

TEST(Trainer, StepWithoutLabelsKeepsTheWeights) {
  Started job = start({.feed = std::make_shared<CountedFeed>(1, /*empty_step=*/1), .options = {.steps = 1}});
  job.trainer.train();
  EXPECT_TRUE(job.weights_are_unchanged());
}

TEST(Trainer, StepWithoutLabelsAdvancesTheSchedule) {
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

// If the data ends early, the step reached is the last one and is saved as such.
TEST(Trainer, EndsWithItsDataAndSavesTheModel) {
  const SharedFolder folder;
  int64_t forwards = 0;
  Started job = start({.feed = std::make_shared<CountedFeed>(2),
                       .options = {.steps = 5},
                       .at_forward = [&](const at::Tensor&) { ++forwards; },
                       .checkpoints = folder.path});
  job.trainer.train();
  EXPECT_EQ(forwards, 2);
  if (world().rank() == 0) EXPECT_TRUE(folder.has("step-2/model.safetensors"));
}

// Each step has its own rate, batch and tokens, and no step is made twice.
TEST(Trainer, ResumesWhereAnotherStopped) {
  data::TemporaryFolder log;
  const SharedFolder folder;
  for (const int64_t steps : {2, 4}) {
    Started job = start({.feed = std::make_shared<CountedFeed>(4),
                         .options = {.steps = steps, .log_freq = 1},
                         .folder = log.path(),
                         .checkpoints = folder.path,
                         .saves_whole = true,
                         .schedule_steps = 4});
    job.trainer.train();
  }
  if (world().rank() != 0) return;
  optim::LrSchedule schedule({.warmup_steps = 2}, 4);
  const auto lines = logged(log.path());
  ASSERT_EQ(lines.size(), 4u);
  for (size_t i = 0; i < lines.size(); ++i) {
    const auto step = static_cast<int64_t>(i) + 1;
    EXPECT_EQ(lines[i].at("step"), step);
    EXPECT_DOUBLE_EQ(lines[i].at("lr"), 0.1 * schedule.factor(step - 1));
    EXPECT_EQ(lines[i].at("n_tokens_seen"), step * kRows * kSeqLen);
  }
}

// A state with infinite numbers is never saved, whenever the host notices them.
TEST(Trainer, SavesNothingAfterANonFiniteStep) {
  for (const bool late : {false, true}) {
    const SharedFolder folder;
    Started job = start({.fault = Fault::InfiniteLoss,
                         .options = {.steps = 3, .read_late = late},
                         .checkpoints = folder.path,
                         .saves_whole = true});
    EXPECT_TRUE(contains(message_of_training(job.trainer), "isn't finite"));
    if (world().rank() == 0) EXPECT_FALSE(folder.has("step-1"));
  }
}

// The first step may take long, as it sets things up; a rank that is late in a later one is lost.
TEST(Trainer, TrainTimeoutAppliesFromTheSecondStep) {
  const std::chrono::seconds before = world().timeout();
  std::vector<std::chrono::seconds> timeouts;
  Started job = start({.options = {.steps = 3, .train_timeout_s = 17},
                       .at_forward = [&](const at::Tensor&) { timeouts.push_back(world().timeout()); }});
  job.trainer.train();
  world().set_timeout(before);
  const std::chrono::seconds late(17);
  EXPECT_EQ(timeouts, (std::vector<std::chrono::seconds>{before, late, late}));
}

}  // namespace
}  // namespace titan::train
