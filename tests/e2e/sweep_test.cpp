// titan sweep: runs that differ in some settings.

#include <csignal>
#include <fstream>
#include <sstream>
#include <thread>

#include "e2e/small_run.h"

namespace titan::testing {
namespace {

struct SweepCase {
  fs::path folder;
  fs::path file = folder / "sweep.toml";
  fs::path runs = folder / "runs";

  /// `more`: the tables of runs.
  explicit SweepCase(const std::string& more) : folder(fresh_folder("sweep")) {
    small_run(folder);
    std::ofstream(file) << "base = \"config.toml\"\nfolder = \"" << runs.string()
                        << "\"\n[set]\ntraining.dataset_path = \"" << source_file("docs/*.md")
                        << "\"\nvalidation.enable = false\ntraining.device = \"cpu\"\n"
                        << more;
  }
  Words words(const Words& more = {}) const { return Words{titan_program(), "sweep", file.string()} + more; }
  CommandResult run(const Words& more = {}, const Command::Variables& variables = {}) const {
    Command::Variables all = {{"OMP_NUM_THREADS", "1"}, {"SLURM_ARRAY_TASK_ID", ""}};
    for (const auto& [name, value] : variables) all[name] = value;
    return titan::testing::run(words(more), all, 100);
  }
};

constexpr const char* kGrid = "[grid]\noptimizer.lr = [1e-3, 2e-3]\ntraining.seq_len = [16, 32]\n";

TEST(Sweep, RunsAGridOnceAndThenSkipsIt) {
  const SweepCase sweep(kGrid);
  const CommandResult result = sweep.run();
  ASSERT_EQ(result.status, 0) << result.err;
  for (const char* name :
       {"lr=0.001,seq_len=16", "lr=0.001,seq_len=32", "lr=0.002,seq_len=16", "lr=0.002,seq_len=32"}) {
    EXPECT_EQ(read_metrics(sweep.runs / name).size(), 4u) << name;
    EXPECT_THAT(result.out, HasSubstr(name));
  }
  EXPECT_THAT(result.out, ContainsRegex("[^t] finished"));
  EXPECT_THAT(result.out, AllOf(HasSubstr("settings that differ"),
                                ContainsRegex("\n +ranks +1 +1 +1 +1")));  // printed by titan compare
  EXPECT_NE(read_metrics(sweep.runs / "lr=0.001,seq_len=16").back().loss,
            read_metrics(sweep.runs / "lr=0.002,seq_len=16").back().loss);

  const auto written = fs::last_write_time(sweep.runs / "lr=0.001,seq_len=16" / "metrics.jsonl");
  const CommandResult again = sweep.run();
  EXPECT_EQ(again.status, 0) << again.err;
  EXPECT_THAT(again.err, HasSubstr("run 3 of 4 (lr=0.002,seq_len=32) is finished already"));
  EXPECT_EQ(fs::last_write_time(sweep.runs / "lr=0.001,seq_len=16" / "metrics.jsonl"), written);
}

TEST(Sweep, ResumesAKilledRunAndKeepsFinishedOnes) {
  const SweepCase sweep(
      "checkpoint.enable = true\ncheckpoint.interval = 5\n[run.short]\ntraining.steps = "
      "3\n[run.long]\ntraining.steps = 200\n");
  const fs::path second = sweep.runs / "long";
  {
    Command killed(sweep.words(), {{"OMP_NUM_THREADS", "1"}, {"SLURM_ARRAY_TASK_ID", ""}});
    wait_until([&] { return fs::exists(second / "checkpoint" / "step-10"); });
    killed.signal(SIGKILL);
    killed.wait();
  }
  ASSERT_TRUE(fs::exists(second / "checkpoint" / "step-10"));
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const auto steps_then = whole_rows(second).size();
  ASSERT_LT(steps_then, 200u);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_EQ(whole_rows(second).size(), steps_then);  // the run died with the sweep

  const CommandResult result = sweep.run();
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("run 0 of 2 (short) is finished already"));
  EXPECT_THAT(result.err, HasSubstr("run 1 of 2 (long) starts again"));
  EXPECT_THAT(result.err, HasSubstr("training continues"));
  EXPECT_EQ(read_metrics(second).size(), 200u);
}

TEST(Sweep, ChecksAllRunsBeforeStartingTheFirst) {
  const SweepCase sweep(
      "[run.good]\noptimizer.lr = 1e-3\n[run.bad]\noptimizer.lrr = 1e-3\n[run.worse]\ntraining.steps = 0\n");
  const CommandResult result = sweep.run();
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err,
              HasSubstr("bad: --optimizer.lrr = 0.001: unknown key; did you mean 'optimizer.lr'?"));
  EXPECT_THAT(result.err, HasSubstr("worse: --training.steps = 0: must be at least 1"));
  EXPECT_FALSE(fs::exists(sweep.runs));
}

