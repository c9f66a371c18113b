#pragma once

// Runs programs from a test: several at once, with their own variables, captured output and a time limit.

#include <atomic>
#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>

namespace titan::testing {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

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
  /// Sends a signal only to the program.
  void signal(int number) const;
  std::string output() const;  ///< standard output so far
  /// Waits until standard output contains `text`; false if it didn't within the limit.
  bool wait_for_output(const std::string& text, double limit_s = 30) const;
  /// The same for standard error.
  bool wait_for_errors(const std::string& text, double limit_s = 30) const;
  /// Waits for the end; kills it after the limit (status 128 + 9).
  CommandResult wait(double limit_s = 60);

 private:
  int pid_ = -1;
  std::filesystem::path folder_;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
};

/// The total delay in scheduling this process's threads while it lives: on a busy machine, time limits may be
/// missed by that much without any fault.
class MachineLag {
 public:
  MachineLag();
  double seconds() const { return seconds_; }

 private:
  std::atomic<double> seconds_{0};
  std::jthread thread_;
};

/// Waits until `holds()` returns true; false if it doesn't within the limit.
template <class Condition>
bool wait_until(const Condition& holds, double limit_s = 60) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit_s);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
  }
  return true;
}

inline void sleep_s(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }
inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// The whole file; empty if there is none.
std::string text_of(const std::filesystem::path& file);
int count_of(const std::string& text, const std::string& part);

/// A folder for temporary files; removed with its contents.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const std::filesystem::path path;
};

/// A port for a job's store that no other job on this host uses: the same for a whole test.
std::string some_port();

CommandResult run(const std::vector<std::string>& words, const Command::Variables& variables = {},
                  double limit_s = 60);

}  // namespace titan::testing
