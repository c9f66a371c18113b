// How the launcher handles lost ranks, with shell scripts as ranks: each appends a line to a file of the test
// when it starts, then does what its script says.

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fstream>
#include <sstream>

#include <gtest/gtest.h>

#include "e2e/training.h"

namespace titan::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;

/// Ranks that set their `traps`, report themselves, then run `rest`; `$start` is the number of earlier
/// starts, and `together` waits until all have reported.
Words job(const std::filesystem::path& folder, const Words& options, const std::string& rest,
          const std::string& traps = ":") {
  const std::string file = (folder / "starts").string();
  const std::string script = "start=$TITAN_RESTART_COUNT; " + traps +
                             "; echo \"$start: $RANK/$WORLD_SIZE\" >> " + file +
                             "; together() { until [ $(grep -c \"^$start:\" " + file +
                             ") = $WORLD_SIZE ]; do sleep 0.02; done; }; " + rest;
  return Words{titan_program(), "launch"} + options + Words{"--", "sh", "-c", script};
}

std::vector<std::string> starts(const std::filesystem::path& folder) {
  std::vector<std::string> lines;
  std::ifstream file(folder / "starts");
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

bool wait_for_starts(const std::filesystem::path& folder, size_t count, double limit_s = 20) {
  for (double waited = 0; starts(folder).size() < count; waited += 0.01) {
    if (waited > limit_s) return false;
    usleep(10000);
  }
  return true;
}

TEST(LaunchRestart, RestartsAllRanksAfterALoss) {
  const auto folder = fresh_folder("run");
  const auto result = run(job(folder, {"-n", "3", "--max-restarts", "2"},
                              "together; if [ $start = 0 ]; then [ $RANK = 1 ] && kill -9 $$; sleep 60; fi"));
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_LT(result.elapsed_s, 30);  // nobody slept for the whole minute
  EXPECT_THAT(starts(folder),
              UnorderedElementsAre("0: 0/3", "0: 1/3", "0: 2/3", "1: 0/3", "1: 1/3", "1: 2/3"));
  EXPECT_THAT(result.err, AllOf(HasSubstr("rank 1 of 3 failed first: killed by signal 9"),
                                HasSubstr("rank 1 is lost (killed by signal 9"),
                                HasSubstr("start 2 (restart 1 of 2): 3 of 3 ranks, at places 0, 1, 2")));
}

TEST(LaunchRestart, GivesUpAfterMaxRestartsWithTheLastExitCode) {
  const auto folder = fresh_folder("run");
  const auto result = run(job(folder, {"-n", "1", "--max-restarts", "2"}, "exit $((10 + start))"));
  EXPECT_EQ(result.status, 12);
  EXPECT_THAT(starts(folder), ElementsAre("0: 0/1", "1: 0/1", "2: 0/1"));
  EXPECT_THAT(result.err, HasSubstr("giving up after 2 restart(s) (--max-restarts)"));
}

TEST(LaunchRestart, DoesNotRestartByDefault) {
  const auto folder = fresh_folder("run");
  EXPECT_EQ(run(job(folder, {"-n", "1"}, "exit 5")).status, 5);
  EXPECT_EQ(starts(folder).size(), 1u);
}

TEST(LaunchRestart, ContinuesWithoutLostRanksWhileEnoughRemain) {
  const auto folder = fresh_folder("run");
  const auto result =
      run(job(folder, {"-n", "4", "--max-restarts", "5", "--min-ranks", "2", "--rejoin-after", "never"},
              "together; [ $start -lt 2 ] && { [ $RANK = 1 ] && kill -9 $$; sleep 60; }; exit 0"));
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(starts(folder), UnorderedElementsAre("0: 0/4", "0: 1/4", "0: 2/4", "0: 3/4", "1: 0/3", "1: 1/3",
                                                   "1: 2/3", "2: 0/2", "2: 1/2"));
  // The second rank to be lost was rank 1 of the places 0, 2, 3.
  EXPECT_THAT(result.err, HasSubstr("2 of 4 ranks, at places 0, 3"));
}

TEST(LaunchRestart, GroupSizesAreMultiplesOfTheUnit) {
  const auto folder = fresh_folder("run");
  const auto result = run(job(
      folder,
      {"-n", "4", "--max-restarts", "1", "--min-ranks", "1", "--multiple-of", "2", "--rejoin-after", "never"},
      "together; [ $start = 0 ] && { [ $RANK = 3 ] && exit 9; sleep 60; }; exit 0"));
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(starts(folder),
              UnorderedElementsAre("0: 0/4", "0: 1/4", "0: 2/4", "0: 3/4", "1: 0/2", "1: 1/2"));
}

TEST(LaunchRestart, GrowsWhenAPlaceReturnsAfterATime) {
  const auto folder = fresh_folder("run");
  const std::string script =
      "together; if [ $start = 0 ] && [ $RANK = 2 ]; then kill -9 $$; fi;"
      "[ $start = 2 ] && exit 0; while :; do sleep 0.05; done";
  const auto result =
      run(job(folder, {"-n", "3", "--max-restarts", "1", "--min-ranks", "2", "--rejoin-after", "3"}, script,
              "trap 'exit 0' TERM"));
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(starts(folder), UnorderedElementsAre("0: 0/3", "0: 1/3", "0: 2/3", "1: 0/2", "1: 1/2", "2: 0/3",
                                                   "2: 1/3", "2: 2/3"));
  EXPECT_THAT(result.err, HasSubstr("start 3 (restart 1 of 1): 3 of 3 ranks"));  // growing isn't counted
}

TEST(LaunchRestart, SignalReturnsLostPlaces) {
  const auto folder = fresh_folder("run");
  Command launcher(job(folder,
                       {"-n", "2", "--max-restarts", "1", "--min-ranks", "1", "--rejoin-after", "never"},
                       "together; [ $start = 0 ] && [ $RANK = 1 ] && kill -9 $$;"
                       "[ $start = 2 ] && exit 0; while :; do sleep 0.05; done",
                       "trap 'exit 0' TERM"));
  ASSERT_TRUE(wait_for_starts(folder, 3));
  launcher.signal(SIGUSR2);
  const auto result = launcher.wait(20);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(starts(folder), UnorderedElementsAre("0: 0/2", "0: 1/2", "1: 0/1", "2: 0/2", "2: 1/2"));
}

TEST(LaunchRestart, WaitsWhileTooFewRanksRemain) {
  const auto folder = fresh_folder("run");
  Command launcher(job(folder,
                       {"-n", "3", "--max-restarts", "1", "--min-ranks", "2", "--rejoin-after", "never"},
                       "together; [ $start = 1 ] && exit 0; [ $RANK != 0 ] && kill -9 $$; sleep 60",
                       "[ $RANK != 0 ] && trap '' TERM"));
  ASSERT_TRUE(launcher.wait_for_errors("too few ranks are left"));
  usleep(300000);
  EXPECT_EQ(starts(folder).size(), 3u);
  launcher.signal(SIGUSR2);
  const auto result = launcher.wait(20);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("too few ranks are left for --min-ranks 2; waiting for SIGUSR2"));
}

