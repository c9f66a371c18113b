// Starting ranks: the launcher's behavior, and dist::init under torchrun, SLURM and Open MPI.

#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <regex>

#include <gtest/gtest.h>

#include "e2e/live_run.h"
#include "e2e/training.h"

namespace titan::testing {
namespace {

const std::string kTitan = TITAN_BINARY_DIR "/bin/titan";
const std::string kRankProgram = TITAN_BINARY_DIR "/bin/rank_program";

Words launch(int ranks, const Words& command, const std::string& log_rank = "0") {
  Words words = {kTitan, "launch", "-n", std::to_string(ranks), "--log-rank", log_rank, "--"};
  words.insert(words.end(), command.begin(), command.end());
  return words;
}

Words shell(const std::string& script) { return {"sh", "-c", script}; }

bool dies_within(int pid, double limit_s) {
  for (double waited = 0; is_running(pid); waited += 0.02) {
    if (waited > limit_s) return false;
    usleep(20000);
  }
  return true;
}

/// The pids that rank_program printed.
std::vector<int> pids_in(const std::string& out) {
  std::vector<int> pids;
  const std::regex pattern("pid ([0-9]+)");
  for (std::sregex_iterator match(out.begin(), out.end(), pattern), end; match != end; ++match) {
    pids.push_back(std::stoi((*match)[1]));
  }
  return pids;
}

TEST(Launch, RanksConnect) {
  const auto result = run(launch(3, {kRankProgram}, "all"));
  EXPECT_EQ(result.status, 0) << result.err;
  for (const char* line : {"[rank 0] rank 0 of 3, local 0 of 3, by titan, sum 3", "[rank 1] rank 1 of 3",
                           "[rank 2] rank 2 of 3"}) {
    EXPECT_THAT(result.out, HasSubstr(line));
  }
}

TEST(Launch, ShowsRankZeroUnlessAskedForOthers) {
  const auto script = shell("echo out $RANK; echo err $RANK >&2");
  auto result = run({kTitan, "launch", "-n", "3", script[0], script[1], script[2]});
  EXPECT_EQ(result.out, "[rank 0] out 0\n");
  EXPECT_EQ(result.err, "[rank 0] err 0\n");
  result = run(launch(3, script, "1,2"));
  EXPECT_THAT(result.out, HasSubstr("[rank 1] out 1\n"));
  EXPECT_THAT(result.err, HasSubstr("[rank 2] err 2\n"));
  EXPECT_THAT(result.out, Not(HasSubstr("out 0")));
  EXPECT_EQ(run(launch(2, script, "none")).out, "");
}

TEST(Launch, KeepsLinesWhole) {
  const auto script =
      "i=0; while [ $i -lt 300 ]; do printf 'a'; printf '%s-%s\\n' $RANK $RANK; i=$((i+1)); done";
  const auto result = run(launch(4, shell(script), "all"));
  std::istringstream lines(result.out);
  int count = 0;
  const std::regex whole("\\[rank ([0-3])\\] a\\1-\\1");
  for (std::string line; std::getline(lines, line); ++count)
    EXPECT_TRUE(std::regex_match(line, whole)) << line;
  EXPECT_EQ(count, 1200);
}

TEST(Launch, ShowsALastLineWithoutANewline) {
  EXPECT_EQ(run(launch(1, shell("printf half"))).out, "[rank 0] half\n");
}

TEST(Launch, PassesTheEnvironment) {
  const auto result = run(launch(2,
                                 shell("echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR "
                                       "omp=$OMP_NUM_THREADS"),
                                 "1"),
                          {{"OMP_NUM_THREADS", "7"}});
  EXPECT_EQ(result.out, "[rank 1] 1/2 1/2 127.0.0.1 omp=7\n");
}

TEST(Launch, DividesTheCores) {
  cpu_set_t cores;
  sched_getaffinity(0, sizeof(cores), &cores);
  const auto threads = [](int ranks) {
    return run(launch(ranks, shell("echo $OMP_NUM_THREADS")), {{"OMP_NUM_THREADS", ""}}).out;
  };
  EXPECT_EQ(threads(1), "[rank 0] " + std::to_string(CPU_COUNT(&cores)) + "\n");
  EXPECT_EQ(threads(2), "[rank 0] " + std::to_string(std::max(1, CPU_COUNT(&cores) / 2)) + "\n");
}

TEST(Launch, ReturnsTheFirstFailuresExitCodeAndShowsItLast) {
  const auto script = "if [ $RANK = 1 ]; then echo the reason >&2; exit 7; fi; sleep 60";
  const auto result = run(launch(3, shell(script)));
  EXPECT_EQ(result.status, 7);
  EXPECT_LT(result.elapsed_s, 30);  // nobody slept for the whole minute
  EXPECT_THAT(result.err, HasSubstr("rank 1 of 3 failed first: exit code 7"));
  EXPECT_THAT(result.err.substr(result.err.find("failed first")), HasSubstr("  the reason\n"));
}

TEST(Launch, BlamesTheRankThatFailedFirst) {
  const auto result = run(launch(3, {kRankProgram, "30", "throw", "2"}));
  EXPECT_EQ(result.status, 3);
  EXPECT_THAT(result.err, HasSubstr("rank 2 of 3 failed first: exit code 3"));
  EXPECT_THAT(result.err, HasSubstr("rank 2 was told to throw"));
}

TEST(Launch, NamesAKilledRankAndEndsTheJob) {
  Command job(launch(3, {kRankProgram, "60", "hang"}, "all"));
  ASSERT_TRUE(job.wait_for_output("rank 0 of") && job.wait_for_output("rank 1 of") &&
              job.wait_for_output("rank 2 of"));
  const MachineLag lag;
  const auto started = std::chrono::steady_clock::now();
  const std::string out = job.output();
  const auto pids = pids_in(out.substr(out.find("rank 1 of")));
  ASSERT_FALSE(pids.empty());
  kill(pids[0], SIGKILL);
  const auto result = job.wait(20);
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count(),
            10 + lag.seconds());
  EXPECT_EQ(result.status, 128 + SIGKILL);
  EXPECT_THAT(result.err, HasSubstr("rank 1 of 3 failed first: killed by signal 9"));
}

TEST(Launch, KillsRanksThatIgnoreTheRequestToEnd) {
  const auto failed = std::filesystem::temp_directory_path() / ("titan_failed_" + std::to_string(getpid()));
  const auto script = "trap '' TERM; if [ $RANK = 0 ]; then sleep 1; : >" + failed.string() +
                      "; exit 4; fi; while :; do sleep 1; done";
  const MachineLag lag;
  const auto result = run(launch(2, shell(script)));
  EXPECT_EQ(result.status, 4);
  // After the failure the others have nine seconds to explain themselves, and all is over within ten.
  const std::chrono::duration<double> after =
      std::filesystem::file_time_type::clock::now() - std::filesystem::last_write_time(failed);
  EXPECT_GT(after.count(), 8.5);
  EXPECT_LT(after.count(), 10 + lag.seconds());
  std::filesystem::remove(failed);
}

TEST(Launch, SaysWhatIsNotSavedIfARankDoesNotEnd) {
  Words words = launch(
      2, shell("if [ $RANK = 1 ]; then trap '' TERM; fi; echo ready; while :; do sleep 0.1; done"), "all");
  words.insert(words.begin() + 2, {"--grace", "0.5"});
  Command job(words);
  ASSERT_TRUE(job.wait_for_output("[rank 0] ready") && job.wait_for_output("[rank 1] ready"));
  job.signal(SIGTERM);
  const CommandResult result = job.wait(30);
  EXPECT_EQ(result.status, 128 + SIGTERM);
  EXPECT_THAT(result.err,
              HasSubstr("rank 1 (it was killed because it didn't end in time); steps after the newest "
                        "complete checkpoint aren't saved"));
}

TEST(Launch, CtrlCEndsAllRanks) {
  Command job(launch(2, {kRankProgram, "60", "hang"}, "all"));
  ASSERT_TRUE(job.wait_for_output("rank 0 of") && job.wait_for_output("rank 1 of"));
  job.signal(SIGINT);
  const auto result = job.wait(60);
  EXPECT_EQ(result.status, 128 + SIGINT);
  const auto pids = pids_in(result.out);
  EXPECT_EQ(pids.size(), 2U);
  for (int pid : pids) EXPECT_TRUE(dies_within(pid, 1)) << pid;
}

TEST(Launch, RanksDieWithTheLauncher) {
  Command job(launch(2, {kRankProgram, "60", "hang"}, "all"));
  ASSERT_TRUE(job.wait_for_output("rank 0 of") && job.wait_for_output("rank 1 of"));
  job.signal(SIGKILL);
  const auto pids = pids_in(job.wait(60).out);
  EXPECT_EQ(pids.size(), 2U);
  for (int pid : pids) EXPECT_TRUE(dies_within(pid, 5)) << pid;
}

TEST(Launch, ConcurrentJobsUseDifferentPorts) {
  std::vector<Command> jobs;
  for (int i = 0; i < 3; ++i) jobs.emplace_back(launch(2, {kRankProgram}));
  for (auto& job : jobs) EXPECT_EQ(job.wait().status, 0);
}

TEST(Launch, ExplainsWrongUsage) {
  EXPECT_EQ(run(launch(2, {"/no/such/program"})).status, 127);
  EXPECT_THAT(run(launch(2, {"/no/such/program"})).err,
              HasSubstr("cannot start '/no/such/program': No such file"));
  EXPECT_NE(run({kTitan, "launch", "-n", "0", "true"}).status, 0);
  EXPECT_NE(run({kTitan, "launch", "-n", "2"}).status, 0);
  EXPECT_THAT(run(launch(2, {"true"}, "2")).err, HasSubstr("'2' isn't a rank from 0 to 1"));
}

/// Two ranks with different variables.
std::vector<CommandResult> run_ranks(const std::vector<Command::Variables>& ranks,
                                     const std::string& timeout_s = "30") {
  std::vector<Command> commands;
  for (const auto& variables : ranks) commands.emplace_back(Words{kRankProgram, timeout_s}, variables);
  std::vector<CommandResult> results;
  for (auto& command : commands) results.push_back(command.wait());
  return results;
}

Command::Variables plain(const std::string& rank, const std::string& size, const std::string& port) {
  return {{"RANK", rank}, {"WORLD_SIZE", size}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}};
}

