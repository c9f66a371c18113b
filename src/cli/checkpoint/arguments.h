#pragma once

// The words behind `titan checkpoint COMMAND`; see cli/arguments.h.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace titan::cli {

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

}  // namespace titan::cli
