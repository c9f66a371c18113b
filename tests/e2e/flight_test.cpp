// A rank is lost, a job hangs or crashes: one line names the rank, and the ranks' calls can be read
// afterwards.

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <future>
#include <sstream>
#include <thread>

#include "e2e/live_run.h"
#include "e2e/resume_run.h"

namespace titan::testing {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_after(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// A run of three ranks, one of which makes an extra call in its seventh step.
class OddRank : public ::testing::Test {
 protected:
  CommandResult run_odd(const Words& words) const {
    const Words all = train_words(resumable(fresh_folder("config")) +
                                  Words{"--experimental.custom_import",
                                        std::string(TITAN_BINARY_DIR) + "/lib/libodd_rank.so",
                                        "--job.dump_folder", folder_.string(), "--log-rank", "all"} +
                                  words + ranks(3));
    return run(all, {{"OMP_NUM_THREADS", "1"}, {"TITAN_TEST_ODD_RANK", "1"}}, 100);
  }
  fs::path folder_ = fresh_folder("run");
};

TEST_F(OddRank, IsNamedByTheCallCheckBeforeTheCall) {
  const CommandResult result = run_odd({"--debug.check_collectives", "--comm.train_timeout_seconds", "300"});
  EXPECT_EQ(result.status, 1) << result.err;
  EXPECT_THAT(result.err,
              ContainsRegex("the job fails: .*the ranks of the group don't make the same call: ranks "
                            "0, 2 call [a-z_]+ #[0-9]+[^\n]*; rank 1 calls broadcast #[0-9]+ from its "
                            "rank 0 of Float \\[7\\] in odd::one of more"));
  EXPECT_LT(result.elapsed_s, 100) << "it waits for no time limit";
}

TEST_F(OddRank, IsNamedByFlightRecordsWithoutTheCheck) {
  const CommandResult result = run_odd({"--comm.train_timeout_seconds", "5"});
  EXPECT_NE(result.status, 0);
  const CommandResult report = run({titan_program(), "debug", "flight", folder_.string()});
  EXPECT_EQ(report.status, 0) << report.err << result.err;
  EXPECT_THAT(report.out, AllOf(HasSubstr("the ranks fell out of step, in the operation of a call"),
                                HasSubstr("rank 1 calls broadcast #"), HasSubstr("(odd::one more)")));
}

/// A run of three ranks that continues until it is stopped; it is in its steps by now.
class Flight : public ::testing::Test {
 protected:
  Words words() const {
    return train_words({source_file("docs/examples/custom_model/ngram.toml"), "--experimental.custom_import",
                        std::string(TITAN_BINARY_DIR) + "/lib/libngram.so", "--training.steps", "1000000",
                        "--training.seq_len", "16", "--job.dump_folder", folder_.string()});
  }
  Command start(const Words& more = {}) {
    Command job(words() + Words{"--nproc", "3", "--log-rank", "all"} + more, {{"OMP_NUM_THREADS", "1"}});
    wait_for_steps();
    return job;
  }
  // Each rank by itself, as on hosts of their own: no launcher ends the others when one is lost.
  std::vector<Command> start_apart(const Words& more = {}) {
    const std::string port = some_port();
    std::vector<Command> ranks;
    for (const char* rank : {"0", "1", "2"})
      ranks.emplace_back(words() + more, Command::Variables{{"OMP_NUM_THREADS", "1"},
                                                            {"RANK", rank},
                                                            {"WORLD_SIZE", "3"},
                                                            {"MASTER_ADDR", "127.0.0.1"},
                                                            {"MASTER_PORT", port}});
    wait_for_steps();
    return ranks;
  }
  // Kills rank 1; the others end by themselves.
  static void expect_to_name_a_killed_rank(std::vector<Command>& ranks) {
    const MachineLag lag;
    const auto killed = Clock::now();
    const int pid = ranks[1].pid();
    ranks[1].signal(SIGKILL);
    std::vector<std::future<CommandResult>> ends;
    for (Command& rank : ranks)
      ends.push_back(std::async(std::launch::async, [&rank] { return rank.wait(60); }));
    for (const size_t rank : {0, 2}) {
      const CommandResult result = ends[rank].get();
      EXPECT_LT(seconds_after(killed), 10 + lag.seconds()) << rank;
      EXPECT_EQ(result.status, 1) << rank << "\n" << result.err;
      EXPECT_THAT(result.err, ContainsRegex(str("the job fails: lost: rank 1 \\(host [^ ]+, pid ", pid,
                                                "\\), last heard from at ")));
    }
  }
  void wait_for_steps() const {
    for (int i = 0; i < 1200 && read_logged() == 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_GT(read_logged(), 0U) << "no step within a minute";
    // Past the first heartbeats.
    std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  }
  size_t read_logged() const {
    return fs::exists(folder_ / "metrics.jsonl") ? text_of(folder_ / "metrics.jsonl").size() : 0;
  }
  int64_t num_logged() const {
    return read_logged() == 0 ? 0 : std::ranges::count(text_of(folder_ / "metrics.jsonl"), '\n');
  }
  fs::path record(int rank) const {
    return folder_ / "comm_traces" / ("rank_" + std::to_string(rank) + ".json");
  }
  // On a busy machine other programs may hold a rank's disk and processors for long.
  bool comes(const fs::path& path, double limit_s = 60) const {
    const auto start = Clock::now();
    while (!fs::exists(path) && seconds_after(start) < limit_s)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return fs::exists(path);
  }
  void expect_to_continue() const {
    const size_t logged = read_logged();
    for (int i = 0; i < 1200 && read_logged() == logged; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_GT(read_logged(), logged) << "the job continues";
  }
  CommandResult flight() const { return run({titan_program(), "debug", "flight", folder_.string()}); }
  CommandResult ask_for_records() const {
    return run({titan_program(), "debug", "dump", folder_.string(), "--seconds", "60"}, {}, 100);
  }

  fs::path folder_ = fresh_folder("run");
};

TEST_F(Flight, NamesAKilledRankWithItsHostAndLastCall) {
  Command job = start();
  const auto ranks = children_of(job.pid());
  ASSERT_EQ(ranks.size(), 3U);
  const auto killed = Clock::now();
  ASSERT_EQ(::kill(ranks[1], SIGKILL), 0);
  const CommandResult result = job.wait(30);
  EXPECT_LT(seconds_after(killed), 10);
  EXPECT_EQ(result.status, 128 + SIGKILL);
  const std::string line =
      str("the job fails: lost: ([^;]*; )*rank 1 \\(host [^ ]+, pid ", ranks[1],
          "\\), last heard from at [0-9:.]+ in [a-z_]+ of step [0-9]+, its last call being "
          "[a-z_]+ #[0-9]+ of group '[a-z_.]+' \\([^)]*\\), [a-z]+; first to notice was rank [02]: ");
  EXPECT_THAT(result.err, ContainsRegex(line));
  EXPECT_FALSE(fs::exists(record(1)));
  ASSERT_TRUE(fs::exists(record(0)) && fs::exists(record(2)));
  const CommandResult report = flight();
  EXPECT_EQ(report.status, 0) << report.err;
  EXPECT_THAT(report.out, AllOf(HasSubstr("rank 1 is missing from "), HasSubstr("left no record: killed"),
                                HasSubstr("no record")));
}

// The store ends with it, but the others know its last report.
TEST_F(Flight, NamesAKilledRankZero) {
  Command job = start();
  const auto ranks = children_of(job.pid());
  ASSERT_EQ(ranks.size(), 3U);
  const auto killed = Clock::now();
  ASSERT_EQ(::kill(ranks[0], SIGKILL), 0);
  const CommandResult result = job.wait(30);
  EXPECT_LT(seconds_after(killed), 10);
  EXPECT_EQ(result.status, 128 + SIGKILL);
  EXPECT_THAT(result.err,
              ContainsRegex(str("the job's store is gone.*: rank 0 \\(host [^ ]+, pid ", ranks[0],
                                "\\), last heard from at .* its last call being [a-z_]+ #[0-9]+")));
}

TEST_F(Flight, NamesAKilledRankWithoutALauncher) {
  std::vector<Command> ranks = start_apart();
  expect_to_name_a_killed_rank(ranks);
}

// A recording has calls of the communicators, which don't end before it.
TEST_F(Flight, NamesAKilledRankOfRecordedSteps) {
  if (!tests_on_gpu()) GTEST_SKIP() << "a CPU's steps aren't recorded";
  std::vector<Command> ranks = start_apart({"--compile.enable", "--metrics.log_freq=1"});
  for (int i = 0; i < 1200 && num_logged() < 6; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_GE(num_logged(), 6) << "no recorded step within a minute";
  expect_to_name_a_killed_rank(ranks);
}

TEST_F(Flight, WritesRecordsOnRequestWhileTheJobContinues) {
  Command job = start();
  const CommandResult dump = ask_for_records();
  EXPECT_EQ(dump.status, 0) << dump.err;
  // The calls that are shown depend on where the ranks are at that moment: gradients have their own group.
  EXPECT_THAT(dump.out, AllOf(HasSubstr("3 ranks wrote their records"),
                              ContainsRegex("group '(world|dp_shard\\.reduce)[^\n]*, its collectives:\n"
                                            " *# +operation +in +of +rank 0 +rank 1 +rank 2 *\n"
                                            " *[0-9]+ +(all_reduce|all_gather|reduce_scatter) ")));
  const auto ranks = children_of(job.pid());
  ASSERT_EQ(ranks.size(), 3U);
  fs::remove(record(2));
  ASSERT_EQ(::kill(ranks[2], SIGQUIT), 0);
  ASSERT_TRUE(comes(record(2)));
  EXPECT_THAT(text_of(record(2)), HasSubstr("\"reason\": \"SIGQUIT\""));
  expect_to_continue();
  job.signal(SIGINT);
  job.wait(30);
}

TEST_F(Flight, LauncherForwardsARequestForRecords) {
  Command job = start();
  job.signal(SIGQUIT);
  for (const int rank : {0, 1, 2}) {
    ASSERT_TRUE(comes(record(rank))) << rank;
    EXPECT_THAT(text_of(record(rank)), HasSubstr("\"reason\": \"SIGQUIT\""));
  }
  expect_to_continue();
  job.signal(SIGINT);
  EXPECT_EQ(job.wait(30).status, 0);
}

TEST_F(Flight, ACrashLeavesARecord) {
  Command job = start();
  const auto ranks = children_of(job.pid());
  ASSERT_EQ(ranks.size(), 3U);
  ASSERT_EQ(::kill(ranks[2], SIGSEGV), 0);
  const CommandResult result = job.wait(30);
  EXPECT_EQ(result.status, 128 + SIGSEGV);
  EXPECT_THAT(text_of(record(2)), HasSubstr("\"reason\": \"SIGSEGV"));
  EXPECT_THAT(result.err, HasSubstr("fatal signal SIGSEGV"));
  EXPECT_THAT(result.err,
              ContainsRegex(str("the job fails: lost: ([^;]*; )*rank 2 \\(host [^ ]+, pid ", ranks[2])));
  EXPECT_EQ(flight().status, 0);
}

TEST_F(Flight, RecordsNothingWithZeroEntries) {
  Command job = start({"--comm.trace_buf_size", "0"});
  const CommandResult dump = run({titan_program(), "debug", "dump", folder_.string(), "--seconds", "1"});
  EXPECT_NE(dump.status, 0);
  ASSERT_EQ(children_of(job.pid()).size(), 3U) << "the job continues";
  ASSERT_EQ(::kill(children_of(job.pid())[1], SIGTERM), 0);
  const CommandResult result = job.wait(60);
  EXPECT_EQ(result.status, 0) << result.err;
  for (int rank = 0; rank < 3; ++rank) EXPECT_FALSE(fs::exists(record(rank)));
}

// A folder other than the default is found through the run's configuration.
TEST_F(Flight, WritesRecordsToAFolderOfAnotherName) {
  Command job = start({"--comm.save_traces_folder", "calls"});
  const CommandResult dump = ask_for_records();
  EXPECT_EQ(dump.status, 0) << dump.err;
  EXPECT_THAT(dump.out, HasSubstr("3 ranks wrote their records to " + (folder_ / "calls").string()));
  EXPECT_EQ(flight().status, 0);
  job.signal(SIGINT);
  job.wait(30);
}

TEST(FlightCommand, ExplainsBadFoldersAndFiles) {
  CommandResult result = run({titan_program(), "debug", "flight", "/no/such"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, HasSubstr("/no/such: isn't a folder"));
  const fs::path folder = fresh_folder("bad");
  std::ofstream(folder / "rank_0.json") << "{\"version\": \"2.10\", \"entries\": 3}";
  result = run({titan_program(), "debug", "flight", folder.string()});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, HasSubstr("rank_0.json: entries isn't a list"));
  result = run({titan_program(), "debug", "flight", "--help"});
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.out, HasSubstr("--last"));
}

// A job of three ranks is asked; two don't answer.
TEST(FlightCommand, DumpReportsHowManyRanksAnswered) {
  const fs::path folder = fresh_folder("records");
  Command dump({titan_program(), "debug", "dump", folder.string(), "--seconds", "2"});
  for (int i = 0; i < 3000 && !fs::exists(folder / "dump_request"); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  std::ofstream(folder / "half_written")
      << R"({"version": "2.10", "titan": {"rank": 0, "world_size": 3, "time_ns": 1}, "pg_config": {}, "entries": []})";
  fs::rename(folder / "half_written", folder / "rank_0.json");
  const CommandResult result = dump.wait();
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out,
              HasSubstr("1 of 3 ranks wrote their records to " + folder.string() + " within 2 s"));
}

// Checking calls changes no number.
TEST_F(Flight, CheckingCallsDoesNotChangeNumbers) {
  const Words words = {source_file("docs/examples/custom_model/ngram.toml"),
                       "--experimental.custom_import",
                       std::string(TITAN_BINARY_DIR) + "/lib/libngram.so",
                       "--nproc",
                       "2",
                       "--training.steps",
                       "5"};
  const auto plain = train(fresh_folder("plain"), words);
  const auto checked = train(fresh_folder("checked"), words + Words{"--debug.check_collectives"});
  EXPECT_EQ(losses(plain), losses(checked));
}

}  // namespace
}  // namespace titan::testing
