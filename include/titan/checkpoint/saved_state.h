#pragma once

// A complete checkpoint, read without a job: whole tensors or boxes of them, put together from whichever
// ranks' files hold the pieces.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string_view>

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

}  // namespace titan::checkpoint
