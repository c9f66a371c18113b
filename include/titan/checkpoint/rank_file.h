#pragma once

// A rank's file of a checkpoint: plain safetensors, in whose __metadata__ stand the run, step and rank, and
// for every tensor its box in the global tensor and a checksum (XXH3, 64 bits) of each MiB of it. Both are
// checked against the manifest and against the bytes before a value is believed.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/checkpoint/manifest.h"
#include "titan/tensor/placement.h"

namespace titan::checkpoint {

/// A checksum is of so many bytes of a tensor, the last one of what is left.
constexpr int64_t kBlockBytes = int64_t{1} << 20;

/// Whose file it is. A file of another step or run isn't taken for this one's.
struct FileIdentity {
  std::string run_id;
  int64_t step = 0;
  int64_t rank = 0;
  int64_t world_size = 1;
  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

struct PieceToWrite {
  std::string name;
  Box box;          ///< in the global tensor
  at::Tensor data;  ///< of the box's lengths; contiguous, on the CPU; unchanged until the call returns
};

struct WriteOptions {
  int num_threads = 1;
  /// Called from any of the threads behind each chunk written; what it throws stops the write.
  std::function<void(int64_t bytes)> progress = {};
};

struct WrittenFile {
  FileRecord record;
  bool finite = true;  ///< all elements of its floating tensors are
};

/// The size of the file, before it is written.
int64_t rank_file_bytes(const FileIdentity& identity, std::span<const PieceToWrite> pieces);

/// Writes and syncs the file (not its folder). `pieces`: in the order of StateTable. The space is reserved
/// before a byte is written: on a full disk the Error says how many bytes are needed and how many are free.
/// On failure the file is removed.
WrittenFile write_rank_file(const std::filesystem::path& path, const FileIdentity& identity,
                            std::span<const PieceToWrite> pieces, const WriteOptions& options = {});

/// An open file. Opening reads the header; reads are by pread, so that nothing faults when the file shrinks.
/// A handle; may be used from several threads.
class RankFile {
 public:
  struct Entry {
    at::ScalarType dtype = at::kFloat;
    Box box;
    int64_t offset = 0;  ///< of its first byte in the file
    int64_t num_bytes = 0;
    std::vector<uint64_t> checksums;
  };

  /// Throws Error that names the file and what is wrong: another size or header than `record` says, other
  /// `identity`, a header that isn't well-formed, boxes that aren't their tensors' shapes.
  RankFile(const std::filesystem::path& path, const FileIdentity& identity, const FileRecord& record);

  const std::filesystem::path& path() const;
  const std::vector<std::string>& names() const;
  /// Throws Error where there is none.
  const Entry& entry(std::string_view name) const;

  /// Copies the elements that lie in both the entry's box and `target_box` to `target`, a CPU tensor of the
  /// entry's dtype (any strides) that is the box `target_box` of the global tensor. Reads the blocks that
  /// hold them and nothing else, and checks each. Throws Error that names tensor, file and block; `target`
  /// may then hold some of what was read.
  void read(std::string_view name, const Box& target_box, const at::Tensor& target) const;
  /// Reads and checks all blocks; `progress` is told how many bytes. Throws Error.
  void verify(const std::function<void(int64_t bytes)>& progress = {}) const;
  /// Bytes read so far, headers included, through all copies of this handle.
  int64_t bytes_read() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace titan::checkpoint