TEST(LaunchRestart, BlamesAStoppedRankNotThePeersThatGaveUpOnIt) {
  const auto folder = fresh_folder("run");
  const std::string pid = (folder / "pid").string();
  const auto result =
      run(job(folder, {"-n", "3", "--max-restarts", "1", "--min-ranks", "2", "--rejoin-after", "never"},
              "together; [ $start = 1 ] && exit 0; [ $RANK = 1 ] && { echo $$ > " + pid +
                  "; kill -STOP $$; };"
                  "until [ -s " +
                  pid + " ] && grep -q '^State:.T' /proc/$(cat " + pid +
                  ")/status; do sleep 0.05;"
                  "done; [ $RANK = 0 ] && exit 6; sleep 60"));
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_LT(result.elapsed_s, 30);  // a stopped process gets no SIGTERM, so its grace period is skipped
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("rank 0 of 3 failed first: exit code 6"), HasSubstr("rank 1 is lost (hung"),
                    HasSubstr("2 of 3 ranks, at places 0, 2")));
}

TEST(LaunchRestart, RanksThatReturn0WhenAskedToEndSucceed) {
  ::signal(SIGHUP, SIG_DFL);  // under nohup it is ignored, and the launcher would inherit that
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1, SIGHUP}) {
    const auto folder = fresh_folder("run");
    Command launcher(job(folder, {"-n", "2", "--max-restarts", "3"}, "while :; do sleep 0.05; done",
                         "trap 'exit 0' TERM INT USR1"));
    ASSERT_TRUE(wait_for_starts(folder, 2));
    launcher.signal(signal);
    const auto result = launcher.wait(20);
    EXPECT_EQ(result.status, 0) << signal;
    EXPECT_EQ(starts(folder).size(), 2u) << "the ranks were restarted";
    EXPECT_THAT(result.err, Not(HasSubstr("failed first")));
  }
}