TEST(Init, UnderTorchrun) {
  const std::string torchrun = TITAN_SOURCE_DIR "/.venv/bin/torchrun";
  if (!std::filesystem::exists(torchrun)) GTEST_SKIP() << "no torchrun in .venv";
  const auto result =
      run({torchrun, "--no-python", "--standalone", "--nproc-per-node", "2", kRankProgram}, {}, 250);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("rank 0 of 2, local 0 of 2, by torchrun, sum 1"));
  EXPECT_THAT(result.out, HasSubstr("rank 1 of 2, local 1 of 2, by torchrun, sum 1"));
}

TEST(Init, TorchrunStartsTitanTrain) {
  const std::string torchrun = TITAN_SOURCE_DIR "/.venv/bin/torchrun";
  if (!std::filesystem::exists(torchrun)) GTEST_SKIP() << "no torchrun in .venv";
  const auto folder = fresh_folder("run");
  const auto result = run(
      Words{torchrun, "--no-python", "--standalone", "--nproc-per-node", "2"} +
          train_words({source_file("docs/examples/custom_model/ngram.toml"), "--experimental.custom_import",
                       TITAN_BINARY_DIR "/lib/libngram.so", "--training.steps", "5", "--metrics.log_freq",
                       "1", "--job.dump_folder", folder.string()}),
      {{"OMP_NUM_THREADS", "1"}}, 250);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("on 2 rank(s)"));
  EXPECT_EQ(read_metrics(folder).size(), 5U);
}

