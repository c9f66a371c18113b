// A signal to one rank, in every phase of a run: all ranks stop after the same step, save once and exit with
// 0. TITAN_TEST_SIGNALS sets the number per phase; 1 by default, 20 under the nightly label.

#include <signal.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <random>
#include <thread>

#include "e2e/live_run.h"
#include "e2e/resume_run.h"
#include "e2e/terminal.h"

namespace titan::testing {
namespace {

constexpr int kStopRanks = 2;
constexpr std::array kSignals = {SIGTERM, SIGUSR1, SIGINT};
constexpr double kGraceS = 30;

int num_trials() {
  const char* trials = std::getenv("TITAN_TEST_SIGNALS");
  return trials ? std::atoi(trials) : 1;
}

// Whether the process handles signals. Until it does, a signal has its default effect.
bool notes_signals(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("SigCgt:")) return std::stoull(line.substr(7), nullptr, 16) >> (SIGTERM - 1) & 1;
  return false;
}

std::vector<int> saved_steps(const fs::path& run) {
  std::vector<int> steps;
  if (!fs::exists(run / "checkpoint")) return steps;
  for (const std::string& name : names_in(run / "checkpoint"))
    if (name.starts_with("step-")) steps.push_back(std::stoi(name.substr(5)));
  std::sort(steps.begin(), steps.end());
  return steps;
}

bool has_pending_step(const fs::path& run) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(run / "checkpoint", ignored))
    if (entry.is_directory(ignored) && !entry.path().filename().string().starts_with("step-")) return true;
  return false;
}

/// Two ranks; one of them gets a signal.
class Stop : public ::testing::Test {
 protected:
  // So many steps that no run finishes before the signal.
  Words endless() const {
    return resumable(config_) + Words{"--training.steps", "100000", "--checkpoint.interval", "100000"};
  }

  void start(const Words& words) {
    fs::remove_all(run_);
    start_again(words);
  }

  void start_again(const Words& words) {
    job_.emplace(train_words(words + ranks(kStopRanks) + Words{"--job.dump_folder", run_.string()}),
                 variables_);
    ASSERT_TRUE(wait_until([&] { return ranks_of(*job_).size() == kStopRanks; }));
    ranks_ = ranks_of(*job_);
    for (const int pid : ranks_) ASSERT_TRUE(wait_until([&] { return notes_signals(pid); }));
  }

  // `meanwhile` runs once the rank has noted the signal.
  void expect_stop(int rank, int signal, const std::function<void()>& meanwhile = {}) {
    ASSERT_EQ(::kill(ranks_[static_cast<size_t>(rank)], signal), 0);
    if (meanwhile) meanwhile();
    result_ = job_->wait(kGraceS);
    EXPECT_EQ(result_.status, 0) << result_.err;
    const std::string who = "SIG" + std::string(::sigabbrev_np(signal)) + " on rank " + std::to_string(rank);
    const auto in_training = AllOf(HasSubstr(who + " stops the run"), HasSubstr("training stopped"));
    // A start that outlasts a signal's grace period is abandoned at once.
    if (at_start_)
      EXPECT_THAT(result_.err,
                  AnyOf(in_training, HasSubstr("stops the run before it began: nothing was trained")));
    else
      EXPECT_THAT(result_.err, in_training);
  }

  // Saved once, with the state after the last step that was logged.
  void expect_saved_once() {
    EXPECT_EQ(saved_steps(run_), (std::vector<int>{last_logged()})) << result_.err;
    EXPECT_FALSE(has_pending_step(run_));
  }

  int last_logged() const { return static_cast<int>(last_logged_step(run_)); }

  // `at` waits for the phase. Ranks and signals alternate.
  void try_often(const Words& words, const std::function<void()>& at, const std::function<void()>& expect) {
    for (int trial = 0; trial < num_trials() && !HasFailure(); ++trial) {
      start(words);
      if (HasFailure()) return;
      at();
      expect_stop((trial + 1) % kStopRanks, kSignals[static_cast<size_t>(trial) % kSignals.size()]);
      expect();
    }
  }