TEST(LaunchRestart, SecondSignalEndsTheGracePeriod) {
  const auto folder = fresh_folder("run");
  const std::string slow = "trap 'sleep 1; exit 0' TERM; echo ready; while :; do sleep 0.05; done";
  Command patient(job(folder, {"-n", "1", "--grace", "20"}, slow));
  ASSERT_TRUE(patient.wait_for_output("ready"));
  patient.signal(SIGTERM);
  EXPECT_EQ(patient.wait(20).status, 0);

  Command hasty(job(folder, {"-n", "1", "--grace", "0.2"}, slow));
  ASSERT_TRUE(hasty.wait_for_output("ready"));
  hasty.signal(SIGTERM);
  EXPECT_EQ(hasty.wait(20).status, 128 + SIGTERM);

  Command twice(
      job(folder, {"-n", "1", "--grace", "20"}, "trap '' TERM; echo ready; while :; do sleep 1; done"));
  ASSERT_TRUE(twice.wait_for_output("ready"));
  twice.signal(SIGTERM);
  usleep(3'000'000);  // not the same signal any more, however late the first was handled
  twice.signal(SIGTERM);
  const auto result = twice.wait(15);  // before the grace period is over
  EXPECT_EQ(result.status, 128 + SIGTERM);
}

// A terminal that closes, `timeout` and systemd send two signals for one.
TEST(LaunchRestart, CountsTwoSignalsAtOnceAsOne) {
  const auto folder = fresh_folder("run");
  Command launcher(job(folder, {"-n", "2", "--grace", "20"}, "while :; do sleep 0.05; done",
                       "trap 'sleep 1.5; exit 0' TERM INT"));
  ASSERT_TRUE(wait_for_starts(folder, 2));
  launcher.signal(SIGTERM);
  usleep(50000);
  launcher.signal(SIGINT);
  EXPECT_EQ(launcher.wait(20).status, 0);
}

// Also if a shell started the launcher in its background, with the signal ignored.
TEST(LaunchRestart, ForwardsSigquitAndEndsNothing) {
  for (const Words& shell : {Words{}, Words{"sh", "-c", "trap '' QUIT; exec \"$0\" \"$@\""}}) {
    const auto folder = fresh_folder("run");
    Command launcher(shell + job(folder, {"-n", "2", "--log-rank", "all"},
                                 "trap 'echo asked' QUIT; trap 'exit 0' TERM; together; echo ready;"
                                 "while :; do sleep 0.05; done"));
    ASSERT_TRUE(launcher.wait_for_output("[rank 0] ready"));
    ASSERT_TRUE(launcher.wait_for_output("[rank 1] ready"));
    launcher.signal(SIGQUIT);
    if (shell.empty()) {  // a shell can't trap a signal that it was started to ignore; titan train can
      EXPECT_TRUE(launcher.wait_for_output("[rank 0] asked"));
      EXPECT_TRUE(launcher.wait_for_output("[rank 1] asked"));
    }
    launcher.signal(SIGTERM);
    const auto result = launcher.wait(20);
    EXPECT_EQ(result.status, 0) << result.err;
  }
}

// As in a rank's first moments.
TEST(LaunchRestart, DoesNotSendSigquitToARankThatItWouldEnd) {
  const auto folder = fresh_folder("run");
  Command launcher(
      job(folder, {"-n", "2", "--log-rank", "all"},
          "[ $RANK = 1 ] && trap 'echo asked' QUIT; together; echo ready; while :; do sleep 0.05; done",
          "trap 'exit 0' TERM"));
  ASSERT_TRUE(launcher.wait_for_output("[rank 0] ready"));
  ASSERT_TRUE(launcher.wait_for_output("[rank 1] ready"));
  launcher.signal(SIGQUIT);
  EXPECT_TRUE(launcher.wait_for_output("[rank 1] asked"));
  EXPECT_TRUE(launcher.wait_for_errors("rank 0 has no handler for SIGQUIT"));
  launcher.signal(SIGTERM);
  const auto result = launcher.wait(20);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, Not(HasSubstr("rank 1 doesn't take")));
}

