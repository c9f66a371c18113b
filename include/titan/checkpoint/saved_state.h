#pragma once

// A complete checkpoint, read without a job: whole tensors or boxes of them, put together from whichever
// ranks' files hold the pieces.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/checkpoint/manifest.h"
#include "titan/tensor/placement.h"

namespace titan::checkpoint {

/// A handle. A rank's file is opened when a piece of it is first needed; of many, the ones used last stay
/// open. May be used from several threads.
class SavedState {
 public:
  /// Reads the manifest, and no other file. Throws Error.
  explicit SavedState(const std::filesystem::path& step_folder);
  /// Where the manifest came by another way: from rank 0.
  SavedState(const std::filesystem::path& step_folder, Manifest manifest);

  const std::filesystem::path& folder() const;
  const Manifest& manifest() const;
  const StateTable& table() const { return manifest().table; }
  /// Throws Error, with the nearest names, when the checkpoint has no such tensor.
  const StateTensor& tensor(std::string_view name) const;

  /// Fills `target`, a CPU tensor of the saved dtype (any strides), with the elements in `box`. Opens only
  /// the files with pieces of them, checks that each file's header has there what the manifest says, and the
  /// checksum of each block before it is copied. Throws Error that names tensor and file.
  void read(std::string_view name, const Box& box, const at::Tensor& target) const;
  /// The whole tensor, in its dtype.
  at::Tensor read(std::string_view name) const;

  /// Of rank files, headers included, through all copies of this handle.
  int64_t bytes_read() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// Every byte of a checkpoint against its checksums.

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

// Large tensors, a part at a time.

/// Boxes that tile a tensor, in the order of its elements; each is one run of them of at most `most_bytes`,
/// or a single element. None for a tensor without elements.
std::vector<Box> slabs_of(const std::vector<int64_t>& shape, int64_t element_size, int64_t most_bytes);

}  // namespace titan::checkpoint