  /// An endless run with an object in its checkpoints that waits or fails as files in saves_ say.
  Words held(const Words& words) const {
    return endless() +
           Words{"--experimental.custom_import", std::string(TITAN_BINARY_DIR) + "/lib/libwaiting_state.so"} +
           words;
  }
  void set(const char* file) const { std::ofstream(saves_ / file) << "\n"; }
  void unset(const char* file) const { fs::remove(saves_ / file); }
  bool is_set(const std::string& file) const { return fs::exists(saves_ / file); }

  // Every second step is saved once, and so is the one that the run stopped after.
  void expect_every_second_saved_once() {
    std::vector<int> wanted;
    for (int step = 2; step < last_logged(); step += 2) wanted.push_back(step);
    wanted.push_back(last_logged());
    EXPECT_EQ(saved_steps(run_), wanted) << result_.err;
    EXPECT_EQ(bytes_of(saves_ / "saves"), std::string(wanted.size(), '.')) << result_.err;
    EXPECT_FALSE(has_pending_step(run_));
  }

  void expect_newest_is_last_logged() {
    const std::vector<int> saved = saved_steps(run_);
    ASSERT_FALSE(saved.empty()) << result_.err;
    EXPECT_EQ(saved.back(), last_logged()) << result_.err;
    EXPECT_FALSE(has_pending_step(run_));
  }

  double random_up_to(double seconds) { return std::uniform_real_distribution<>(0, seconds)(random_); }

  fs::path config_ = fresh_folder("config"), run_ = fresh_folder("run"), saves_ = fresh_folder("saves");
  Command::Variables variables_ = {{"OMP_NUM_THREADS", "1"}, {"TITAN_TEST_SAVES", saves_.string()}};
  std::optional<Command> job_;
  std::vector<int> ranks_;
  CommandResult result_;
  bool at_start_ = false;  // the signal may arrive during a start
  std::mt19937 random_ = random_generator();
};

TEST_F(Stop, DuringAStep) {
  try_often(
      endless(),
      [&] {
        ASSERT_TRUE(wait_until([&] { return last_logged() >= 3; }));
        sleep_s(random_up_to(0.1));
      },
      [&] { expect_saved_once(); });
}

// Over a set that takes a minute.
TEST_F(Stop, DuringAValidation) {
  try_often(
      endless() + Words{"--validation.enable", "--validation.freq", "1", "--validation.local_batch_size", "1",
                        "--validation.dataset_path", source_file("docs/*.md")},
      [&] {
        ASSERT_TRUE(wait_until([&] { return last_logged() >= 1; }));
        sleep_s(0.05 + random_up_to(0.3));
      },
      [&] {
        EXPECT_EQ(last_logged(), 1);
        EXPECT_FALSE(fs::exists(run_ / "validation.jsonl"));
        expect_saved_once();
      });
}

// The run has reached its end: its result is saved, once, and nothing else.
TEST_F(Stop, DuringTheLastValidation) {
  const Words words = endless() + Words{"--training.steps",
                                        "1",
                                        "--validation.enable",
                                        "--validation.local_batch_size",
                                        "1",
                                        "--validation.dataset_path",
                                        source_file("docs/*.md")};
  start(words);
  ASSERT_TRUE(wait_until([&] { return last_logged() >= 1; }));
  sleep_s(0.1);
  expect_stop(1, SIGTERM);
  EXPECT_FALSE(fs::exists(run_ / "validation.jsonl"));
  EXPECT_THAT(result_.err, HasSubstr("after step 1, whose state is saved"));
  expect_saved_once();
  EXPECT_TRUE(fs::exists(step_folder(run_, 1) / "model.safetensors"));
  EXPECT_THAT(train_log(run_, words + ranks(kStopRanks)), HasSubstr("this run is complete"));
}

// To the rank that waits for data, and to the one that waits for that rank.
TEST_F(Stop, WhileWaitingForData) {
  const fs::path stalled = config_ / "stalled";
  const Words words =
      endless() +
      Words{"--training.dataset",           "stalling",
            "--training.dataset_path",      "0 40 " + stalled.string(),
            "--experimental.custom_import", std::string(TITAN_BINARY_DIR) + "/lib/libstalling_source.so"};
  try_often(
      words,
      [&] {
        ASSERT_TRUE(wait_until([&] { return fs::exists(stalled); }));
        int before = 0;
        // The data read ahead is used up.
        do {
          before = last_logged();
          sleep_s(0.5);
        } while (before != last_logged());
        fs::remove(stalled);
      },
      [&] { expect_saved_once(); });
}