TEST(LaunchRestart, NeverRetriesRefusedSettingsOrUnsoundRuns) {
  for (const char* code : {"2", "3"}) {
    const auto folder = fresh_folder("run");
    const auto result = run(job(folder, {"-n", "1", "--max-restarts", "2"}, std::string("exit ") + code));
    EXPECT_EQ(std::to_string(result.status), code);
    EXPECT_THAT(result.err, HasSubstr(std::string("no restart: exit code ") + code));
    EXPECT_THAT(starts(folder), ElementsAre("0: 0/1"));
  }
  const auto folder = fresh_folder("run");
  const auto result = run(
      job(folder, {"-n", "1", "--max-restarts", "2", "--final-codes", "none"}, "[ $start = 1 ] || exit 3"));
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(starts(folder), ElementsAre("0: 0/1", "1: 0/1"));
}

TEST(LaunchRestart, SigquitBetweenTwoGroupsEndsNothing) {
  const auto folder = fresh_folder("run");
  Command launcher(job(folder, {"-n", "2", "--max-restarts", "1", "--min-ranks", "1", "--rejoin-after", "5"},
                       "together; [ $start = 1 ] && exit 0; kill -9 $$", "trap '' TERM"));
  ASSERT_TRUE(launcher.wait_for_errors("too few ranks are left"));
  launcher.signal(SIGQUIT);
  const auto result = launcher.wait(20);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("too few ranks are left"));
}

std::string dies_as_rank_1(const std::filesystem::path& folder) {
  return "together; [ $RANK = 1 ] && { : >" + (folder / "died").string() + "; kill -9 $$; }";
}

double seconds_since_death(const std::filesystem::path& folder) {
  const auto died = std::filesystem::last_write_time(folder / "died");
  return std::chrono::duration<double>(std::filesystem::file_time_type::clock::now() - died).count();
}

// A rank that explains a failure needs seconds to notice that another rank is silent (dist::kExplainsWithin).
TEST(LaunchRestart, GivesRanksTimeToExplainAFailure) {
  const auto folder = fresh_folder("run");
  const MachineLag lag;
  const auto result = run(job(folder, {"-n", "3", "--log-rank", "all"},
                              dies_as_rank_1(folder) + "; while :; do sleep 0.05; done",
                              "trap 'sleep 7.5; echo explained; exit 1' TERM"));
  EXPECT_EQ(result.status, 128 + SIGKILL);
  EXPECT_LT(seconds_since_death(folder), 10 + lag.seconds());
  EXPECT_THAT(result.out, AllOf(HasSubstr("[rank 0] explained"), HasSubstr("[rank 2] explained")));
}

// Even so, a rank that doesn't end is gone when the job has to be over.
TEST(LaunchRestart, EndsTheJobWithinTenSecondsOfALoss) {
  const auto folder = fresh_folder("run");
  const MachineLag lag;
  const auto result = run(
      job(folder, {"-n", "2"}, dies_as_rank_1(folder) + "; while :; do sleep 0.05; done", "trap '' TERM"));
  EXPECT_LT(seconds_since_death(folder), 10 + lag.seconds());
  EXPECT_EQ(result.status, 128 + SIGKILL);
}

// As nohup ignores SIGHUP, and a shell ignores SIGINT for a background job.
TEST(LaunchRestart, IgnoredSignalsStayIgnored) {
  const auto folder = fresh_folder("run");
  const std::string done = (folder / "done").string();
  Words words = {"sh", "-c", "trap '' HUP INT; exec \"$0\" \"$@\""};
  Command launcher(words +
                   job(folder, {"-n", "1"}, "echo ready; until [ -e " + done + " ]; do sleep 0.05; done"));
  ASSERT_TRUE(launcher.wait_for_output("ready"));
  launcher.signal(SIGHUP);
  launcher.signal(SIGINT);
  usleep(500000);
  EXPECT_EQ(::kill(launcher.pid(), 0), 0);
  std::ofstream(done) << "done\n";
  const auto result = launcher.wait(20);
  EXPECT_EQ(result.status, 0) << result.err;
}