TEST(Sweep, LeavesAFolderWithAnotherRunAlone) {
  const SweepCase sweep("[run.one]\noptimizer.lr = 1e-3\n");
  ASSERT_EQ(sweep.run().status, 0);
  std::ofstream(sweep.file, std::ios::app) << "training.seq_len = 24\n";
  const CommandResult result = sweep.run();
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("holds a run with other settings (training.seq_len: 48 | 24)"));
}

// Another user's run, which belongs to no sweep.
TEST(Sweep, LeavesARunOfNoSweepAlone) {
  const SweepCase sweep("[run.one]\noptimizer.lr = 1e-3\n");
  train(sweep.runs / "one", small_run(sweep.folder));
  const auto rows = read_metrics(sweep.runs / "one").size();
  const CommandResult result = sweep.run();
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("holds a run with other settings (optimizer.lr: "));
  EXPECT_EQ(read_metrics(sweep.runs / "one").size(), rows);
}

TEST(Sweep, SlurmArrayTaskRunsItsRun) {
  const SweepCase sweep(kGrid);
  const CommandResult result = sweep.run({}, {{"SLURM_ARRAY_TASK_ID", "2"}});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_TRUE(fs::exists(sweep.runs / "lr=0.002,seq_len=16"));
  EXPECT_FALSE(fs::exists(sweep.runs / "lr=0.001,seq_len=16"));
  const CommandResult list = sweep.run({"--list"});
  EXPECT_EQ(list.status, 0) << list.err;
  EXPECT_THAT(list.out, HasSubstr("not started"));
  EXPECT_THAT(list.out, ContainsRegex("[^t] finished"));
  const CommandResult beyond = sweep.run({}, {{"SLURM_ARRAY_TASK_ID", "4"}});
  EXPECT_EQ(beyond.status, 2);
  EXPECT_THAT(beyond.err, HasSubstr("sbatch --array=0-3"));
}

TEST(Sweep, RetriesAFailedRunAndFinishesTheOthers) {
  const SweepCase sweep("[run.first]\noptimizer.lr = 1e-3\n[run.second]\noptimizer.lr = 2e-3\n");
  fs::create_directories(sweep.runs / "first" / "metrics.jsonl");  // in place of the log
  const CommandResult result = sweep.run();
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, HasSubstr("run 0 of 2 (first) ended with exit code 1"));
  EXPECT_EQ(read_metrics(sweep.runs / "second").size(), 4u);
  fs::remove(sweep.runs / "first" / "metrics.jsonl");
  EXPECT_EQ(sweep.run().status, 0);
  EXPECT_EQ(read_metrics(sweep.runs / "first").size(), 4u);
}

int64_t num_rows(const fs::path& run) { return static_cast<int64_t>(whole_rows(run).size()); }

// Also SLURM's --signal=USR1@300: the run saves its state.
TEST(Sweep, SignalEndsTheRunAndTheSweep) {
  for (const int signal : {SIGTERM, SIGUSR1}) {
    const SweepCase sweep(
        "checkpoint.enable = true\ncheckpoint.interval = 100000\n[run.one]\ntraining.steps = 100000\n"
        "[run.two]\ntraining.steps = 4\n");
    Command command(sweep.words(), {{"OMP_NUM_THREADS", "1"}, {"SLURM_ARRAY_TASK_ID", ""}});
    ASSERT_TRUE(wait_until([&] { return num_rows(sweep.runs / "one") > 0; }));
    command.signal(signal);
    const CommandResult result = command.wait();
    EXPECT_EQ(result.status, 128 + signal) << result.err;
    EXPECT_THAT(result.err, ContainsRegex("the state after step [0-9]+ is saved"));
    EXPECT_FALSE(fs::exists(sweep.runs / "two"));
    const CommandResult list = sweep.run({"--list"});
    EXPECT_THAT(list.out, HasSubstr("not finished"));
    EXPECT_THAT(list.out, Not(ContainsRegex("[^t] finished")));
  }
}

