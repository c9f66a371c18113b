#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"

namespace titan::cli {

/// One line on the terminal, written over itself; without a terminal nothing.
class Progress {
 public:
  Progress();
  ~Progress();  ///< ends the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Ten times a second at most. By one thread at a time.
  void show(int64_t bytes, int64_t total);

 private:
  using Clock = std::chrono::steady_clock;
  bool shows_, shown_ = false;
  Clock::time_point start_ = Clock::now(), last_;
};

// The words behind `titan checkpoint COMMAND`; see cli/arguments.h.

/// `FROM TO [--config FILE] [--dtype DTYPE] [--shard-gb SIZE]`
struct ConvertArguments {
  std::string help;
  std::filesystem::path from, to;
  std::filesystem::path config;  ///< empty: none
  std::string dtype;             ///< empty: each tensor's own
  double shard_gb = 5;
};
ConvertArguments parse_convert_arguments(const std::vector<std::string>& words);

/// `FOLDER [--json]`
struct LsArguments {
  std::string help;
  std::filesystem::path folder;
  bool json = false;
};
LsArguments parse_ls_arguments(const std::vector<std::string>& words);

/// `STEP_FOLDER [--stats] [--tensors REGEX] [--json]`
struct InfoArguments {
  std::string help;
  std::filesystem::path folder;
  bool stats = false;
  std::string tensors;  ///< empty: all
  bool json = false;
};
InfoArguments parse_info_arguments(const std::vector<std::string>& words);

/// `STEP_FOLDER [--threads N]`
struct VerifyArguments {
  std::string help;
  std::filesystem::path folder;
  int num_threads = 0;  ///< 0: as many as there are cores, 8 at most
};
VerifyArguments parse_verify_arguments(const std::vector<std::string>& words);

/// `A B [--tensors REGEX]`
struct DiffArguments {
  std::string help;
  std::filesystem::path a, b;
  std::string tensors;  ///< empty: all
};
DiffArguments parse_diff_arguments(const std::vector<std::string>& words);

/// `FOLDER --keep K [--dry-run] [--force]`
struct PruneArguments {
  std::string help;
  std::filesystem::path folder;
  int64_t keep = 0;
  bool dry_run = false;
  bool force = false;  ///< where a lock can't tell whether a run writes there
};
PruneArguments parse_prune_arguments(const std::vector<std::string>& words);

// `titan checkpoint COMMAND`, none of which starts a job. `arguments` are the words behind the command's
// name.

int checkpoint_convert(const Arguments& arguments);
int checkpoint_ls(const Arguments& arguments);
int checkpoint_info(const Arguments& arguments);
int checkpoint_verify(const Arguments& arguments);
int checkpoint_diff(const Arguments& arguments);
int checkpoint_prune(const Arguments& arguments);

// What a user's path means. `command`: "ls", for the message. Throw ConfigError that says what the path is
// instead, and which one may have been meant.

/// A folder of steps, or the one below a run's folder.
std::filesystem::path steps_folder(const std::filesystem::path& given, std::string_view command);
/// A step's folder, whole or damaged, but of a checkpoint.
std::filesystem::path step_folder(const std::filesystem::path& given, std::string_view command);
/// Whether a folder is a model alone: model.safetensors, or Hugging Face's form.
bool holds_model_only(const std::filesystem::path& folder);

/// Which tensors are meant: all for an empty pattern. Throws ConfigError for what is no regular expression.
std::function<bool(const std::string&)> tensor_filter(const std::string& pattern);

}  // namespace titan::cli