// Some daemons ignore SIGCHLD: children would vanish without reporting how they ended.
TEST(LaunchRestart, WorksUnderAParentThatIgnoresSigchld) {
  const auto folder = fresh_folder("run");
  const auto result = run(Words{"env", "--ignore-signal=CHLD"} +
                              job(folder, {"-n", "2"}, "together; [ $RANK = 1 ] && exit 7; sleep 30"),
                          {}, 20);
  EXPECT_EQ(result.status, 7) << result.err;
}

// A rank that gave up on its peers (exit code 124) names nobody: the rank that then doesn't end is the one
// that hung.
TEST(LaunchRestart, BlamesTheRankThatDoesNotEndAfterItsPeersGaveUp) {
  const auto folder = fresh_folder("run");
  const auto result =
      run(job(folder, {"-n", "3", "--max-restarts", "1", "--min-ranks", "2", "--rejoin-after", "never"},
              "together; [ $start = 1 ] && exit 0; [ $RANK = 0 ] && exit 124; while :; do sleep 0.1; done",
              "[ $RANK = 2 ] && trap '' TERM"),
          {}, 60);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("rank 0 of 3 failed first: exit code 124"),
                                HasSubstr("rank 2 is lost (hung: it didn't end when another gave up"),
                                HasSubstr("2 of 3 ranks, at places 0, 1")));
}

// A killed process that doesn't end, because a debugger holds it, is reported.
TEST(LaunchRestart, ReportsAProcessThatDoesNotEnd) {
  const auto folder = fresh_folder("run");
  const std::string file = (folder / "pid").string();
  Command launcher(job(folder, {"-n", "1", "--grace", "0.2"},
                       "trap '' TERM; echo $$ > " + file + "; echo ready; while :; do sleep 0.1; done"));
  ASSERT_TRUE(launcher.wait_for_output("ready"));
  int pid = 0;
  std::ifstream(file) >> pid;
  if (::ptrace(PTRACE_SEIZE, pid, nullptr, nullptr) != 0) GTEST_SKIP() << "ptrace: " << std::strerror(errno);
  launcher.signal(SIGTERM);
  // Each signal stops it for its debugger, which continues it; its end takes longer.
  siginfo_t seen{};
  while (::waitid(P_PID, static_cast<id_t>(pid), &seen, WSTOPPED | WEXITED | WNOWAIT | __WALL) == 0 &&
         seen.si_code == CLD_TRAPPED) {
    int status = 0;
    ::waitpid(pid, &status, __WALL);
    ::ptrace(PTRACE_CONT, pid, nullptr, WSTOPSIG(status));
  }
  usleep(7'000'000);
  ::waitpid(pid, nullptr, __WALL);
  const auto result = launcher.wait(20);
  EXPECT_EQ(result.status, 128 + SIGTERM);
  EXPECT_THAT(result.err, HasSubstr("rank 0 (pid " + std::to_string(pid) + ", state "));
}

// The smaller group didn't stop as asked: its steps are lost, and nothing may claim otherwise.
TEST(LaunchRestart, ReportsRanksThatFailWhileGrowing) {
  const auto folder = fresh_folder("run");
  const auto result = run(job(
      folder, {"-n", "3", "--max-restarts", "1", "--min-ranks", "2", "--rejoin-after", "3", "--grace", "0.5"},
      "together; [ $start = 2 ] && exit 0; [ $start = 0 ] && [ $RANK = 2 ] && kill -9 $$;"
      "while :; do sleep 0.05; done",
      "[ $start = 1 ] && [ $RANK = 1 ] && trap '' TERM; [ $start = 1 ] && [ $RANK = 0 ] && trap 'exit 0' "
      "TERM"));
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(
      result.err,
      HasSubstr("not all ranks shut down cleanly: rank 1 (it was killed because it didn't end in time)"));
}

