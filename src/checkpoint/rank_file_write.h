#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "output_file.h"
#include "titan/checkpoint/rank_file.h"

namespace titan::checkpoint::detail {

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
