#include <algorithm>
#include <atomic>
#include <utility>

#include "checkpoint/format/rank_file.h"
#include "core/threads.h"
#include "titan/core/error.h"

namespace titan::checkpoint {
namespace detail {
namespace {

// One vector per segment; Linux takes 1,024 at once.
constexpr size_t kMaxSegments = 512;

std::span<const std::byte> bytes_of(const PieceToWrite& piece, int64_t begin, int64_t num_bytes) {
  return {static_cast<const std::byte*>(piece.data.const_data_ptr()) + begin, static_cast<size_t>(num_bytes)};
}

// Writes chunks, from several threads, and computes what the header says of their blocks.
class ChunkWriter {
 public:
  ChunkWriter(Storage::Writer& file, int64_t data_start, std::span<const PieceToWrite> pieces)
      : file_(file), data_start_(data_start), pieces_(pieces), checksums_(blank_checksums(pieces)) {}

  void write(const Chunk& chunk) {
    std::vector<std::span<const std::byte>> parts;
    parts.reserve(chunk.segments.size());
    for (const Segment& segment : chunk.segments) {
      check(segment);
      parts.push_back(bytes_of(pieces_[segment.piece], segment.begin, segment.num_bytes));
    }
    file_.write(parts, data_start_ + chunk.offset);
  }

  const Checksums& checksums() const { return checksums_; }
  bool finite() const { return finite_; }

 private:
  // Each block is a different element of `checksums_`, so threads don't conflict.
  void check(const Segment& segment) {
    const PieceToWrite& piece = pieces_[segment.piece];
    const int64_t end = segment.begin + segment.num_bytes;
    for (int64_t at = segment.begin; at < end; at += kBlockBytes) {
      const auto block = bytes_of(piece, at, std::min(kBlockBytes, end - at));
      checksums_[segment.piece][static_cast<size_t>(at / kBlockBytes)] = checksum_of(block);
      if (!all_finite(block, piece.data.scalar_type())) finite_ = false;
    }
  }

  Storage::Writer& file_;
  const int64_t data_start_;
  const std::span<const PieceToWrite> pieces_;
  Checksums checksums_;
  std::atomic<bool> finite_{true};
};

int64_t total_bytes(size_t header_bytes, std::span<const PieceToWrite> pieces) {
  auto total = static_cast<int64_t>(header_bytes);
  for (const PieceToWrite& piece : pieces) total += static_cast<int64_t>(piece.data.nbytes());
  return total;
}

}  // namespace

std::vector<Chunk> plan_chunks(std::span<const PieceToWrite> pieces) {
  std::vector<Chunk> chunks;
  int64_t offset = 0;
  for (size_t piece = 0; piece < pieces.size(); ++piece) {
    const auto num_bytes = static_cast<int64_t>(pieces[piece].data.nbytes());
    for (int64_t begin = 0; begin < num_bytes;) {
      const int64_t left = num_bytes - begin;
      const bool fits = !chunks.empty() && chunks.back().segments.size() < kMaxSegments &&
                        kChunkBytes - chunks.back().num_bytes >= std::min(left, kBlockBytes);
      if (!fits) chunks.push_back({.offset = offset, .num_bytes = 0, .segments = {}});
      Chunk& chunk = chunks.back();
      const int64_t room = kChunkBytes - chunk.num_bytes;
      const int64_t taken = left <= room ? left : room / kBlockBytes * kBlockBytes;
      chunk.segments.push_back({piece, begin, taken});
      chunk.num_bytes += taken;
      begin += taken;
      offset += taken;
    }
  }
  return chunks;
}

WrittenFile write_rank_file(const CreateFile& create, const FileIdentity& identity,
                            std::span<const PieceToWrite> pieces, const WriteOptions& options) {
  TITAN_CHECK(options.num_threads >= 1, "a file needs at least one thread to write it, not ",
              options.num_threads);
  const auto header_bytes = make_rank_file_header(identity, pieces, blank_checksums(pieces)).size();
  const int64_t num_bytes = total_bytes(header_bytes, pieces);
  const auto file = create(num_bytes);
  ChunkWriter writer(*file, static_cast<int64_t>(header_bytes), pieces);
  const std::vector<Chunk> chunks = plan_chunks(pieces);
  run_tasks(options.num_threads, chunks.size(), [&](size_t index) {
    writer.write(chunks[index]);
    if (options.progress) options.progress(chunks[index].num_bytes);
  });
  // Last: a file without its header can't be mistaken for a whole one.
  const std::string header = make_rank_file_header(identity, pieces, writer.checksums());
  TITAN_INTERNAL_ASSERT(header.size() == header_bytes, "checksums have a fixed width");
  const auto bytes = std::as_bytes(std::span(header));
  file->write({&bytes, 1}, 0);
  file->finish();
  return {.record = {.num_bytes = num_bytes, .header_digest = digest_of(header)}, .finite = writer.finite()};
}

}  // namespace detail

int64_t rank_file_bytes(const FileIdentity& identity, std::span<const PieceToWrite> pieces) {
  const auto header = detail::make_rank_file_header(identity, pieces, detail::blank_checksums(pieces));
  return detail::total_bytes(header.size(), pieces);
}

WrittenFile write_rank_file(const std::filesystem::path& path, const FileIdentity& identity,
                            std::span<const PieceToWrite> pieces, const WriteOptions& options) {
  return detail::write_rank_file([&](int64_t num_bytes) { return storage_of(path).create(path, num_bytes); },
                                 identity, pieces, options);
}

}  // namespace titan::checkpoint