// During the save in progress or the one after it: on the training thread, or in the background.
TEST_F(Stop, WhileSavingACheckpoint) {
  const char* holds[] = {"hold_saving", "hold_writing"};
  const char* waits[] = {"saving.0", "writing.0"};
  const auto trials = static_cast<size_t>(std::max(num_trials(), 3));
  for (size_t trial = 0; trial < trials && !HasFailure(); ++trial) {
    const size_t beside = trial % 2;
    for (const char* left : {"saves", waits[beside]}) unset(left);
    start(held({"--checkpoint.interval", "2", "--checkpoint.keep_latest_k", "0", "--checkpoint.async_mode",
                beside ? "async_with_pinned_mem" : "disabled"}));
    // Not before: a job on GPUs asks for the state at its start, too, to reserve memory.
    ASSERT_TRUE(wait_until([&] { return last_logged() >= 1; }));
    set(holds[beside]);
    ASSERT_TRUE(wait_until([&] { return is_set(waits[beside]); }));
    expect_stop(static_cast<int>(trial + trial / 6) % kStopRanks, kSignals[trial % kSignals.size()], [&] {
      sleep_s(0.3);
      unset(holds[beside]);
    });
    expect_every_second_saved_once();
  }
}

// All saves are skipped while the first one is held, so the step that the run stops after isn't saved yet.
TEST_F(Stop, AfterASkippedSave) {
  set("hold_writing");
  start(held({"--checkpoint.interval", "1", "--checkpoint.when_busy", "skip", "--checkpoint.async_mode",
              "async_with_pinned_mem"}));
  ASSERT_TRUE(wait_until([&] { return last_logged() >= 4; }));
  expect_stop(0, SIGTERM, [&] {
    // Until all have agreed on a step to stop after, and train no more.
    for (int64_t before = -1; before != last_logged(); sleep_s(0.5)) before = last_logged();
    unset("hold_writing");
  });
  EXPECT_THAT(result_.err,
              AllOf(HasSubstr("skipped, as the save of step 1"), HasSubstr("its state is being saved")));
  expect_newest_is_last_logged();
}

// Every other save fails; the stop's own then succeeds.
TEST_F(Stop, AfterAFailedSave) {
  set("fail_every_other");
  for (const int at_least : {3, 4}) {
    start(held({"--checkpoint.interval", "1", "--checkpoint.on_failure", "continue"}));
    ASSERT_TRUE(wait_until([&] { return last_logged() >= at_least; }));
    expect_stop(0, SIGTERM);
    EXPECT_THAT(result_.err, HasSubstr("the test wants this save to fail"));
    expect_newest_is_last_logged();
  }
}

// The log doesn't claim that it is saved, and the job ends with an error.
TEST_F(Stop, IsAnErrorIfItsOwnSaveFails) {
  set("fail_saves");
  start(held({"--checkpoint.on_failure", "continue"}));
  ASSERT_TRUE(wait_until([&] { return last_logged() >= 2; }));
  ASSERT_EQ(::kill(ranks_[0], SIGTERM), 0);
  result_ = job_->wait(kGraceS);
  EXPECT_EQ(result_.status, 1);
  EXPECT_THAT(result_.err, AllOf(HasSubstr("its state is being saved"),
                                 HasSubstr("the test wants this save to fail"), Not(HasSubstr("is saved"))));
  EXPECT_TRUE(saved_steps(run_).empty());
}

// The launcher sends it to all ranks, twice as a closing terminal does. Over a tensor-parallel pair.
TEST_F(Stop, ThroughTheLauncher) {
  start(endless() + Words{"--parallelism.tensor_parallel_degree", "2"});
  ASSERT_TRUE(wait_until([&] { return last_logged() >= 3; }));
  job_->signal(SIGTERM);
  job_->signal(SIGINT);
  result_ = job_->wait(kGraceS);
  EXPECT_EQ(result_.status, 0) << result_.err;
  expect_saved_once();
}

