#pragma once

// A rank's file of a checkpoint: safetensors whose __metadata__ names the run, step and rank, and gives for
// every tensor its box in the global tensor and a checksum (XXH3, 64 bits) of each MiB of its bytes. Before a
// value is used, the box is checked against the manifest and the checksum against the bytes.
//
// [Note: header of a rank's file]
// In __metadata__ are
//   "format"                             "titan rank file 1"
//   "run_id" "step" "rank" "world_size"  the file's identity
//   NAME of each tensor                  "0:512,256:512 xxh3:0123456789abcdef,89abcdef01234567"
// The value of NAME is the tensor's box, begin:end of each dimension (a scalar has neither the box nor the
// space), and a checksum of each block. Checksums have a fixed width, so that the header's length is known
// before they are. For any other reader the file is well-formed safetensors.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/stored_files.h"
#include "titan/checkpoint/manifest.h"
#include "titan/tensor/placement.h"

namespace titan::checkpoint {

/// A checksum covers this many bytes of a tensor; the last one covers the rest.
constexpr int64_t kBlockBytes = int64_t{1} << 20;

/// Identifies a file, so that one of another run, step or rank is never used in its place.
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
  at::Tensor data;  ///< has the box's lengths; contiguous, on the CPU; unchanged until the call returns
};

struct WriteOptions {
  int num_threads = 1;
  /// Called from any of the threads after each chunk written; an exception stops the write.
  std::function<void(int64_t bytes)> progress = {};
};

struct WrittenFile {
  FileRecord record;
  bool finite = true;  ///< every element of its floating tensors is finite
};

/// The size of the file, before it is written.
int64_t rank_file_bytes(const FileIdentity& identity, std::span<const PieceToWrite> pieces);

/// Writes and syncs the file (not its folder). `pieces` are in the order of StateTable. On a local disk the
/// space is reserved before a byte is written: a full disk throws DiskFull (core/durable.h). On failure the
/// file is removed.
WrittenFile write_rank_file(const std::filesystem::path& path, const FileIdentity& identity,
                            std::span<const PieceToWrite> pieces, const WriteOptions& options = {});

/// An open file. Opening reads the header; data is read by pread, so that nothing faults when the file
/// shrinks. A handle, safe to use from several threads.
class RankFile {
 public:
  struct Entry {
    at::ScalarType dtype = at::kFloat;
    Box box;
    int64_t offset = 0;  ///< first byte in the file
    int64_t num_bytes = 0;
    std::vector<uint64_t> checksums;
  };

  /// Throws Error that names the file and the problem: a size or header that differs from `record`, another
  /// `identity`, a malformed header, boxes that don't match their tensors' shapes.
  RankFile(const std::filesystem::path& path, const FileIdentity& identity, const FileRecord& record)
      : RankFile(path, record, &identity) {}
  /// A file of a model saved alone, which has no identity.
  RankFile(const std::filesystem::path& path, const FileRecord& record) : RankFile(path, record, nullptr) {}

  const detail::InputFile& file() const;
  const std::vector<std::string>& names() const;
  /// Throws Error if the file has no such tensor.
  const Entry& entry(std::string_view name) const;

  /// Copies the elements that are in both the entry's box and `target_box` to `target`, a CPU tensor of the
  /// entry's dtype (any strides) that represents `target_box` of the global tensor. Reads only the blocks
  /// that hold them, and checks each. Throws Error that names tensor, file and block; `target` may then hold
  /// some of what was read.
  void read(std::string_view name, const Box& target_box, const at::Tensor& target) const;

  /// Reads and checks all blocks; `progress` gets the number of bytes. Throws Error.
  void verify(const std::function<void(int64_t bytes)>& progress = {}) const;

 private:
  RankFile(const std::filesystem::path& path, const FileRecord& record, const FileIdentity* identity);

  struct Impl;
  std::shared_ptr<Impl> impl_;
};