// A rank's threads are its share of the host's cores, however many ranks remain.
TEST(LaunchRestart, FewerRanksUseNoMoreThreads) {
  const auto folder = fresh_folder("run");
  const std::string threads = (folder / "threads").string();
  const auto result =
      run(job(folder, {"-n", "2", "--max-restarts", "1", "--min-ranks", "1", "--rejoin-after", "never"},
              "[ $RANK = 0 ] && echo $OMP_NUM_THREADS >> " + threads + "; [ $start = 1 ] && exit 0;" +
                  "[ $RANK = 1 ] && { until [ -s " + threads +
                  " ]; do sleep 0.02; done; kill -9 $$; }; sleep 60"),
          {{"OMP_NUM_THREADS", ""}});
  EXPECT_EQ(result.status, 0) << result.err;
  std::ifstream file(threads);
  int before = 0, after = -1;
  file >> before >> after;
  EXPECT_EQ(after, before);
}

// The program is being replaced, and is missing for a moment.
TEST(LaunchRestart, RetriesAMissingProgram) {
  const auto folder = fresh_folder("run");
  const std::string program = (folder / "program").string();
  std::ofstream(program) << "#!/bin/sh\n[ $TITAN_RESTART_COUNT -gt 0 ] && exit 0\nmv " << program << " "
                         << program << ".new\nsetsid sh -c 'echo > " << program << ".away; sleep 0.7; mv "
                         << program << ".new " << program << "' > /dev/null 2>&1 &\nuntil [ -e " << program
                         << ".away ]; do sleep 0.02; done\nexit 1\n";
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  const auto result =
      run({titan_program(), "launch", "-n", "1", "--max-restarts", "9", "--", program}, {}, 60);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("cannot start '" + program + "': No such file or directory"));
  EXPECT_EQ(run({titan_program(), "launch", "-n", "1", "--max-restarts", "9", "--", program + ".new"}).status,
            127)
      << "for a program that never existed";
}

TEST(LaunchRestart, EachStartHasItsOwnStore) {
  const auto result =
      run({titan_program(), "launch", "-n", "2", "--max-restarts", "2", "--log-rank", "all", "--", "sh", "-c",
           built("rank_program") + " 30 && [ $TITAN_RESTART_COUNT = 2 ] || exit 1"},
          {}, 100);
  EXPECT_EQ(result.status, 0) << result.err;
  size_t met = 0;
  for (size_t at = 0; (at = result.out.find("by titan, sum 1", at)) != std::string::npos; ++at) ++met;
  EXPECT_EQ(met, 6u) << result.out;
}

TEST(LaunchRestart, HidesTheGpusOfLostPlaces) {
  const auto folder = fresh_folder("run");
  const auto result =
      run(job(folder, {"-n", "3", "--max-restarts", "1", "--min-ranks", "2", "--rejoin-after", "never"},
              "together; [ $start = 1 ] && { echo gpus=$CUDA_VISIBLE_DEVICES; exit 0; };"
              "[ $RANK = 1 ] && kill -9 $$; sleep 60"),
          {{"CUDA_VISIBLE_DEVICES", "2,5,7"}});
  EXPECT_THAT(result.out, HasSubstr("gpus=2,7")) << result.err;
}

TEST(LaunchRestart, ExplainsWrongUsage) {
  const auto error_of = [](const Words& options) {
    const auto result = run(Words{titan_program(), "launch"} + options + Words{"--", "true"});
    EXPECT_EQ(result.status, 2);
    return result.err;
  };
  EXPECT_THAT(error_of({"-n", "2", "--max-restarts", "1", "--min-ranks", "3"}),
              HasSubstr("--min-ranks is 3; allowed: 1 to the number of ranks, 2"));
  EXPECT_THAT(error_of({"-n", "2", "--min-ranks", "1"}), HasSubstr("needs --max-restarts"));
  EXPECT_THAT(error_of({"-n", "2", "--max-restarts", "-1"}), HasSubstr("--max-restarts"));
  EXPECT_THAT(error_of({"-n", "2", "--max-restarts", "1", "--rejoin-after", "soon"}),
              HasSubstr("'soon' isn't a number of seconds or 'never'"));
  EXPECT_THAT(error_of({"-n", "3", "--max-restarts", "1", "--multiple-of", "2"}),
              HasSubstr("can't run on 3 ranks"));
}

}  // namespace
}  // namespace titan::testing
