#pragma once

// Every byte of a checkpoint against its checksums.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace titan::checkpoint {

struct Damage {
  std::filesystem::path file;
  std::string tensor;       ///< empty: the whole file, its header or the manifest
  int64_t first_block = 0;  ///< of a tensor's piece in this file, kBlockBytes each
  int64_t num_blocks = 0;
  std::string what;
};
/// "FILE: tensor 'NAME', blocks 3 to 5: WHAT"
std::string to_string(const Damage& damage);

struct VerifyOptions {
  int num_threads = 1;
  /// Called by one thread at a time.
  std::function<void(int64_t bytes, int64_t total)> progress = {};
};

struct VerifyReport {
  std::vector<Damage> damages;  ///< by rank, then by place in the file; neighbouring blocks as one
  int64_t num_files = 0;        ///< that the manifest names
  int64_t num_tensors = 0;
  int64_t num_bytes = 0;  ///< of tensors, whose checksums were compared
};

/// Reads the manifest, every header and every block, and goes on after damage. Finds: a manifest that isn't
/// as it was written or is another step's; files that are missing, shorter, longer, another rank's, step's or
/// run's; headers that aren't what the manifest says; blocks whose bytes aren't those that were written.
/// Throws Error where the folder itself can't be read.
VerifyReport verify_step(const std::filesystem::path& step_folder, const VerifyOptions& options = {});

}  // namespace titan::checkpoint