// A parent that hasn't waited for a rank leaves a zombie, which still has its pid.
TEST(LostRank, IsNoticedWhileItsParentHasNotWaitedForIt) {
  const std::string port = some_port();
  Command waits(Words{kRankProgram, "60", "hang"}, plain("0", "2", port)),
      killed(Words{kRankProgram, "60", "hang"}, plain("1", "2", port));
  ASSERT_TRUE(waits.wait_for_output("rank 0 of 2"));
  ASSERT_TRUE(killed.wait_for_output("rank 1 of 2"));
  const MachineLag lag;
  const auto start = std::chrono::steady_clock::now();
  killed.signal(SIGKILL);
  const auto result = waits.wait(30);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  EXPECT_LT(seconds.count(), 3 + lag.seconds());
  EXPECT_EQ(result.status, 3);
  EXPECT_THAT(result.err, HasSubstr("rank 1 of the group has ended (its pid was "));
}

constexpr const char* kPython = TITAN_SOURCE_DIR "/.venv/bin/python";

/// The store of a torchrun agent, which runs `more` lines of Python first.
struct AgentStore {
  explicit AgentStore(const std::string& more = "")
      : program({kPython, "-c",
                 "import time, torch.distributed as d\n"
                 "store = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n" +
                     more + "print('port', store.port, 'open', flush=True)\ntime.sleep(280)"}) {
    if (!program.wait_for_output("open", 200)) return;
    std::smatch found;
    const std::string out = program.output();
    if (std::regex_search(out, found, std::regex("port ([0-9]+)"))) port = found[1];
  }
  Command program;
  std::string port;  // "": it didn't start
};