// Anywhere from the rendezvous to the first steps.
TEST_F(Stop, DuringTheStart) {
  at_start_ = true;
  try_often(
      endless(), [&] { sleep_s(random_up_to(0.6)); },
      [&] {
        if (last_logged() > 0) return expect_saved_once();
        EXPECT_TRUE(saved_steps(run_).empty());
        EXPECT_THAT(result_.err, HasSubstr("nothing was trained"));
      });
}

// Longer than a signal's grace period: no rank waits for what is being built.
TEST_F(Stop, DuringALongStart) {
  set("hold_building");
  start(held({}));
  ASSERT_TRUE(wait_until([&] { return is_set("building.0") && is_set("building.1"); }));
  ASSERT_EQ(::kill(ranks_[1], SIGTERM), 0);
  result_ = job_->wait(kGraceS);
  EXPECT_EQ(result_.status, 0) << result_.err;
  EXPECT_THAT(result_.err, HasSubstr("stops the run before it began: nothing was trained"));
  EXPECT_TRUE(saved_steps(run_).empty());
}

// The loaded state isn't saved again.
TEST_F(Stop, WhileLoadingACheckpoint) {
  const Words words = held({});
  start(words);
  ASSERT_TRUE(wait_until([&] { return last_logged() >= 3; }));
  expect_stop(0, SIGTERM);
  expect_saved_once();
  const int step = last_logged();
  set("hold_loading");
  at_start_ = true;
  start_again(words);
  ASSERT_TRUE(wait_until([&] { return is_set("loading.0") && is_set("loading.1"); }));
  expect_stop(1, SIGINT, [&] {
    sleep_s(0.3);
    unset("hold_loading");
  });
  EXPECT_THAT(result_.err, HasSubstr("nothing was trained"));
  EXPECT_EQ(last_logged(), step);
  EXPECT_EQ(saved_steps(run_), (std::vector<int>{step}));
}

TEST_F(Stop, ResumesAsIfItHadNotBeenStopped) {
  const Words words = resumable(config_) + Words{"--training.steps", "40"};
  const fs::path straight = fresh_folder("straight");
  train_log(straight, words + ranks(kStopRanks));
  start(words);
  ASSERT_TRUE(wait_until([&] { return last_logged() >= 6; }));
  expect_stop(1, SIGTERM);
  const int stopped_at = last_logged();
  EXPECT_LT(stopped_at, 40) << "the run ended before the signal came";
  train_log(run_, words + ranks(kStopRanks));
  EXPECT_EQ(curve_of(run_), curve_of(straight));
}

// A rank whose peer hangs can't stop with it; a second signal ends it wherever it waits.
TEST_F(Stop, SecondSignalEndsARankAtOnce) {
  for (int trial = 0; trial < num_trials() && !HasFailure(); ++trial) {
    start(endless());
    ASSERT_TRUE(wait_until([&] { return last_logged() >= 2; }));
    ASSERT_EQ(::kill(ranks_[0], SIGSTOP), 0);
    const int signal = kSignals[static_cast<size_t>(trial) % kSignals.size()];
    ASSERT_EQ(::kill(ranks_[1], signal), 0);
    sleep_s(0.5);
    EXPECT_EQ(ranks_of(*job_).size(), 2u) << "the first signal ended the rank";
    ASSERT_EQ(::kill(ranks_[1], signal), 0);
    EXPECT_TRUE(wait_until([&] { return ranks_of(*job_).size() < 2; }, 10));
    result_ = job_->wait(kGraceS);
    EXPECT_EQ(result_.status, 128 + signal) << result_.err;
  }
}

// Its peers wait for a rank that somebody stopped: to save, it has to be continued.
TEST_F(Stop, LauncherContinuesAStoppedRank) {
  start(endless());
  ASSERT_TRUE(wait_until([&] { return last_logged() >= 2; }));
  ASSERT_EQ(::kill(ranks_[1], SIGSTOP), 0);
  job_->signal(SIGTERM);
  result_ = job_->wait(kGraceS);
  EXPECT_EQ(result_.status, 0) << result_.err;
  EXPECT_THAT(result_.err, HasSubstr("rank 1 (pid " + std::to_string(ranks_[1]) +
                                     ") was stopped by a signal; continuing it"));
  expect_saved_once();
}

