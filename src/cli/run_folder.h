#pragma once

// A run's folder: config.toml, metrics.jsonl, validation.jsonl, plan.json and the checkpoints as they are now,
// and its history: what its processes did and how they ended, from the structured logs of its ranks
// (observe/structured_log.h). `titan top`, `report`, `sweep` and `compare` read runs through this header.

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace titan::cli {

/// Values of a metric by step: (step, value). Rows without a number (an infinite loss is null) are left out.
using Curve = std::vector<std::pair<double, double>>;

/// How lines that aren't rows are handled. A full disk or a power failure leaves such lines.
enum class BadLines { Skip, Refuse };

struct RowOptions {
  int64_t tail_bytes = -1;  ///< only rows that begin in this many last bytes; -1: all
  BadLines bad_lines = BadLines::Skip;
};

/// Rows of metrics.jsonl or validation.jsonl.
class MetricRows {
 public:
  MetricRows() = default;
  /// A missing file has no rows. A last line without its newline is ignored: the run was killed while it
  /// wrote it. With BadLines::Refuse, throws Error that names the line.
  explicit MetricRows(const std::filesystem::path& path, const RowOptions& options = {});

  bool empty() const { return steps_.empty(); }
  size_t size() const { return steps_.size(); }
  int64_t step(size_t row) const { return steps_[row]; }
  int64_t last_step() const { return empty() ? 0 : steps_.back(); }
  std::optional<double> value(size_t row, const char* key) const;
  std::optional<double> last(const char* key) const;
  Curve curve(const char* key) const;
  /// By the last row of a step.
  bool has_step(int64_t step) const { return rows_.contains(step); }
  double value_at_step(int64_t step, const char* key) const;  ///< NaN: none

 private:
  void add(const nlohmann::json& row);

  std::vector<int64_t> steps_;
  std::unordered_map<int64_t, size_t> rows_;            // the last row of each step
  std::map<std::string, std::vector<double>> columns_;  // NaN: the row has no such number
};

/// The median over the steps after the first, which pays for set-up; none without values.
std::optional<double> median_after_first(Curve curve);

struct RunFolder {
  std::filesystem::path folder;
  std::map<std::string, std::string> settings;  ///< full name -> value as TOML
  MetricRows steps;
  MetricRows validations;  ///< by the training step that they followed

  /// The value as TOML; "" if the run has no such setting.
  std::string setting(const std::string& key) const;
  /// A string's value, without quotes and escapes.
  std::string text_setting(const std::string& key) const;
  int64_t total_steps() const;
  /// The folder within this one that the setting `key` names; `usual`: its default.
  std::filesystem::path folder_of(const std::string& key, const std::string& usual) const;
  std::filesystem::path checkpoint_folder() const { return folder_of("checkpoint.folder", "checkpoint"); }
};

/// Throws ConfigError when the folder has no config.toml.
RunFolder read_run_folder(const std::filesystem::path& folder, const RowOptions& options = {});

/// RunFolder::folder_of() of a folder that may have no config.toml.
std::filesystem::path folder_of_setting(const std::filesystem::path& run, const std::string& key,
                                        const std::string& usual);

/// The tensors that a rank keeps from step to step, in GiB.
struct LastingMemory {
  double parameters = 0, gradients = 0, optimizer = 0;  ///< its shards'
  double sum() const { return parameters + gradients + optimizer; }
};

/// The planned memory of one rank, and of those after it up to the next such rank.
struct PlannedPeak {
  std::string role;  ///< "every rank", "pipeline rank 1"
  int rank = 0;
  double reserved_gib = 0;  ///< from the device
};

/// A run's plan: the figures that rank 0 of the run measures, too.
struct RunPlan {
  std::string device;
  int world_size = 0;
  double step_s = 0;
  double tps = 0;                              ///< tokens/s, per device
  double mfu = 0;                              ///< percent
  double reserved_gib = 0, allocated_gib = 0;  ///< peaks: from the device, and in tensors
  double compute_s = 0, optimizer_s = 0, exposed_communication_s = 0, bubble_s = 0,
         host_s = 0;                ///< parts of a step
  bool has_parts_of_rank_0 = true;  ///< else they are another rank's, which has more to do
  LastingMemory lasting = {};
  /// The rest of the peak in tensors, in GiB by category.
  std::vector<std::pair<std::string, double>> rest = {};
  std::vector<PlannedPeak> peaks = {};  ///< by rank; the first is rank 0's
  std::vector<std::string> notes = {};  ///< the parts of the job that it leaves out, or plans in another way
};
/// In the run's folder: what `titan plan --json` printed.
inline constexpr const char* kPlanFile = "plan.json";
/// Throws Error if the text is something else.
RunPlan read_plan(const std::string& text);
/// In the run's folder: LastingMemory of rank 0, as measured. Written if there is a plan.
inline constexpr const char* kMemoryFile = "memory.json";
std::string to_json(const LastingMemory& memory, int64_t step);
/// nullopt if the file is missing or something else.
std::optional<LastingMemory> read_memory_file(const std::filesystem::path& run);

struct LoggedEvent {
  enum class Kind { Start, End, Error, Instant };
  Kind kind = Kind::Instant;
  std::string name;             ///< without the suffix of a span's start or end
  int64_t time_us = 0;          ///< since 1970
  std::optional<double> value;  ///< for an end, the span's duration in milliseconds
  int64_t step = 0;
  int64_t thread = 0;
  int64_t relative_step = 0;  ///< counts its process's steps from 1; 0 before the first
};

/// The events that one process logged, in order of time.
struct ProcessLog {
  int rank = 0;
  int64_t pid = 0;
  std::string host;
  nlohmann::ordered_json environment;  ///< an object; empty if the log has none
  std::vector<LoggedEvent> events;

  int64_t first_us() const { return events.empty() ? 0 : events.front().time_us; }
  int64_t last_us() const { return events.empty() ? 0 : events.back().time_us; }
  double seconds() const { return static_cast<double>(last_us() - first_us()) * 1e-6; }
  std::string world_size() const;  ///< "" if the log doesn't have it
  /// The last event of this name (and kind), or null.
  const LoggedEvent* last(const std::string& name, std::optional<LoggedEvent::Kind> kind = {}) const;
  /// Its value, if it has one.
  std::optional<double> value(const std::string& name) const;
};

/// The log files of one process: the rotated one, then the current one.
struct ProcessFiles {
  int rank = 0;
  std::string stem;  ///< has the process's start time after the rank
  std::vector<std::filesystem::path> paths;
};

/// The folder of a run's structured logs; `folder` may be the run's or this one itself. Empty if there is
/// none.
std::filesystem::path structured_folder(const std::filesystem::path& folder);

/// The start time of a log's process, from the file's name; 0 if the name doesn't have it.
int64_t start_us(const ProcessFiles& files);

/// Sorted by rank, then by start time.
std::vector<ProcessFiles> list_structured_logs(const std::filesystem::path& folder);

struct ReadOptions {
  bool spans = true;        ///< false: instants and errors only, a small part of a log
  int64_t tail_bytes = -1;  ///< at most this many bytes at the end; -1: everything
  int64_t first_step = 0;   ///< only events from here to last_step are kept
  int64_t last_step = INT64_MAX;
};

/// Skips lines that aren't events (a killed process may leave half a line).
ProcessLog read_structured_log(const ProcessFiles& files, const ReadOptions& options = {});

/// An error that a rank logged.
struct RankError {
  int rank = 0;
  std::string host;
  LoggedEvent event;
};
/// The errors in these logs.
std::vector<RankError> errors_in(const std::vector<ProcessLog>& ranks);

struct RunHistory : RunFolder {
  /// The processes of rank 0, by start time. If the run started anew in this folder, earlier ones aren't part
  /// of it.
  std::vector<ProcessLog> processes;
  /// Errors of other ranks, for starts in which rank 0 was killed before it could log its end.
  std::vector<RankError> errors;
};

/// Throws ConfigError when the folder holds no run.
RunHistory read_history(const std::filesystem::path& folder);

/// How a process ended, by its log.
struct ProcessEnd {
  enum class Kind { Completed, Stopped, Failed, Silent };
  Kind kind = Kind::Silent;  ///< killed, or still running
  std::string words;
};
/// `errors`: those of other ranks; only errors during this process count. `next_start_us`: the start of the
/// run's next process; INT64_MAX: there is none yet.
ProcessEnd end_of(const ProcessLog& process, int64_t now_us, const std::vector<RankError>& errors = {},
                  int64_t next_start_us = INT64_MAX);
/// Whether `process` failed before its first step and the run had already been completed by an earlier one.
bool is_failed_restart(const ProcessEnd& end, const ProcessLog& process, const RunFolder& run);
/// The innermost span that hasn't ended, or "".
std::string phase_of(const ProcessLog& process);
/// How the i-th process of a run ended.
ProcessEnd end_of(const RunHistory& run, size_t i, int64_t now_us);

struct StepRange {
  int64_t first = 0, last = 0;  ///< 0: none
};
/// The steps that this process trained, without a step that all ranks skipped because they agreed to stop.
StepRange steps_of(const ProcessLog& process);

/// The log files of each rank's newest process, without ranks that the run no longer has (it resumed with
/// fewer). At most `most_ranks`, spread evenly.
std::vector<ProcessFiles> newest_files(const std::filesystem::path& run, size_t most_ranks);
std::vector<ProcessLog> newest_of_ranks(const std::filesystem::path& run, size_t most_ranks,
                                        const ReadOptions& options);

int64_t now_us();

/// Reads the ends of the ranks' newest logs repeatedly, to watch a run.
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
    int64_t size = 0;
    ProcessLog log;
  };
  ProcessLog read_one(const ProcessFiles& files, const Known* before) const;

  int64_t tail_bytes_;
  size_t most_ranks_;
  std::map<int, Known> known_;
};

// ---- several runs side by side, for titan compare

/// Throws ConfigError if the folder holds no run, and Error if a line of its metrics isn't a logged step.
RunFolder read_compared_run(const std::filesystem::path& folder);

/// The names of all settings but `job.dump_folder`, which always differs.
std::set<std::string> keys_of(const std::vector<RunFolder>& runs);

/// The losses to compare: &RunFolder::steps or &RunFolder::validations.
using Series = MetricRows RunFolder::*;
std::vector<int64_t> common_steps(const std::vector<RunFolder>& runs, Series series);

struct LossDifference {
  std::optional<int64_t> first_step;  ///< the first step whose losses aren't the same double
  double largest_difference = 0;
  int64_t largest_step = 0;
};
/// `steps`: steps that both runs have.
LossDifference compare_losses(const MetricRows& a, const MetricRows& b, const std::vector<int64_t>& steps);

}  // namespace titan::cli
