#pragma once

// A rank's file of a checkpoint: plain safetensors, in whose __metadata__ stand the run, step and rank, and
// for every tensor its box in the global tensor and a checksum (XXH3, 64 bits) of each MiB of it. Both are
// checked against the manifest and against the bytes before a value is believed.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "core/durable.h"
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

namespace titan::checkpoint::detail {

// What is computed of a tensor's bytes on their way to a file.

/// How many checksums a tensor of so many bytes has.
constexpr int64_t num_blocks(int64_t num_bytes) {
  return num_bytes / kBlockBytes + (num_bytes % kBlockBytes != 0 ? 1 : 0);
}

/// XXH3, 64 bits, without a seed.
uint64_t checksum_of(std::span<const std::byte> block);

/// Whether no element is infinite or not a number. `bytes` holds whole elements; of other than floating
/// dtypes all are finite.
bool all_finite(std::span<const std::byte> bytes, at::ScalarType dtype);

// [Note: header of a rank's file]
// A safetensors header, in whose __metadata__ stand
//   "format"                             "titan rank file 1"
//   "run_id" "step" "rank" "world_size"  whose file it is
//   NAME of each tensor                  "0:512,256:512 xxh3:0123456789abcdef,89abcdef01234567"
// A tensor's value is its box in the global tensor, begin:end of each dimension (of a scalar nothing, nor the
// space), and a checksum of each block. Checksums have a fixed width, so that a header's length is known
// before them. The file is well-formed safetensors for everybody else.

/// Per piece, its blocks' checksums.
using Checksums = std::vector<std::vector<uint64_t>>;

/// As many as the pieces have blocks, all 0.
Checksums blank_checksums(std::span<const PieceToWrite> pieces);

/// The 8 length bytes and the JSON text; the pieces' bytes follow in order, without gaps. Throws Error for
/// pieces that can't be in a file: of a reserved name, not of their box's lengths, not in StateTable's order.
std::string make_rank_file_header(const FileIdentity& identity, std::span<const PieceToWrite> pieces,
                                  const Checksums& checksums);

struct RankFileHeader {
  FileIdentity identity;
  std::vector<std::string> names;  // by offset
  std::map<std::string, RankFile::Entry, std::less<>> entries;
};

/// Parses the JSON text; `data_start` is the first byte behind it. Throws Error naming `path`, and the
/// tensor, for whatever breaks the rules of safetensors or those above.
RankFileHeader parse_rank_file_header(std::string_view json, size_t data_start, size_t file_size,
                                      const std::string& path);

/// "it is of step 400, not 500"; empty when they are equal.
std::string difference(const FileIdentity& found, const FileIdentity& expected);

/// Whole blocks of one piece.
struct Segment {
  size_t piece = 0;
  int64_t begin = 0;  ///< byte of the piece
  int64_t num_bytes = 0;
};

/// What a thread writes at once: segments that follow each other in the file.
struct Chunk {
  int64_t offset = 0;  ///< from the first piece's first byte
  int64_t num_bytes = 0;
  std::vector<Segment> segments;
};

/// The pieces' bytes as chunks of about kChunkBytes: parts of large tensors, many small ones together.
constexpr int64_t kChunkBytes = 8 * kBlockBytes;
std::vector<Chunk> plan_chunks(std::span<const PieceToWrite> pieces);

/// As the public one, with these calls to the operating system.
WrittenFile write_rank_file(const std::filesystem::path& path, const FileIdentity& identity,
                            std::span<const PieceToWrite> pieces, const WriteOptions& options,
                            const FileCalls& calls);

}  // namespace titan::checkpoint::detail