char state_of(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');
  return name_end == std::string::npos ? '-' : line.at(name_end + 2);
}

// In a shell with job control: the pause is longer than every time limit of the run.
TEST_F(Stop, CtrlZPausesTheWholeJob) {
  TerminalCommand shell(
      Words{"env", "PS1=ready ", "OMP_NUM_THREADS=1", "bash", "--norc", "--noprofile", "--noediting", "-i"},
      50, 500);
  const auto shows = [&](const char* text) {
    return wait_until(
        [&] { return shell.bytes().find(text) != std::string::npos || (shell.screen(), false); });
  };
  ASSERT_TRUE(shows("ready "));
  const int steps = tests_on_gpu() ? 60 : 400;
  std::string line;
  for (const std::string& word :
       train_words(small_run(config_) + ranks(kStopRanks) +
                   Words{str("--training.steps=", steps), "--comm.train_timeout_seconds=2",
                         "--job.dump_folder", run_.string()}))
    line += "'" + word + "' ";
  shell.type(line + "\n");
  ASSERT_TRUE(wait_until([&] { return last_logged() >= 5; })) << shell.screen().text();
  const std::vector<int> shells_children = children_of(shell.pid());
  ASSERT_EQ(shells_children.size(), 1u);
  std::vector<int> all = children_of(shells_children[0]);
  ASSERT_EQ(all.size(), static_cast<size_t>(kStopRanks));
  all.push_back(shells_children[0]);
  const auto all_are = [&](bool stopped) {
    return wait_until(
        [&] { return std::ranges::all_of(all, [&](int pid) { return (state_of(pid) == 'T') == stopped; }); },
        10);
  };
  for (int i = 0; i < 2; ++i) {
    shell.type("\x1a");
    ASSERT_TRUE(all_are(true)) << shell.screen().text();
    sleep_s(3.5);
    shell.type("fg\n");
    ASSERT_TRUE(all_are(false)) << shell.screen().text();
  }
  shell.type("echo code $?\n");
  ASSERT_TRUE(shows("code 0")) << shell.screen().text();
  EXPECT_EQ(last_logged(), steps);
  EXPECT_THAT(shell.bytes(), Not(HasSubstr("hangs")));
}

TEST_F(Stop, WithoutALauncherAndWithoutCheckpoints) {
  const Words words = small_run(config_) + Words{"--training.steps", "100000"};
  Command job(train_words(words + Words{"--job.dump_folder", run_.string()}), {{"OMP_NUM_THREADS", "1"}});
  ASSERT_TRUE(wait_until([&] { return last_logged() >= 2; }));
  job.signal(SIGINT);
  const CommandResult result = job.wait(kGraceS);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("SIGINT on rank 0 stops the run"), HasSubstr("nothing is saved")));
}

struct Requeued {
  const char* name;
  int signal;
  int code;  // exit code of scontrol
  Command::Variables slurm;
  std::string request;  // expected arguments of scontrol
  int status;
};

void PrintTo(const Requeued& requeued, std::ostream* out) { *out << requeued.name; }

class Requeue : public ::testing::TestWithParam<Requeued> {};

TEST_P(Requeue, FollowsTheSave) {
  const Requeued& how = GetParam();
  const fs::path bin = fresh_folder("bin"), run = fresh_folder("run");
  const fs::path requests = fake_scontrol(bin, how.code);
  Command::Variables variables = how.slurm;
  variables["OMP_NUM_THREADS"] = "1";
  variables["PATH"] = bin.string() + ":" + std::getenv("PATH");
  Command job(train_words(resumable(fresh_folder("config")) + Words{"--training.steps", "100000",
                                                                    "--fault_tolerance.requeue_on", "SIGUSR1",
                                                                    "--job.dump_folder", run.string()}),
              variables);
  ASSERT_TRUE(wait_until([&] { return last_logged_step(run) >= 2; }));
  job.signal(how.signal);
  const CommandResult result = job.wait(kGraceS);
  EXPECT_EQ(result.status, how.status) << result.err;
  EXPECT_FALSE(saved_steps(run).empty());
  std::ifstream file(requests);
  std::string line;
  std::getline(file, line);
  EXPECT_EQ(line, how.request);
}