// A rank that fails on one host restarts the ranks of all hosts, but counts as a restart only there; the
// agent's store stays the same.
TEST(Init, TorchrunAgentsMayCountRestartsDifferently) {
  if (!std::filesystem::exists(kPython)) GTEST_SKIP() << "no .venv";
  const AgentStore agent;
  ASSERT_NE(agent.port, "");
  const auto variables = [&](const char* rank, const char* restarts) -> Command::Variables {
    auto some = plain(rank, "2", agent.port);
    some.merge(Command::Variables{{"TORCHELASTIC_RUN_ID", "x"},
                                  {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                  {"TORCHELASTIC_RESTART_COUNT", restarts}});
    return some;
  };
  for (const char* restarts : {"0", "1", "1"})
    for (const auto& result : run_ranks({variables("0", restarts), variables("1", "0")}))
      EXPECT_THAT(result.out, HasSubstr("by torchrun, sum 1")) << result.err;
}

// An earlier rank 0 recorded a port that now belongs to another job, whose store has the same keys.
TEST(Init, IgnoresAnotherJobsStoreAtAnOldPort) {
  if (!std::filesystem::exists(kPython)) GTEST_SKIP() << "no .venv";
  const AgentStore agent(
      "other = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
      "other.set('titan/own_number', '7-7')\n"
      "store.set('titan/port', f'{other.port} 8-8')\n");
  ASSERT_NE(agent.port, "");
  const auto variables = [&](const char* rank) -> Command::Variables {
    auto some = plain(rank, "2", agent.port);
    some.merge(Command::Variables{{"TORCHELASTIC_RUN_ID", "x"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
    return some;
  };
  Command early({kRankProgram, "30"}, variables("1"));
  sleep(2);  // the time in which it finds the other store
  Command late({kRankProgram, "30"}, variables("0"));
  EXPECT_THAT(late.wait(40).out, HasSubstr("by torchrun, sum 1"));
  EXPECT_THAT(early.wait(40).out, HasSubstr("by torchrun, sum 1"));
}

TEST(Init, UnderSlurm) {
  const auto variables = [](const char* rank) -> Command::Variables {
    return {{"SLURM_PROCID", rank},
            {"SLURM_NTASKS", "2"},
            {"SLURM_STEP_ID", "0"},
            {"SLURM_LOCALID", rank},
            {"SLURM_NODELIST", "127.0.0.[1-2]"},
            {"SLURM_JOB_ID", std::to_string(getpid())}};
  };
  const auto results = run_ranks({variables("0"), variables("1")});
  EXPECT_THAT(results[0].out, HasSubstr("rank 0 of 2, local 0 of 2, by slurm, sum 1")) << results[0].err;
  EXPECT_THAT(results[1].out, HasSubstr("rank 1 of 2, local 1 of 2, by slurm, sum 1")) << results[1].err;
}

TEST(Init, UnderOpenMpi) {
  const auto variables = [](const char* rank) -> Command::Variables {
    return {{"OMPI_COMM_WORLD_RANK", rank},
            {"OMPI_COMM_WORLD_SIZE", "2"},
            {"OMPI_COMM_WORLD_LOCAL_RANK", rank},
            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
            {"PMIX_NAMESPACE", "prterun-" + std::to_string(getpid())}};
  };
  const auto results = run_ranks({variables("0"), variables("1")});
  EXPECT_THAT(results[0].out, HasSubstr("rank 0 of 2, local 0 of 2, by openmpi, sum 1")) << results[0].err;
  EXPECT_THAT(results[1].out, HasSubstr("rank 1 of 2, local 1 of 2, by openmpi, sum 1")) << results[1].err;
}

TEST(Init, CountsLocalRanksIfTheLauncherDoesNot) {
  const auto results = run_ranks({plain("0", "2", some_port()), plain("1", "2", some_port())});
  EXPECT_THAT(results[1].out, HasSubstr("rank 1 of 2, local 1 of 2, by env")) << results[1].err;
}

TEST(Init, NamesTheMissingRanks) {
  const auto results = run_ranks({plain("0", "4", some_port()), plain("2", "4", some_port())}, "10");
  for (const auto& result : results) {
    EXPECT_EQ(result.status, 3);
    EXPECT_THAT(result.err, HasSubstr("2 of 4 ranks didn't connect"));
    EXPECT_THAT(result.err, HasSubstr("missing: 1, 3"));
    EXPECT_LT(result.elapsed_s, 40);
  }
}

TEST(Init, NamesRankZeroWhenItIsMissing) {
  const auto results = run_ranks({plain("1", "2", some_port())}, "1");
  EXPECT_EQ(results[0].status, 3);
  EXPECT_THAT(results[0].err, HasSubstr("missing: 0"));
}

TEST(Init, ReportsAWrongWorldSizeOnAllRanks) {
  for (const auto& result : run_ranks({plain("0", "2", some_port()), plain("1", "3", some_port())}, "40")) {
    EXPECT_EQ(result.status, 3);
    EXPECT_THAT(result.err, HasSubstr("set the same on all ranks"));
    EXPECT_LT(result.elapsed_s, 30);  // before the limit
  }
}

TEST(Init, NamesAPortInUse) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  ASSERT_TRUE(bind(fd, generic, size) == 0 && listen(fd, 1) == 0 && getsockname(fd, generic, &size) == 0);
  const std::string port = std::to_string(ntohs(address.sin_port));
  const auto results = run_ranks({plain("0", "2", port)}, "40");
  close(fd);
  EXPECT_EQ(results[0].status, 3);
  EXPECT_THAT(results[0].err,
              HasSubstr("rank 0 can't serve the store at 127.0.0.1:" + port + " (is the port taken?"));
  EXPECT_LT(results[0].elapsed_s, 30);
}

// Debian's /etc/hosts has such an address for a host's own name (host_names_test.cpp tests the names).
TEST(Init, AcceptsAnyLoopbackAddress) {
  std::vector<Command::Variables> ranks = {plain("0", "2", some_port()), plain("1", "2", some_port())};
  for (auto& variables : ranks) variables["MASTER_ADDR"] = "127.0.1.1";
  for (const auto& result : run_ranks(ranks)) EXPECT_THAT(result.out, HasSubstr("sum 1")) << result.err;
}

/// Runs `command` in a network of its own whose only address is ::1; nullopt where that isn't allowed.
std::optional<CommandResult> run_with_ipv6_alone(const std::string& command) {
  const std::string script =
      "ip link set lo up && ip -6 addr show dev lo | grep -q ::1 && ip addr del 127.0.0.1/8 dev lo || exit "
      "77; ";
  auto result = run({"unshare", "--user", "--map-root-user", "--net", "sh", "-c", script + command}, {}, 60);
  if (result.status == 77 || result.status == 127 || result.err.find("unshare") != std::string::npos)
    return {};
  return result;
}

TEST(Init, WorksWithOnlyAnIpv6Loopback) {
  const auto launched =
      run_with_ipv6_alone(kTitan + " launch -n 2 --log-rank all -- " + kRankProgram + " 30");
  if (!launched) GTEST_SKIP() << "no network namespaces here";
  EXPECT_EQ(launched->status, 0) << launched->err;
  EXPECT_THAT(launched->out, HasSubstr("rank 1 of 2, local 1 of 2, by titan, sum 1"));
  const std::string plain_ranks = "export WORLD_SIZE=2 MASTER_ADDR=::1 MASTER_PORT=29500; RANK=1 " +
                                  kRankProgram + " & RANK=0 " + kRankProgram + " && wait $!";
  const auto plain = run_with_ipv6_alone(plain_ranks);
  ASSERT_TRUE(plain);
  EXPECT_EQ(plain->status, 0) << plain->err;
  EXPECT_THAT(plain->out, HasSubstr("rank 1 of 2, local 1 of 2, by env, sum 1"));
}

TEST(Init, ReportsLaunchersThatDisagree) {
  auto variables = plain("0", "2", some_port());
  variables["SLURM_PROCID"] = "0";
  variables["SLURM_NTASKS"] = "4";
  variables["SLURM_STEP_ID"] = "0";
  const auto results = run_ranks({variables});
  EXPECT_EQ(results[0].status, 3);
  EXPECT_THAT(results[0].err, HasSubstr("WORLD_SIZE=2 (env) but SLURM_NTASKS=4 (slurm)"));
}

}  // namespace
}  // namespace titan::testing
