#pragma once

// A run's history: its folder, what its processes did, and how they ended.

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "cli/run/run_folder.h"
#include "cli/run/structured_events.h"

namespace titan::cli {

/// An error that a rank logged.
struct RankError {
  int rank = 0;
  std::string host;
  LoggedEvent event;
};
/// The errors in these logs.
std::vector<RankError> errors_in(const std::vector<ProcessLog>& ranks);

struct RunHistory : RunFolder {
  /// Of rank 0, by start time. If the run started anew in this folder, earlier processes aren't part of it.
  std::vector<ProcessLog> processes;
  /// Of other ranks, for starts in which rank 0 was killed before it could log its end.
  std::vector<RankError> errors;
};

/// Throws ConfigError when the folder holds no run.
RunHistory read_history(const std::filesystem::path& folder, const ReadOptions& options = {});

/// How a process ended, by its log.
struct ProcessEnd {
  enum class Kind { Completed, Stopped, Failed, Silent };
  Kind kind = Kind::Silent;  ///< killed, or still running
  std::string words;
};
/// `errors`: of other ranks; those that came while this process ran count. `next_start_us`: the start of the
/// run's next process; INT64_MAX: there is none yet.
ProcessEnd end_of(const ProcessLog& process, int64_t now_us, const std::vector<RankError>& errors = {},
                  int64_t next_start_us = INT64_MAX);
/// The innermost span that hasn't ended; "": none.
std::string phase_of(const ProcessLog& process);
/// How the i-th process of a run ended.
ProcessEnd end_of(const RunHistory& run, size_t i, int64_t now_us);

struct StepRange {
  int64_t first = 0, last = 0;  ///< 0: none
};
/// The steps that this process trained, without one that all ranks agreed to skip because they were to stop.
StepRange steps_of(const ProcessLog& process);

/// The log files of each rank's newest process, without ranks that the run no longer has (it resumed with
/// fewer). At most `most_ranks`, spread evenly.
std::vector<ProcessFiles> newest_files(const std::filesystem::path& run, size_t most_ranks);
std::vector<ProcessLog> newest_of_ranks(const std::filesystem::path& run, size_t most_ranks,
                                        const ReadOptions& options);

int64_t now_us();

/// Reads the ends of the ranks' newest logs again and again, to watch a run.
class RankTails {
 public:
  /// Reads `tail_bytes` of each log, of at most `most_ranks`.
  RankTails(int64_t tail_bytes, size_t most_ranks) : tail_bytes_(tail_bytes), most_ranks_(most_ranks) {}

  /// The logs as they are now. A file that hasn't grown isn't read again. If a tail has no metrics (they come
  /// every log_freq steps, and steps leave many lines), the last ones from before it come first.
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
