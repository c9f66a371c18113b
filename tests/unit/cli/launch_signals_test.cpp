#include "cli/launch/signals.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

namespace titan::cli {
namespace {

void wait_out_same_signal() { std::this_thread::sleep_for(kSameSignal + std::chrono::milliseconds(50)); }

TEST(SecondRequest, ComesAfterAFirstRequest) {
  SignalReader signals;
  SecondRequest request(std::nullopt);
  EXPECT_FALSE(request.has_come(signals));
  wait_out_same_signal();
  raise(SIGTERM);
  EXPECT_FALSE(request.has_come(signals));
  raise(SIGINT);  // within a second it is the same request
  EXPECT_FALSE(request.has_come(signals));
  wait_out_same_signal();
  raise(SIGUSR2);
  raise(SIGQUIT);
  EXPECT_FALSE(request.has_come(signals)) << "these don't ask for the end";
  raise(SIGTERM);
  EXPECT_TRUE(request.has_come(signals));
  EXPECT_TRUE(request.has_come(signals));
}

TEST(SecondRequest, IsTheNextOneIfTheJobWasAsked) {
  SignalReader signals;
  SecondRequest request(SecondRequest::Clock::now());
  raise(SIGINT);
  EXPECT_FALSE(request.has_come(signals)) << "within a second of the first";
  wait_out_same_signal();
  raise(SIGHUP);
  EXPECT_TRUE(request.has_come(signals));

  SecondRequest after_an_old_one(SecondRequest::Clock::now() - 2 * kSameSignal);
  raise(SIGTERM);
  EXPECT_TRUE(after_an_old_one.has_come(signals));
}

TEST(TakenSignals, IncludeHandledOnesAndOnesReadFromADescriptor) {
  EXPECT_FALSE(takes(getpid(), SIGUSR2));
  {
    SignalReader signals;
    EXPECT_TRUE(takes(getpid(), SIGUSR2));
  }
  EXPECT_FALSE(takes(getpid(), SIGUSR2));
  const auto before = signal(SIGUSR2, [](int) {});
  EXPECT_TRUE(takes(getpid(), SIGUSR2));
  signal(SIGUSR2, SIG_IGN);
  EXPECT_FALSE(takes(getpid(), SIGUSR2)) << "it is ignored";
  signal(SIGUSR2, before);
  EXPECT_FALSE(takes(999'999'999, SIGUSR2)) << "there is no such process";
}

// A shell blocks all signals while it starts a program. A signal that comes then ends the program as soon as
// it runs.
TEST(TakenSignals, AreNoneWhileAllSignalsAreBlocked) {
  sigset_t set, before;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR2);
  sigprocmask(SIG_SETMASK, &set, &before);
  EXPECT_TRUE(takes(getpid(), SIGUSR2));
  sigfillset(&set);
  sigprocmask(SIG_SETMASK, &set, nullptr);
  EXPECT_FALSE(takes(getpid(), SIGUSR2));
  const auto handler = signal(SIGUSR2, [](int) {});
  EXPECT_TRUE(takes(getpid(), SIGUSR2)) << "it has a handler, which runs a moment later";
  signal(SIGUSR2, handler);
  sigprocmask(SIG_SETMASK, &before, nullptr);
}

/// Starts a process in `group` (0: its own) that runs `action` at SIGQUIT, and otherwise waits.
pid_t start_waiting(pid_t group, void (*action)(int)) {
  int ready[2];
  EXPECT_EQ(pipe(ready), 0);
  const pid_t process = fork();
  if (process == 0) {
    setpgid(0, group);
    alarm(60);  // even if the test dies
    signal(SIGQUIT, action);
    if (write(ready[1], "r", 1) != 1) _exit(1);
    while (true) pause();
  }
  close(ready[1]);
  char byte = 0;
  EXPECT_EQ(read(ready[0], &byte, 1), 1);
  close(ready[0]);
  return process;
}

int status_of(pid_t process) {
  int status = 0;
  waitpid(process, &status, 0);
  return status;
}

TEST(TakenSignals, GoOnlyToProcessesOfTheGroupWithAHandler) {
  const pid_t ignores = start_waiting(0, SIG_IGN);
  const pid_t dies_of_it = start_waiting(ignores, SIG_DFL);
  EXPECT_EQ(signal_takers(ignores, SIGQUIT), 0) << "neither has a handler";
  const pid_t answers = start_waiting(ignores, [](int) { _exit(42); });
  const pid_t in_another_group = start_waiting(0, [](int) { _exit(43); });
  EXPECT_EQ(signal_takers(ignores, SIGQUIT), 1);
  const int answer = status_of(answers);
  EXPECT_TRUE(WIFEXITED(answer) && WEXITSTATUS(answer) == 42) << answer;
  for (const pid_t process : {ignores, dies_of_it, in_another_group}) {
    kill(process, SIGKILL);
    const int status = status_of(process);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "it ended earlier: " << status;
  }
}

}  // namespace
}  // namespace titan::cli