// All steps are made and the model is saved: the same run again would have nothing to do.
TEST(Sweep, ARunStoppedDuringItsLastValidationIsFinished) {
  const SweepCase sweep(
      "checkpoint.enable = true\nlr_scheduler.total_steps = 20\n[run.one]\ntraining.steps = "
      "1\nvalidation.enable = true\n"
      "validation.local_batch_size = 1\nvalidation.dataset_path = \"" +
      source_file("docs/*.md") + "\"\n");
  const fs::path run = sweep.runs / "one";
  Command command(sweep.words(), {{"OMP_NUM_THREADS", "1"}, {"SLURM_ARRAY_TASK_ID", ""}});
  ASSERT_TRUE(wait_until([&] { return num_rows(run) > 0; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  command.signal(SIGTERM);
  const CommandResult result = command.wait();
  EXPECT_EQ(result.status, 128 + SIGTERM) << result.err;
  EXPECT_THAT(result.err, HasSubstr("SIGTERM on rank 0 stops the run after step 1"));
  EXPECT_FALSE(fs::exists(run / "validation.jsonl")) << "the validation was finished";
  EXPECT_THAT(sweep.run({"--list"}).out, ContainsRegex("[^t] finished"));
  const CommandResult again = sweep.run();
  EXPECT_EQ(again.status, 0) << again.err;
  EXPECT_THAT(again.err, HasSubstr("run 0 of 1 (one) is finished already"));
}

// Under nohup, after its user has logged out.
TEST(Sweep, IgnoredSignalEndsNothing) {
  const SweepCase sweep("[run.one]\ntraining.steps = 100000\n");
  const fs::path run = sweep.runs / "one";
  Command command(Words{"env", "--ignore-signal=HUP"} + sweep.words(),
                  {{"OMP_NUM_THREADS", "1"}, {"SLURM_ARRAY_TASK_ID", ""}});
  ASSERT_TRUE(wait_until([&] { return num_rows(run) > 0; }));
  command.signal(SIGHUP);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const int64_t rows = num_rows(run);
  EXPECT_TRUE(wait_until([&] { return num_rows(run) > rows; })) << "the run continues";
  command.signal(SIGTERM);
  EXPECT_EQ(command.wait().status, 128 + SIGTERM);
}

// To see where a run is. Its launcher forwards it to the ranks.
TEST(Sweep, ForwardsSigquitAndEndsNothing) {
  const SweepCase sweep("[run.one]\ntraining.steps = 100000\n");
  std::stringstream text;
  text << "nproc = 2\n" << std::ifstream(sweep.file).rdbuf();
  std::ofstream(sweep.file) << text.str();
  const fs::path run = sweep.runs / "one";
  Command command(sweep.words(), {{"OMP_NUM_THREADS", "1"}, {"SLURM_ARRAY_TASK_ID", ""}});
  ASSERT_TRUE(wait_until([&] { return num_rows(run) > 0; }));
  command.signal(SIGQUIT);
  for (const char* record : {"rank_0.json", "rank_1.json"})
    ASSERT_TRUE(wait_until([&] { return fs::exists(run / "comm_traces" / record); })) << record;
  const int64_t rows = num_rows(run);
  EXPECT_TRUE(wait_until([&] { return num_rows(run) > rows; })) << "the run continues";
  command.signal(SIGTERM);
  EXPECT_EQ(command.wait().status, 128 + SIGTERM);
}

// A signal to the run itself, as from a node's agent: it ends cleanly and is resumed later.
TEST(Sweep, AStoppedRunIsNotFinished) {
  const SweepCase sweep("[run.one]\ntraining.steps = 100000\n");
  Command command(sweep.words(), {{"OMP_NUM_THREADS", "1"}, {"SLURM_ARRAY_TASK_ID", ""}});
  const fs::path logs = sweep.runs / "one" / "structured_logs";
  ASSERT_TRUE(wait_until([&] { return num_rows(sweep.runs / "one") > 0 && fs::exists(logs); }));
  int pid = 0;
  ASSERT_TRUE(wait_until([&] {
    for (const auto& entry : fs::directory_iterator(logs)) {
      std::string line;
      std::ifstream log(entry.path());
      if (std::getline(log, line) && !log.eof()) pid = nlohmann::json::parse(line).at("pid").get<int>();
    }
    return pid > 0;
  }));
  kill(pid, SIGTERM);
  const CommandResult result = command.wait();
  EXPECT_EQ(result.status, 1) << result.err;
  EXPECT_THAT(result.err, HasSubstr("was stopped before its end"));
  EXPECT_THAT(result.out, HasSubstr("not finished"));
}

}  // namespace
}  // namespace titan::testing