namespace detail {

// ---- blocks

/// How many checksums a tensor of this many bytes has.
constexpr int64_t num_blocks(int64_t num_bytes) {
  return num_bytes / kBlockBytes + (num_bytes % kBlockBytes != 0 ? 1 : 0);
}
/// XXH3, 64 bits, without a seed.
uint64_t checksum_of(std::span<const std::byte> block);
/// Whether no element is infinite or NaN. `bytes` holds whole elements; non-floating dtypes are always
/// finite.
bool all_finite(std::span<const std::byte> bytes, at::ScalarType dtype);

// ---- the header

/// "0:512,256:512": begin:end of each dimension.
std::string box_text(const Box& box);
/// The value of a tensor's key: its box and checksums.
std::string piece_text(const Box& box, const std::vector<uint64_t>& checksums);

/// By piece, the checksums of its blocks.
using Checksums = std::vector<std::vector<uint64_t>>;
/// A checksum of 0 for each block.
Checksums blank_checksums(std::span<const PieceToWrite> pieces);

/// The 8 length bytes and the JSON text; the pieces' bytes follow in order, without gaps. Throws Error for a
/// piece that can't be in a file: a reserved name, a shape other than its box, a wrong order.
std::string make_rank_file_header(const FileIdentity& identity, std::span<const PieceToWrite> pieces,
                                  const Checksums& checksums);

struct RankFileHeader {
  FileIdentity identity;
  std::vector<std::string> names;  // by offset
  std::map<std::string, RankFile::Entry, std::less<>> entries;
};

/// Parses the JSON text; `data_start` is the first byte after it. Throws Error that names `path` and the
/// tensor where a rule of safetensors or of [Note: header of a rank's file] is broken.
RankFileHeader parse_rank_file_header(std::string_view json, size_t data_start, size_t file_size,
                                      const std::string& path);

/// In __metadata__ of a file of whole tensors (SafetensorsWriter), which has the same values for each tensor
/// and no identity.
constexpr const char* kChecksumsKey = "titan_checksums";
constexpr const char* kChecksumsForm = "1";
/// The tensors of such a file; none where the file isn't one. Throws Error as parse_rank_file_header.
std::map<std::string, RankFile::Entry, std::less<>> checked_entries(
    const titan::detail::SafetensorsHeader& header, const std::string& path);

/// "it belongs to step 400, not 500"; empty when they are equal.
std::string difference(const FileIdentity& found, const FileIdentity& expected);

// ---- writing

/// Whole blocks of one piece.
struct Segment {
  size_t piece = 0;
  int64_t begin = 0;  ///< first byte, counted from the start of the piece
  int64_t num_bytes = 0;
};

/// The unit that a thread writes: segments that follow each other in the file.
struct Chunk {
  int64_t offset = 0;  ///< from the first piece's first byte
  int64_t num_bytes = 0;
  std::vector<Segment> segments;
};

/// Divides the pieces' bytes into chunks of about kChunkBytes: parts of large tensors, many small ones
/// together.
constexpr int64_t kChunkBytes = 8 * kBlockBytes;
std::vector<Chunk> plan_chunks(std::span<const PieceToWrite> pieces);

using CreateFile = std::function<std::unique_ptr<Storage::Writer>(int64_t num_bytes)>;
/// As write_rank_file, to the file that `create` makes.
WrittenFile write_rank_file(const CreateFile& create, const FileIdentity& identity,
                            std::span<const PieceToWrite> pieces, const WriteOptions& options);

// ---- the files of a checkpoint that is being read

/// The path of a rank's file in a step's folder, or of a file of a model alone.
std::filesystem::path stored_file(const std::filesystem::path& folder, const Manifest& manifest,
                                  int64_t rank);
/// Opens it. Throws Error as RankFile does, and for anything but a regular
/// file, because a link may point anywhere.
RankFile open_rank_file(const std::filesystem::path& step_folder, const Manifest& manifest, int64_t rank);

/// Opens files when they are first needed, and closes the least recently used one when `most_open` are open:
/// a process has a limited number of descriptors, and a checkpoint may have thousands of files.
class OpenFiles {
 public:
  OpenFiles(std::filesystem::path step_folder, size_t most_open)
      : folder_(std::move(step_folder)), most_open_(most_open) {}

  /// The file stays open as long as the pointer lives.
  std::shared_ptr<const RankFile> use(const Manifest& manifest, int64_t rank);
  /// Bytes read from all files, including closed ones.
  int64_t bytes_read() const;

 private:
  struct Slot {
    std::mutex opening;
    std::optional<RankFile> file;
    uint64_t last_use = 0;
  };

  std::shared_ptr<Slot> take_slot(int64_t rank);
  void close_oldest();

  const std::filesystem::path folder_;
  const size_t most_open_;
  mutable std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<Slot>> slots_;  // one that is in use has other owners
  uint64_t num_uses_ = 0;
  int64_t bytes_of_closed_ = 0;
};

}  // namespace detail
}  // namespace titan::checkpoint
