#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "core/process.h"
#include "titan/core/error.h"

namespace titan {
namespace {

TEST(Process, TimeSinceStartGrowsWithTheClock) {
  double before = seconds_since_process_start();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  double after = seconds_since_process_start();
  EXPECT_GE(before, -0.02);  // the start time counts in ticks of 10 ms
  EXPECT_LT(before, 3600);   // neither since boot nor in ticks: the tests before this one take less
  EXPECT_NEAR(after - before, 0.02, 0.5);
  EXPECT_GE(after - before, 0.02);
}

TEST(Process, TimeSinceLaunchIncludesTheLauncher) {
  const double launcher = seconds_since_process_start();
  pass_on_launch_time();
  EXPECT_NEAR(seconds_since_launch() - seconds_since_process_start(), launcher, 0.5);
  for (const char* text : {"no", "-7", "nan", "inf", ""}) {
    ::setenv("TITAN_LAUNCH_SECONDS", text, /*overwrite=*/1);
    EXPECT_NEAR(seconds_since_launch(), seconds_since_process_start(), 0.5) << text;
  }
  ::unsetenv("TITAN_LAUNCH_SECONDS");
  EXPECT_NEAR(seconds_since_launch(), seconds_since_process_start(), 0.5);
}

TEST(Process, StartsAProgramThatBlocksNoSignalsAndHasNoOtherFiles) {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const std::string script = "grep SigBlk /proc/self/status; [ -e /proc/$$/fd/" + std::to_string(pipe[0]) +
                             " ] || echo closed; exit 7";
  const pid_t child = start_program({"sh", "-c", script}, pipe[1]);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 7);
  char text[100] = {};
  EXPECT_GT(::read(pipe[0], text, sizeof text - 1), 0);
  EXPECT_EQ(std::string(text), "SigBlk:\t0000000000000000\nclosed\n");
  for (const int file : pipe) ::close(file);
  EXPECT_THROW(start_program({"no such program"}), Error);
}

// Another process's; if it `is_apart`, it has a network namespace of its own, as a container has. "" if it can't have one.
std::string identity_of_another_process(bool is_apart) {
  int pipe[2];
  if (::pipe(pipe) != 0) return "";
  const pid_t child = ::fork();
  if (child == 0) {
    if (is_apart && ::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) ::_exit(1);
    const std::string identity = host_identity();
    ::_exit(::write(pipe[1], identity.data(), identity.size()) < 0);
  }
  ::close(pipe[1]);
  char text[512] = {};
  EXPECT_GE(::read(pipe[0], text, sizeof text - 1), 0);
  ::close(pipe[0]);
  ::waitpid(child, nullptr, 0);
  return text;
}

TEST(Process, ContainersThatShareANameAreDifferentHosts) {
  EXPECT_EQ(identity_of_another_process(/*is_apart=*/false), host_identity());
  EXPECT_TRUE(host_identity().starts_with(host_name() + "/"));
  const std::string other = identity_of_another_process(/*is_apart=*/true);
  if (other.empty()) GTEST_SKIP() << "no namespaces here";
  EXPECT_NE(other, host_identity());
}

TEST(Process, ResidentMemoryIsLessThanTheMachines) {
  EXPECT_GT(peak_resident_gib(), 0.001);
  EXPECT_LT(peak_resident_gib(), machine_memory_gib());
}

}  // namespace
}  // namespace titan
