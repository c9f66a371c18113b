#pragma once

// Runs programs from a test: several at once, with their own variables, output kept, time limited.

#include <atomic>
#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace titan::testing {

struct CommandResult {
  int status = 0;        ///< exit code, or 128 + signal
  std::string out, err;  ///< whole standard output and standard error
  double elapsed_s = 0;
};

/// A started program. The destructor kills it (and its process group) if it is still running.
class Command {
 public:
  using Variables = std::map<std::string, std::string>;
  /// `variables` are added to this process's; an empty value removes one.
  explicit Command(const std::vector<std::string>& words, const Variables& variables = {});
  Command(Command&& other) noexcept;
  ~Command();

  int pid() const { return pid_; }
  /// Sends a signal to the program alone.
  void signal(int number) const;
  std::string output() const;  ///< standard output so far
  /// Waits until standard output contains `text`; false when it didn't within the limit.
  bool wait_for_output(const std::string& text, double limit_s = 30) const;
  /// The same of standard error.
  bool wait_for_errors(const std::string& text, double limit_s = 30) const;
  /// Waits for the end; kills it after the limit (status 128 + 9).
  CommandResult wait(double limit_s = 60);

 private:
  int pid_ = -1;
  std::filesystem::path folder_;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
};

/// How late a thread of this process gets its turn, all in all, while it lives: by so much a bound on a time
/// is missed on a machine that has more to do, and is nobody's fault.
class MachineLag {
 public:
  MachineLag();
  double seconds() const { return seconds_; }

 private:
  std::atomic<double> seconds_{0};
  std::jthread thread_;
};

/// A port for a job's store, of no other job on this host: the same for a whole test.
std::string some_port();

CommandResult run(const std::vector<std::string>& words, const Command::Variables& variables = {},
                  double limit_s = 60);

}  // namespace titan::testing
