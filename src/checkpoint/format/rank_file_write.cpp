#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "checkpoint/format/rank_file.h"
#include "titan/core/error.h"

namespace titan::checkpoint {
namespace detail {
namespace {

// An iovec per segment; Linux takes 1,024 at once.
constexpr size_t kMaxSegments = 512;

std::span<const std::byte> bytes_of(const PieceToWrite& piece, int64_t begin, int64_t num_bytes) {
  return {static_cast<const std::byte*>(piece.data.const_data_ptr()) + begin, static_cast<size_t>(num_bytes)};
}

// The threads' shared work. The first exception of any ends it.
class PieceWriter {
 public:
  PieceWriter(OutputFile& file, int64_t data_start, std::span<const PieceToWrite> pieces,
              const WriteOptions& options)
      : file_(file),
        data_start_(data_start),
        pieces_(pieces),
        options_(options),
        chunks_(plan_chunks(pieces)),
        checksums_(blank_checksums(pieces)) {}

  void run() {
    const auto threads = std::min<size_t>(static_cast<size_t>(options_.num_threads), chunks_.size());
    std::vector<std::jthread> others;
    try {
      for (size_t i = 1; i < threads; ++i) others.emplace_back([this] { work(); });
    } catch (...) {  // no more threads to be had
      fail();
    }
    work();
    others.clear();
    if (error_) std::rethrow_exception(error_);
  }

  const Checksums& checksums() const { return checksums_; }
  bool finite() const { return finite_; }

 private:
  void work() {
    try {
      for (size_t i = next_++; i < chunks_.size() && !stopped_; i = next_++) write(chunks_[i]);
    } catch (...) {
      fail();
    }
  }

  void fail() {
    std::lock_guard lock(error_mutex_);
    if (!error_) error_ = std::current_exception();
    stopped_ = true;
  }

  void write(const Chunk& chunk) {
    std::vector<iovec> parts;
    parts.reserve(chunk.segments.size());
    for (const Segment& segment : chunk.segments) {
      check(segment);
      const auto bytes = bytes_of(pieces_[segment.piece], segment.begin, segment.num_bytes);
      parts.push_back({const_cast<std::byte*>(bytes.data()), bytes.size()});
    }
    file_.write(parts, data_start_ + chunk.offset);
    file_.start_write_back(data_start_ + chunk.offset, chunk.num_bytes);
    if (options_.progress) options_.progress(chunk.num_bytes);
  }

  // Each block is another element of `checksums_`: threads don't meet.
  void check(const Segment& segment) {
    const PieceToWrite& piece = pieces_[segment.piece];
    const int64_t end = segment.begin + segment.num_bytes;
    for (int64_t at = segment.begin; at < end; at += kBlockBytes) {
      const auto block = bytes_of(piece, at, std::min(kBlockBytes, end - at));
      checksums_[segment.piece][static_cast<size_t>(at / kBlockBytes)] = checksum_of(block);
      if (!all_finite(block, piece.data.scalar_type())) finite_ = false;
    }
  }

  OutputFile& file_;
  const int64_t data_start_;
  const std::span<const PieceToWrite> pieces_;
  const WriteOptions& options_;
  const std::vector<Chunk> chunks_;
  Checksums checksums_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stopped_{false};
  std::atomic<bool> finite_{true};
  std::mutex error_mutex_;
  std::exception_ptr error_;
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

WrittenFile write_rank_file(const std::filesystem::path& path, const FileIdentity& identity,
                            std::span<const PieceToWrite> pieces, const WriteOptions& options,
                            const FileCalls& calls) {
  TITAN_CHECK(options.num_threads >= 1, "a file is written by at least one thread, not ",
              options.num_threads);
  const auto header_bytes = make_rank_file_header(identity, pieces, blank_checksums(pieces)).size();
  const int64_t num_bytes = total_bytes(header_bytes, pieces);
  OutputFile file(path, num_bytes, calls);
  PieceWriter writer(file, static_cast<int64_t>(header_bytes), pieces, options);
  writer.run();
  // Last: a file without its header is nothing to anybody.
  std::string header = make_rank_file_header(identity, pieces, writer.checksums());
  TITAN_INTERNAL_ASSERT(header.size() == header_bytes, "checksums have a fixed width");
  iovec part = {header.data(), header.size()};
  file.write({&part, 1}, 0);
  file.finish();
  return {.record = {.num_bytes = num_bytes, .header_digest = digest_of(header)}, .finite = writer.finite()};
}

}  // namespace detail

int64_t rank_file_bytes(const FileIdentity& identity, std::span<const PieceToWrite> pieces) {
  const auto header = detail::make_rank_file_header(identity, pieces, detail::blank_checksums(pieces));
  return detail::total_bytes(header.size(), pieces);
}

WrittenFile write_rank_file(const std::filesystem::path& path, const FileIdentity& identity,
                            std::span<const PieceToWrite> pieces, const WriteOptions& options) {
  return detail::write_rank_file(path, identity, pieces, options, FileCalls{});
}

}  // namespace titan::checkpoint
