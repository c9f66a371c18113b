#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "guard/startup_watch.h"
#include "titan/core/error.h"
#include "train/policies/interruption.h"

namespace titan::train {
namespace {

constexpr int kNoted = 42, kNotEnded = 99;

/// A start in a separate process.
struct Start {
  const char* name;
  bool has_launcher = false;  ///< this process, which sends the signal, is the launcher
  int note = 0;               ///< sent with the signal
  std::function<int(const StopCause&)> on_end = {};
  int expected_code = 0;
  bool is_short = false;  ///< ends before the signal must be obeyed
};

/// Writes to `ready` when it can receive signals.
[[noreturn]] void begin(const Start& start, int ready) {
  const SignalWatch signals(start.has_launcher ? ::getppid() : 0);
  StartupWatch watch(start.on_end);
  if (::write(ready, "r", 1) != 1) ::_exit(1);
  if (start.is_short) {
    for (int i = 0; i < 2000 && noted_signal() == 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    watch.end();
    ::_exit(noted_signal() == SIGTERM ? kNoted : 1);
  }
  std::this_thread::sleep_for(std::chrono::seconds(60));
  ::_exit(kNotEnded);
}

int code_of(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status); }

// All starts run at once: each has five seconds to end by itself.
TEST(StartupWatch, EndsALongStartWithTheExitCodeOfItsCause) {
  const auto code_of_agent = [](const StopCause& stop) { return stop.by_launcher ? 128 + stop.signal : 7; };
  const std::vector<Start> starts = {
      {.name = "asked by the launcher", .has_launcher = true, .on_end = code_of_agent, .expected_code = 143},
      {.name = "asked by another process", .on_end = code_of_agent, .expected_code = 7},
      {.name = "asked because a peer has failed",
       .has_launcher = true,
       .note = kPeerHasFailed,
       .on_end = code_of_agent,
       .expected_code = 0},
      {.name = "an end that fails",
       .on_end = [](const StopCause& /*stop*/) -> int { throw Error("this end fails on purpose"); },
       .expected_code = 1},
      {.name = "without on_end", .has_launcher = true, .expected_code = 0},
      {.name = "a short start", .on_end = code_of_agent, .expected_code = kNoted, .is_short = true},
  };
  std::vector<pid_t> processes;
  for (const Start& start : starts) {
    int ready[2];
    ASSERT_EQ(::pipe(ready), 0);
    const pid_t process = ::fork();
    if (process == 0) begin(start, ready[1]);
    ::close(ready[1]);
    char byte = 0;
    ASSERT_EQ(::read(ready[0], &byte, 1), 1) << start.name;
    ::close(ready[0]);
    ::sigqueue(process, SIGTERM, {.sival_int = start.note});
    processes.push_back(process);
  }
  for (size_t i = 0; i < starts.size(); ++i) {
    int status = 0;
    ::waitpid(processes[i], &status, 0);
    EXPECT_EQ(code_of(status), starts[i].expected_code) << starts[i].name;
  }
}

}  // namespace
}  // namespace titan::train
