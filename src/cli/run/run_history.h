#pragma once

// All that a run's folder says of the run: settings, figures, what its processes did and how they ended.

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/run/structured_events.h"

namespace titan::cli {

/// Of a figure over the steps: step, value. What isn't a number (an infinite loss is null) is left out.
using Curve = std::vector<std::pair<double, double>>;

/// Rows of metrics.jsonl or validation.jsonl. What isn't a row is passed over: a disk that was full, or a
/// machine that lost its power, leaves such lines.
class FigureRows {
 public:
  FigureRows() = default;
  /// A file that isn't there has no rows, and neither has a last line without its newline. `tail_bytes`: only
  /// the rows that begin in the last so many bytes; -1: all.
  explicit FigureRows(const std::filesystem::path& path, int64_t tail_bytes = -1);

  bool empty() const { return steps_.empty(); }
  size_t size() const { return steps_.size(); }
  int64_t step(size_t row) const { return steps_[row]; }
  int64_t first_step() const;
  int64_t last_step() const;  ///< 0 without rows
  std::optional<double> value(size_t row, const char* key) const;
  std::optional<double> last(const char* key) const;
  Curve curve(const char* key) const;

 private:
  void add(const nlohmann::json& row);

  std::vector<int64_t> steps_;
  std::map<std::string, std::vector<double>> columns_;  // NaN: this row has no such number
};

/// The error of a rank.
struct RankError {
  int rank = 0;
  std::string host;
  LoggedEvent event;
};
/// The errors in these logs.
std::vector<RankError> errors_in(const std::vector<ProcessLog>& ranks);

struct RunHistory {
  std::filesystem::path folder;
  std::map<std::string, std::string> settings;  ///< full name -> value as TOML
  FigureRows steps;
  FigureRows validations;
  /// Of rank 0, by their start; what they did before the run last began anew isn't part of it.
  std::vector<ProcessLog> processes;
  /// Of other ranks, in those starts that rank 0 doesn't tell the end of: it was ended for them.
  std::vector<RankError> errors;

  /// As TOML writes it; "" where the run has no such setting.
  std::string setting(const std::string& key) const;
  /// A string's value, without the quotes.
  std::string text_setting(const std::string& key) const;
  int64_t total_steps() const;
  std::filesystem::path checkpoint_folder() const;
};

/// Throws ConfigError when the folder holds no run.
RunHistory read_history(const std::filesystem::path& folder, const ReadOptions& options = {});

/// How a process ended, by its log.
struct ProcessEnd {
  enum class Kind { Completed, Stopped, Failed, Silent };
  Kind kind = Kind::Silent;  ///< killed, or still at work
  std::string words;
};
/// `errors`: of other ranks, of which those count that came while this process was there. `next_start_us`: of
/// the run's next process; INT64_MAX: there is none yet.
ProcessEnd end_of(const ProcessLog& process, int64_t now_us, const std::vector<RankError>& errors = {},
                  int64_t next_start_us = INT64_MAX);
/// The innermost span that hasn't ended; "": none.
std::string phase_of(const ProcessLog& process);
/// Of the i-th process of a run.
ProcessEnd end_of(const RunHistory& run, size_t i, int64_t now_us);

struct StepRange {
  int64_t first = 0, last = 0;  ///< 0: none
};
/// That this process trained. One that all ranks agreed not to make, as they were to stop, isn't among them.
StepRange steps_of(const ProcessLog& process);

/// Of each rank's newest process. Ranks that the run has no more of (it went on with fewer) aren't among
/// them. At most `most_ranks`, spread evenly.
std::vector<ProcessFiles> newest_files(const std::filesystem::path& run, size_t most_ranks);
std::vector<ProcessLog> newest_of_ranks(const std::filesystem::path& run, size_t most_ranks,
                                        const ReadOptions& options);

int64_t now_us();

// The ends of the ranks' newest logs, looked at again and again by somebody who watches a run.

class RankTails {
 public:
  /// `tail_bytes` of each log, of at most `most_ranks`.
  RankTails(int64_t tail_bytes, size_t most_ranks) : tail_bytes_(tail_bytes), most_ranks_(most_ranks) {}

  /// As the files stand now: those that haven't grown since the last look aren't read again. Where a tail
  /// holds no figures (they come each log_freq steps, and steps leave many lines), the last ones from before
  /// it stand in front.
  std::vector<ProcessLog> read(const std::filesystem::path& run);

 private:
  struct Known {
    std::filesystem::path path;
    uintmax_t size = 0;
    ProcessLog log;
  };
  ProcessLog read_one(const ProcessFiles& files, const Known* before) const;

  int64_t tail_bytes_;
  size_t most_ranks_;
  std::map<int, Known> known_;
};

}  // namespace titan::cli
