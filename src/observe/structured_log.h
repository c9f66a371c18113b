#pragma once

// The structured log: each rank's activity over time, for tools. Each line is a JSON object, for a span's
// start or end or for an instant, in
//   {dump_folder}/structured_logs/train.global_rank_<r>.<YYYYmmdd-HHMMSS-microseconds>-<6 characters>.jsonl
// (UTC), with TorchTitan's fields and names (docs/observability.md). One file per process; `titan debug
// events` merges those of all ranks into one trace, and `titan report` and `titan top` read them.
//
// The training thread puts events of fixed size into a queue, under a lock that is held for nanoseconds.
// The log's thread writes the queue out every second and whenever 64 KiB are waiting.

#include <chrono>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include <c10/core/Device.h>

#include "core/durable.h"
#include "titan/config/table.h"
#include "titan/train/run_observer.h"

namespace titan::dist {
class World;
}

namespace titan::train {

/// [metrics.structured_logs]
struct StructuredLogSettings {
  bool enable = true;
  std::string folder = "structured_logs";  ///< under dump_folder
  int64_t max_mib = 64;                    ///< per process; beyond that the older half is dropped
  int64_t keep_latest_k = 50;              ///< how many processes of a rank keep their logs
};

void describe(config::Table<StructuredLogSettings>& table);

class StructuredLog : public RunObserver {
 public:
  struct Options {
    std::filesystem::path folder;
    int rank = 0;
    int local_rank = 0;
    int64_t max_bytes = int64_t{64} << 20;
    size_t kept_processes = 50;
    std::chrono::milliseconds retry{60'000};  ///< after a failed write
    std::string environment = "{}";           ///< for the first line: process_environment_json()
  };

  /// Touches no file: the log's thread creates folder and file. If it can't write, it warns, drops and counts
  /// the events, and tries again every minute.
  explicit StructuredLog(Options options);
  /// Writes what is queued.
  ~StructuredLog() override;

  void begin(Phase phase, int64_t step) override;
  void end(Phase phase, int64_t step, bool failed) override;
  void logged(const StepMetrics& metrics) override;
  void stopped(int signal) override;

  // Thread-safe. Names and callers must outlive the log: use literals.
  /// `step`: which one `value` is of; 0: the one in progress.
  void instant(const char* name, std::optional<double> value = {}, const char* caller = "", int64_t step = 0);
  void start_span(const char* name, const char* caller = "");
  void end_span(const char* name, bool failed, const char* caller = "");
  /// Adds a span "startup" of `seconds` that ends now, for the time before this object existed.
  void startup(double seconds);

  /// Returns when every event so far has been given to the operating system or reported as lost.
  void flush();

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

/// A span for a scope; does nothing if `log` is null.
class StructuredSpan {
 public:
  StructuredSpan(StructuredLog* log, const char* name, const char* caller = "")
      : log_(log), name_(name), caller_(caller) {
    if (log_) log_->start_span(name_, caller_);
  }
  ~StructuredSpan() {
    if (log_) log_->end_span(name_, std::uncaught_exceptions() > exceptions_, caller_);
  }
  StructuredSpan(const StructuredSpan&) = delete;
  StructuredSpan& operator=(const StructuredSpan&) = delete;

 private:
  StructuredLog* log_;
  const char* name_;
  const char* caller_;
  int exceptions_ = std::uncaught_exceptions();
};

/// A JSON object for a log's first line: versions, machine, device, place in the job, command line, threads.
std::string process_environment_json(const dist::World& world, at::Device device);

/// Bounded by `max_bytes`: `<stem>.jsonl` takes half of them. When that is full it becomes
/// `<stem>.earlier.jsonl`, replacing the previous such file, and a new one starts with `head`.
class StructuredFile {
 public:
  StructuredFile(std::filesystem::path folder, std::string stem, int64_t max_bytes)
      : folder_(std::move(folder)), stem_(std::move(stem)), max_bytes_(max_bytes) {}

  bool is_open() const { return file_ != nullptr; }
  bool is_full() const { return is_open() && written_ >= max_bytes_ / 2; }
  /// Opens the first file, or the next one. Throws Error.
  void open(const std::string& head);
  /// After an error, close, then reopen() to append. The file may end within a line.
  void close() { file_.reset(); }
  void reopen(const std::string& head);
  /// Throws Error.
  void append(const std::string& lines);

 private:
  std::filesystem::path path(const char* suffix) const { return folder_ / (stem_ + suffix); }

  std::filesystem::path folder_;
  std::string stem_;
  int64_t max_bytes_;
  int64_t written_ = 0;
  std::unique_ptr<AppendFile> file_;
};

/// "train.global_rank_3.20261121-234000-123456-a1b2c3", for a process that starts now. UTC with microseconds,
/// so that names sort by start time: on any host, across clock changes, and within a second.
std::string structured_stem(int rank);

/// The steady clock, in nanoseconds.
int64_t steady_now_ns();

}  // namespace titan::train
