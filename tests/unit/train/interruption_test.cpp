#include "train/policies/interruption.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace titan::train {
namespace {

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Runs `body` in a child process, because signals belong to a process. Returns its exit code, or 128 + the
// signal that ended it.
template <class Body>
int code_of_child(Body body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGHUP, SIG_DFL);  // under nohup it is ignored
    ::_exit(body());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int noted_within(int ms) {
  for (int i = 0; i < ms && noted_signal() == 0; ++i) sleep_ms(1);
  return noted_signal();
}

class EachSignal : public ::testing::TestWithParam<int> {};

TEST_P(EachSignal, IsNotedAndEndsNothing) {
  const int signal = GetParam();
  EXPECT_EQ(code_of_child([=] {
              const SignalWatch watch;
              if (noted_signal() != 0) return 1;
              ::kill(::getpid(), signal);
              return noted_within(2000) == signal ? 42 : 2;
            }),
            42);
}

TEST_P(EachSignal, EndsTheProcessAsASecondSignal) {
  const int signal = GetParam();
  EXPECT_EQ(code_of_child([=] {
              const SignalWatch watch;
              ::kill(::getpid(), SIGUSR1);
              noted_within(2000);
              sleep_ms(300);
              ::kill(::getpid(), signal);
              sleep_ms(5000);
              return 1;
            }),
            128 + signal);
}

TEST(Interruption, RecordsTheSender) {
  for (const bool by_launcher : {false, true})
    EXPECT_EQ(code_of_child([=] {
                const SignalWatch watch(by_launcher ? ::getpid() : ::getppid());
                if (noted_by_launcher()) return 1;
                ::kill(::getpid(), SIGTERM);
                if (noted_within(2000) != SIGTERM) return 2;
                return noted_by_launcher() == by_launcher ? 42 : 3;
              }),
              42);
}

// A launcher's forwarded signal arrives right after the one that was sent to the whole process group.
TEST_P(EachSignal, CountsTwoSignalsAtOnceAsOne) {
  const int signal = GetParam();
  int code = 0;
  // On a busy machine the second one may come so late that it counts, but not five times in a row.
  for (int i = 0; i < 5 && code != 42; ++i)
    code = code_of_child([=] {
      const SignalWatch watch;
      ::kill(::getpid(), signal);
      noted_within(2000);
      ::kill(::getpid(), signal);
      sleep_ms(100);
      return 42;
    });
  EXPECT_EQ(code, 42);
}

// However late the launcher forwards one: to end a rank at once, it sends SIGKILL.
TEST_P(EachSignal, IgnoresTheLaunchersRepeat) {
  const int signal = GetParam();
  EXPECT_EQ(code_of_child([=] {
              sigset_t ready;
              ::sigemptyset(&ready);
              ::sigaddset(&ready, SIGUSR2);
              ::sigprocmask(SIG_BLOCK, &ready, nullptr);
              const pid_t rank = ::fork();
              if (rank == 0) {
                const SignalWatch watch(::getppid());
                ::kill(::getpid(), SIGUSR1);
                noted_within(2000);
                sleep_ms(500);
                ::kill(::getppid(), SIGUSR2);  // the rank is ready for the next signal
                sleep_ms(300);
                ::_exit(42);
              }
              int unused = 0;
              ::sigwait(&ready, &unused);
              ::kill(rank, signal);
              int status = 0;
              ::waitpid(rank, &status, 0);
              return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
            }),
            42);
}

TEST(Interruption, LauncherReportsAFailedPeer) {
  EXPECT_EQ(code_of_child([] {
              const SignalWatch watch(::getpid());
              ::sigqueue(::getpid(), SIGTERM, {.sival_int = kPeerHasFailed});
              return noted_within(2000) == SIGTERM && peer_has_failed() ? 42 : 1;
            }),
            42);
  EXPECT_EQ(code_of_child([] {
              const SignalWatch watch;  // with another launcher
              ::sigqueue(::getpid(), SIGTERM, {.sival_int = kPeerHasFailed});
              return noted_within(2000) == SIGTERM && !peer_has_failed() ? 42 : 1;
            }),
            42);
}

TEST(Interruption, LauncherReportsAGrowingGroup) {
  EXPECT_EQ(code_of_child([] {
              const SignalWatch watch(::getpid());
              ::sigqueue(::getpid(), SIGTERM, {.sival_int = kGroupGrows});
              return noted_within(2000) == SIGTERM && group_grows() && !peer_has_failed() ? 42 : 1;
            }),
            42);
  EXPECT_EQ(code_of_child([] {
              const SignalWatch watch(::getpid());
              ::kill(::getpid(), SIGTERM);  // from a user who ends the job
              return noted_within(2000) == SIGTERM && !group_grows() ? 42 : 1;
            }),
            42);
}

TEST_P(EachSignal, RestoresTheDefaultAction) {
  const int signal = GetParam();
  EXPECT_EQ(code_of_child([=] {
              { const SignalWatch watch; }
              ::kill(::getpid(), signal);
              sleep_ms(5000);
              return 1;
            }),
            128 + signal);
}

INSTANTIATE_TEST_SUITE_P(Interruption, EachSignal, ::testing::Values(SIGTERM, SIGINT, SIGUSR1, SIGHUP),
                         [](const auto& info) { return signal_name(info.param); });

TEST(Interruption, IgnoredSignalsStayIgnored) {
  EXPECT_EQ(code_of_child([] {
              ::signal(SIGINT, SIG_IGN);
              const SignalWatch watch;
              ::kill(::getpid(), SIGINT);
              return noted_within(100) == 0 ? 42 : 1;
            }),
            42);
}

// A read that a signal interrupts would look like a broken connection.
TEST(Interruption, OtherThreadsAreNotInterrupted) {
  EXPECT_EQ(code_of_child([] {
              const SignalWatch watch;
              std::atomic<int> interrupted{0};
              std::jthread sleeper([&] {
                timespec second{.tv_sec = 0, .tv_nsec = 400'000'000};
                interrupted = ::nanosleep(&second, nullptr) != 0;
              });
              sleep_ms(50);
              for (int i = 0; i < 20; ++i) ::kill(::getpid(), SIGTERM);
              timespec rest{.tv_sec = 0, .tv_nsec = 100'000'000};
              const bool here = ::nanosleep(&rest, nullptr) != 0;
              sleeper.join();
              return here || interrupted ? 1 : 42;
            }),
            42);
}

TEST(Interruption, NotifiesListenersOnceFromAnotherThread) {
  EXPECT_EQ(code_of_child([] {
              const SignalWatch watch;
              std::atomic<int> calls{0}, received{0};
              const SignalListener listener([&](int signal) {
                received = signal;
                ++calls;
              });
              ::kill(::getpid(), SIGUSR1);
              for (int i = 0; i < 2000 && calls == 0; ++i) sleep_ms(1);
              // A listener that is added later is notified too.
              std::atomic<int> late{0};
              const SignalListener latecomer([&](int signal) { late = signal; });
              return calls == 1 && received == SIGUSR1 && late == SIGUSR1 ? 42 : 1;
            }),
            42);
}

TEST(Interruption, NamesSignals) {
  EXPECT_EQ(signal_name(SIGTERM), "SIGTERM");
  EXPECT_EQ(signal_name(SIGUSR1), "SIGUSR1");
}

}  // namespace
}  // namespace titan::train
