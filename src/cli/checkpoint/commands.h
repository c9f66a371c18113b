#pragma once

// `titan checkpoint COMMAND`: looks into checkpoints and converts them. None of the commands starts a job.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "titan/checkpoint/manifest.h"
#include "titan/checkpoint/step_folder.h"

namespace titan::cli {

class Parser;

/// `FROM TO [--config FILE] [--dtype DTYPE] [--shard-gb SIZE]`
struct ConvertArguments {
  std::filesystem::path from, to;
  std::filesystem::path config;  ///< empty: none
  std::string dtype;             ///< empty: each tensor keeps its own
  double shard_gb = 5;
};
ConvertArguments parse_convert_arguments(const Arguments& words);
int checkpoint_convert(const Arguments& words);

/// `FOLDER [--json]`
struct LsArguments {
  std::filesystem::path folder;
  bool json = false;
};
LsArguments parse_ls_arguments(const Arguments& words);
int checkpoint_ls(const Arguments& words);

/// `FOLDER [--stats] [--tensors REGEX] [--json]`
struct InfoArguments {
  std::filesystem::path folder;
  bool stats = false;
  std::string tensors;  ///< empty: all
  bool json = false;
};
InfoArguments parse_info_arguments(const Arguments& words);
int checkpoint_info(const Arguments& words);

/// `FOLDER [--threads N]`
struct VerifyArguments {
  std::filesystem::path folder;
  int num_threads = 0;  ///< 0: one per core, at most 8
};
VerifyArguments parse_verify_arguments(const Arguments& words);
int checkpoint_verify(const Arguments& words);

/// `A B [--tensors REGEX]`
struct DiffArguments {
  std::filesystem::path a, b;
  std::string tensors;  ///< empty: all
};
DiffArguments parse_diff_arguments(const Arguments& words);
int checkpoint_diff(const Arguments& words);

/// `FOLDER --keep K [--dry-run] [--force]`
struct PruneArguments {
  std::filesystem::path folder;
  int64_t keep = 0;
  bool dry_run = false;
  bool force = false;  ///< for file systems without locks, where a running job can't be detected
};
PruneArguments parse_prune_arguments(const Arguments& words);
int checkpoint_prune(const Arguments& words);

// The folder that a user's path means. `command`: "ls", for messages. All throw ConfigError that says what
// the path is instead, and which folder the user may have meant.

/// A folder of steps: the given one, or the one in the given run's folder.
std::filesystem::path steps_folder(const std::filesystem::path& given, std::string_view command);
/// The folder of one step. The checkpoint in it may be damaged.
std::filesystem::path step_folder(const std::filesystem::path& given, std::string_view command);

/// Steps that hold only a model count as OfAnyKind, and as WithChecksums if they have a manifest.
enum class NewestStep { OfAnyKind, WithChecksums, WithState };
/// The same, or the newest step of the given run, which standard error then names.
std::filesystem::path step_or_newest(const std::filesystem::path& given, std::string_view command,
                                     NewestStep newest);
inline constexpr const char* kStepOrRunText = "a step's folder, or a run's: then its newest step";

/// The files and the health of a step, without reading its tensors.
struct StepHealth {
  checkpoint::StepEntry entry;
  std::optional<checkpoint::Manifest> manifest = {};  ///< if it is valid
  bool model_only = false;                            ///< a model alone, in either form
  std::vector<std::string> problems = {};             ///< empty: complete, or only a model
  int64_t num_bytes = 0;
  int64_t num_files = 0;

  /// "complete", "model only" or "damaged"
  const char* state_word() const;
  /// The same on one line with the first problem; `titan checkpoint verify` prints the others.
  std::string state() const;
  std::string written(bool utc = false) const;
};
StepHealth examine_step(const checkpoint::StepEntry& entry);

/// The option --tensors REGEX.
void add_tensors(Parser& parser, std::string& pattern);
/// Whether a tensor's name matches; an empty pattern matches all. Throws ConfigError if the pattern isn't a
/// regular expression.
std::function<bool(const std::string&)> tensor_filter(const std::string& pattern);

/// A progress line on the terminal that overwrites itself. Prints nothing without a terminal.
class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine();  ///< ends the line
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  /// Prints at most ten times a second. One thread at a time.
  void show(int64_t bytes, int64_t total);

 private:
  using Clock = std::chrono::steady_clock;
  bool on_terminal_, shown_ = false;
  Clock::time_point start_ = Clock::now(), last_;
};

}  // namespace titan::cli
