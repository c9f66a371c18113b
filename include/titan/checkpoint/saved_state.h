#pragma once

// A complete checkpoint, read without a job: whole tensors or boxes of them, assembled from whichever ranks'
// files hold the pieces; and the check of every byte against its checksum.
//
//   const titan::checkpoint::SavedState state("outputs/checkpoint/step-500");
//   at::Tensor weight = state.read("model.norm.weight");
//   for (const auto& damage : verify_step(state.folder()).damages) std::puts(to_string(damage).c_str());

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

/// A handle, safe to use from several threads. A rank's file is opened when a piece of it is first needed;
/// when there are many, the most recently used ones stay open.
class SavedState {
 public:
  /// Reads the manifest, and no other file. Throws Error.
  explicit SavedState(const std::filesystem::path& step_folder);
  /// With a manifest that was read before.
  SavedState(const std::filesystem::path& step_folder, Manifest manifest);

  const std::filesystem::path& folder() const;
  const Manifest& manifest() const;
  const StateTable& table() const { return manifest().table; }
  /// Throws Error, with the nearest names, when the checkpoint has no such tensor.
  const StateTensor& tensor(std::string_view name) const;

  /// Fills `target`, a CPU tensor of the saved dtype (any strides), with the elements in `box`. Opens only
  /// the files that hold pieces of them, checks each file's header against the manifest, and checks each
  /// block's checksum before copying it. Throws Error that names tensor and file.
  void read(std::string_view name, const Box& box, const at::Tensor& target) const;
  /// The whole tensor, in its dtype.
  at::Tensor read(std::string_view name) const;

  /// Bytes read from rank files, headers included, through all copies of this handle.
  int64_t bytes_read() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

/// Boxes that tile a tensor, in the order of its elements, for reading a large one a part at a time. Each is
/// a contiguous run of at most `most_bytes`, or a single element. Empty for a tensor without elements.
std::vector<Box> slabs_of(const std::vector<int64_t>& shape, int64_t element_size, int64_t most_bytes);

struct Damage {
  std::filesystem::path file;
  std::string tensor;       ///< empty: the whole file, its header or the manifest
  int64_t first_block = 0;  ///< of the tensor's piece in this file, kBlockBytes each
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
  std::vector<Damage> damages;  ///< by rank, then by place in the file; neighbouring blocks are joined
  int64_t num_files = 0;        ///< named by the manifest
  int64_t num_tensors = 0;
  int64_t num_bytes = 0;  ///< of tensors whose checksums were compared
};

/// Reads the manifest, every header and every block, and continues after damage. Finds: a manifest that was
/// changed or belongs to another step; files that are missing, shorter, longer, or belong to another rank,
/// step or run; headers that contradict the manifest; blocks whose bytes changed. Throws Error where the
/// folder itself can't be read.
VerifyReport verify_step(const std::filesystem::path& step_folder, const VerifyOptions& options = {});

}  // namespace titan::checkpoint
