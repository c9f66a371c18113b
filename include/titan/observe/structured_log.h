#pragma once

// What each rank does over time, for tools: a JSON object a line, of a span's start or end or of an instant,
// in
//   {dump_folder}/structured_logs/train.global_rank_<r>.<YYYYmmdd-HHMMSS-microseconds>-<6 characters>.jsonl
// (UTC) with TorchTitan's fields and names (docs/observability.md). One file a process; `titan debug events`
// joins those of all ranks to one trace, and `titan report` and `titan top` read them.
//
// The training thread puts an event of fixed size into a queue, under a lock that is held for nanoseconds.
// A thread of the log's own writes what is queued, each second and whenever 64 KiB are waiting.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "titan/config/table.h"
#include "titan/train/run_observer.h"

namespace titan::train {

/// [metrics.structured_logs]
struct StructuredLogSettings {
  bool enable = true;
  std::string folder = "structured_logs";  ///< under dump_folder
  int64_t max_mib = 64;                    ///< of one process; the older half of more than this is dropped
  int64_t keep_latest_k = 50;              ///< of a rank's processes, logs of the newest so many
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
    std::chrono::milliseconds retry{60'000};  ///< after an error of the file
    std::string environment = "{}";  ///< a JSON object about process, machine and job, for the first line
  };

  /// Touches no file: the log's thread makes folder and file. Where it can't write, it warns, what was told
  /// meanwhile is lost (and counted), and it tries again each minute.
  explicit StructuredLog(Options options);
  /// Writes what is queued.
  ~StructuredLog() override;

  void begin(Phase phase, int64_t step) override;
  void end(Phase phase, int64_t step, bool failed) override;
  void logged(const StepMetrics& metrics) override;
  void stopped(int signal) override;

  // Names and callers have to outlive the log (literals). Thread-safe.
  void instant(const char* name, std::optional<double> value = {}, const char* caller = "");
  void start_span(const char* name, const char* caller = "");
  void end_span(const char* name, bool failed, const char* caller = "");
  /// The process before this object existed, as a span "startup" of so many seconds that ends now.
  void startup(double seconds);

  /// What was told so far has been handed to the operating system, or its loss been told.
  void flush();

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

/// A span as long as it lives; nothing where `log` is null.
class StructuredSpan {
 public:
  StructuredSpan(StructuredLog* log, const char* name, const char* caller = "");
  ~StructuredSpan();
  StructuredSpan(const StructuredSpan&) = delete;
  StructuredSpan& operator=(const StructuredSpan&) = delete;

 private:
  StructuredLog* log_;
  const char* name_;
  const char* caller_;
  int exceptions_;
};

}  // namespace titan::train