// The signal goes to a rank that doesn't run scontrol; the rank that does must learn of it.
class RequeueAtTheStart : public Stop {
 protected:
  void start_and_stop(int code_of_scontrol, int signal) {
    const fs::path bin = fresh_folder("bin");
    requests_file_ = fake_scontrol(bin, code_of_scontrol);
    variables_["PATH"] = bin.string() + ":" + std::getenv("PATH");
    variables_["SLURM_JOB_ID"] = "123";
    set("hold_building");
    start(held({"--fault_tolerance.requeue_on", "SIGUSR1", "--log-rank", "all"}));
    ASSERT_TRUE(wait_until([&] { return is_set("building.0") && is_set("building.1"); }));
    ASSERT_EQ(::kill(ranks_[1], signal), 0);
    result_ = job_->wait(kGraceS);
    EXPECT_THAT(result_.err, HasSubstr("stops the run before it began"));
  }
  std::string requests() const {
    std::string all;
    std::ifstream file(requests_file_);
    for (std::string line; std::getline(file, line);) all += line + ";";
    return all;
  }

 private:
  fs::path requests_file_;
};

TEST_F(RequeueAtTheStart, FollowsALongStart) {
  ASSERT_NO_FATAL_FAILURE(start_and_stop(0, SIGUSR1));
  EXPECT_EQ(result_.status, 0) << result_.err;
  EXPECT_EQ(requests(), "requeue 123;");
}

TEST_F(RequeueAtTheStart, DoesNotFollowOtherSignals) {
  ASSERT_NO_FATAL_FAILURE(start_and_stop(0, SIGTERM));
  EXPECT_EQ(result_.status, 0) << result_.err;
  EXPECT_EQ(requests(), "");
}

TEST_F(RequeueAtTheStart, IsAnErrorIfItFails) {
  ASSERT_NO_FATAL_FAILURE(start_and_stop(1, SIGUSR1));
  EXPECT_EQ(result_.status, 1) << result_.err;
  EXPECT_THAT(result_.err, HasSubstr("scontrol requeue 123 failed"));
}

// The signal comes while no rank runs that could requeue: the launcher does it.
TEST_F(Stop, LauncherRequeuesBetweenTwoStarts) {
  const fs::path bin = fresh_folder("bin"), requests = fake_scontrol(bin, 0);
  variables_["PATH"] = bin.string() + ":" + std::getenv("PATH");
  variables_["SLURM_JOB_ID"] = "123";
  start(endless() + Words{"--fault_tolerance.requeue_on", "SIGUSR1", "--max-restarts", "1", "--min-ranks",
                          "1", "--rejoin-after", "never"});
  ASSERT_TRUE(kill_all_ranks(*job_));
  sleep_s(0.3);  // until it waits for a rank
  job_->signal(SIGUSR1);
  result_ = job_->wait(kGraceS);
  EXPECT_EQ(result_.status, 128 + SIGUSR1) << result_.err;
  EXPECT_EQ(bytes_of(requests), "requeue 123\n");
}

INSTANTIATE_TEST_SUITE_P(
    Stop, Requeue,
    ::testing::Values(
        Requeued{"Job", SIGUSR1, 0, {{"SLURM_JOB_ID", "123"}}, "requeue 123", 0},
        Requeued{"TaskOfAnArray",
                 SIGUSR1,
                 0,
                 {{"SLURM_JOB_ID", "123"}, {"SLURM_ARRAY_JOB_ID", "120"}, {"SLURM_ARRAY_TASK_ID", "3"}},
                 "requeue 120_3",
                 0},
        Requeued{"OtherSignal", SIGTERM, 0, {{"SLURM_JOB_ID", "123"}}, "", 0},
        Requeued{"ThatFails", SIGUSR1, 1, {{"SLURM_JOB_ID", "123"}}, "requeue 123", 1}),
    [](const auto& info) { return info.param.name; });

TEST(RequeueSettings, NeedASlurmJob) {
  const CommandResult result =
      run(train_words(resumable(fresh_folder("config")) + Words{"--fault_tolerance.requeue_on", "SIGUSR1"}),
          {{"SLURM_JOB_ID", ""}});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("SLURM_JOB_ID isn't set"));
}

}  // namespace
}  // namespace titan::testing
