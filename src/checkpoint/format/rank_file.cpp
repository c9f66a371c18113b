#include "checkpoint/format/rank_file.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "checkpoint/format/safetensors_header.h"
#include "core/hash.h"
#include "core/threads.h"
#include "titan/core/error.h"

// [Note: reading a box of a tensor]
//   block        1 MiB of a tensor's bytes in the file, with one checksum; always read whole
//   run          elements that are contiguous in the file and evenly spaced in the target
//   BoxRuns      the runs that two boxes of one tensor share, ascending in the file
//   BlockReader  reads blocks and compares their checksums
//   PieceReader  reads the blocks that runs touch: straight into the target where a run has whole blocks and
//                is contiguous there, otherwise through a buffer

namespace titan::checkpoint {
namespace {

using detail::InputFile;

// Number of blocks read at once.
constexpr int64_t kReadBlocks = 8;

// All fields count elements.
struct Run {
  int64_t from = 0;
  int64_t to = 0;
  int64_t length = 0;
  int64_t to_stride = 1;
};

class BoxRuns {
 public:
  // `source` is contiguous, `target` has `target_strides`. All three have the same number of dimensions.
  BoxRuns(const Box& source, const Box& target, at::IntArrayRef target_strides) {
    int64_t from_stride = 1;
    for (size_t dim = source.offset.size(); dim-- > 0;) {
      const int64_t begin = std::max(source.offset[dim], target.offset[dim]);
      const int64_t end =
          std::min(source.offset[dim] + source.length[dim], target.offset[dim] + target.length[dim]);
      done_ = end <= begin;
      if (done_) return;
      from_ += (begin - source.offset[dim]) * from_stride;
      to_ += (begin - target.offset[dim]) * target_strides[dim];
      add_outer({end - begin, from_stride, target_strides[dim]});
      from_stride *= source.length[dim];
    }
    // Every run is contiguous in the source; a single element always is.
    if (dims_.empty() || dims_[0].from_stride != 1) dims_.insert(dims_.begin(), {1, 1, 1});
    index_.resize(dims_.size());
  }

  // False after the last run.
  bool next(Run& run) {
    if (done_) return false;
    run = {from_, to_, dims_[0].length, dims_[0].to_stride};
    for (size_t i = 1; i < dims_.size(); ++i) {
      const Dim& dim = dims_[i];
      from_ += dim.from_stride;
      to_ += dim.to_stride;
      if (++index_[i] < dim.length) return true;
      from_ -= dim.length * dim.from_stride;
      to_ -= dim.length * dim.to_stride;
      index_[i] = 0;
    }
    done_ = true;
    return true;
  }

 private:
  struct Dim {
    int64_t length, from_stride, to_stride;
  };

  void add_outer(Dim dim) {
    if (dim.length == 1) return;
    const auto continues = [&](const Dim& last) {
      return last.length * last.from_stride == dim.from_stride &&
             last.length * last.to_stride == dim.to_stride;
    };
    if (!dims_.empty() && continues(dims_.back())) {
      dims_.back().length *= dim.length;
    } else {
      dims_.push_back(dim);
    }
  }

  std::vector<Dim> dims_;  // innermost first; dims_[0] is a run
  std::vector<int64_t> index_;
  int64_t from_ = 0, to_ = 0;
  bool done_ = false;
};

class BlockReader {
 public:
  // The arguments must outlive it.
  BlockReader(const InputFile& file, std::string_view name, const RankFile::Entry& entry)
      : file_(file), name_(name), entry_(entry) {}

  int64_t num_blocks() const { return static_cast<int64_t>(entry_.checksums.size()); }
  // The block's bytes within the tensor.
  int64_t begin(int64_t block) const { return block * kBlockBytes; }
  int64_t end(int64_t block) const { return std::min(begin(block + 1), entry_.num_bytes); }

  // Reads blocks [first, last); `into` has room for them.
  void read(int64_t first, int64_t last, std::byte* into) const {
    const auto num_bytes = static_cast<size_t>(end(last - 1) - begin(first));
    file_.read({into, num_bytes}, entry_.offset + begin(first));
  }

  // Describes the first damaged block of [first, last), whose bytes are at `bytes`; empty: none is damaged.
  std::string damage(int64_t first, int64_t last, const std::byte* bytes) const {
    for (int64_t block = first; block < last; ++block) {
      const uint64_t recorded = entry_.checksums[static_cast<size_t>(block)];
      const auto num_bytes = static_cast<size_t>(end(block) - begin(block));
      const uint64_t found = detail::checksum_of({bytes + (begin(block) - begin(first)), num_bytes});
      if (found == recorded) continue;
      return str(file_.path().string(), ": tensor '", name_, "' is damaged: block ", block, " of ",
                 num_blocks(), " (bytes ", entry_.offset + begin(block), " to ", entry_.offset + end(block),
                 " of the file) has checksum ", hex(found), ", expected ", hex(recorded));
    }
    return "";
  }

  // Throws Error for damage.
  void read_checked(int64_t first, int64_t last, std::byte* into) const {
    read(first, last, into);
    const std::string problem = damage(first, last, into);
    if (!problem.empty()) throw Error(problem);
  }

 private:
  const InputFile& file_;
  std::string_view name_;
  const RankFile::Entry& entry_;
};

// Copies element by element, for targets whose elements aren't contiguous.
template <size_t kSize>
void copy_strided(const std::byte* from, std::byte* to, int64_t length, int64_t to_stride) {
  for (int64_t i = 0; i < length; ++i)
    std::memcpy(to + i * to_stride * int64_t{kSize}, from + i * int64_t{kSize}, kSize);
}

class PieceReader {
 public:
  PieceReader(const BlockReader& blocks, const RankFile::Entry& entry, const Box& target_box,
              const at::Tensor& target)
      : blocks_(blocks),
        entry_(entry),
        target_box_(target_box),
        target_strides_(target.strides().vec()),
        target_(static_cast<std::byte*>(target.mutable_data_ptr())),
        element_size_(static_cast<int64_t>(target.element_size())),
        block_elements_(kBlockBytes / element_size_),
        runs_(entry.box, target_box, target_strides_),
        more_(runs_.next(run_)) {}

  void read() {
    for (const BlockRange& range : needed_blocks()) {
      for (int64_t first = range.first; first < range.last;) {
        const int64_t whole = num_whole_blocks(first, range.last);
        const int64_t last = first + std::min(whole > 0 ? whole : range.last - first, kReadBlocks);
        if (whole > 0) {
          read_into_target(first, last);
        } else {
          read_through_buffer(first, last);
        }
        first = last;
      }
    }
  }

 private:
  struct BlockRange {
    int64_t first, last;  // [first, last)
  };

  std::vector<BlockRange> needed_blocks() const {
    std::vector<BlockRange> ranges;
    BoxRuns runs(entry_.box, target_box_, target_strides_);
    for (Run run; runs.next(run);) {
      const int64_t first = run.from / block_elements_;
      const int64_t last = (run.from + run.length - 1) / block_elements_ + 1;
      if (!ranges.empty() && first <= ranges.back().last) {
        ranges.back().last = last;
      } else {
        ranges.push_back({first, last});
      }
    }
    return ranges;
  }

  // The number of blocks from `first` on that hold only the current run; 0 unless the run is contiguous in
  // the target too.
  int64_t num_whole_blocks(int64_t first, int64_t last) const {
    if (run_.to_stride != 1 || run_.from > first * block_elements_) return 0;
    const int64_t end = run_.from + run_.length;
    if (end * element_size_ == entry_.num_bytes) return last - first;
    return std::max<int64_t>(end / block_elements_ - first, 0);
  }

  void read_into_target(int64_t first, int64_t last) {
    blocks_.read_checked(first, last, target_at(run_.to));
    consume((blocks_.end(last - 1) - blocks_.begin(first)) / element_size_);
  }

  void read_through_buffer(int64_t first, int64_t last) {
    if (!buffer_) {
      const int64_t num_bytes = std::min(kReadBlocks * kBlockBytes, entry_.num_bytes);
      buffer_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(num_bytes));
    }
    blocks_.read_checked(first, last, buffer_.get());
    const int64_t begin = first * block_elements_, end = blocks_.end(last - 1) / element_size_;
    while (more_ && run_.from < end) {
      const int64_t length = std::min(run_.length, end - run_.from);
      copy_run(buffer_.get() + (run_.from - begin) * element_size_, length);
      consume(length);
    }
  }

  void copy_run(const std::byte* from, int64_t length) {
    std::byte* to = target_at(run_.to);
    if (run_.to_stride == 1) {
      std::memcpy(to, from, static_cast<size_t>(length * element_size_));
      return;
    }
    switch (element_size_) {
      case 1:
        return copy_strided<1>(from, to, length, run_.to_stride);
      case 2:
        return copy_strided<2>(from, to, length, run_.to_stride);
      case 4:
        return copy_strided<4>(from, to, length, run_.to_stride);
      default:
        return copy_strided<8>(from, to, length, run_.to_stride);
    }
  }

  void consume(int64_t length) {
    run_.from += length;
    run_.to += length * run_.to_stride;
    run_.length -= length;
    if (run_.length == 0) more_ = runs_.next(run_);
  }

  std::byte* target_at(int64_t position) const { return target_ + position * element_size_; }

  const BlockReader& blocks_;
  const RankFile::Entry& entry_;
  const Box& target_box_;
  const std::vector<int64_t> target_strides_;
  std::byte* const target_;
  const int64_t element_size_;
  const int64_t block_elements_;
  BoxRuns runs_;
  Run run_;  // the rest of the current run
  bool more_;
  std::unique_ptr<std::byte[]> buffer_;
};

// The 8 length bytes and the JSON text.
std::string read_header(const InputFile& file) {
  const auto file_size = static_cast<size_t>(file.num_bytes());
  std::string bytes(std::min<size_t>(sizeof(uint64_t), file_size), '\0');
  file.read(std::as_writable_bytes(std::span(bytes)), 0);
  const size_t length = titan::detail::checked_header_length(bytes, file_size, file.path().string());
  bytes.resize(sizeof(uint64_t) + length);
  file.read(std::as_writable_bytes(std::span(bytes).subspan(sizeof(uint64_t))), sizeof(uint64_t));
  return bytes;
}

detail::RankFileHeader parse(const std::string& header, const InputFile& file) {
  return detail::parse_rank_file_header(std::string_view(header).substr(sizeof(uint64_t)), header.size(),
                                        static_cast<size_t>(file.num_bytes()), file.path().string());
}

titan::detail::SafetensorsHeader parse_safetensors(const std::string& header, const InputFile& file) {
  return titan::detail::parse_safetensors_header(std::string_view(header).substr(sizeof(uint64_t)),
                                                 header.size(), static_cast<size_t>(file.num_bytes()),
                                                 file.path().string());
}

// Distinguishes a swapped file from a damaged one: "; it belongs to step 400, not 500", or nothing.
std::string identity_difference(const InputFile& file, const FileIdentity& expected) {
  try {
    const std::string other = detail::difference(parse(read_header(file), file).identity, expected);
    return other.empty() ? "" : str("; ", other);
  } catch (const Error&) {
    return "";
  }
}

void check_target(std::string_view name, const RankFile::Entry& entry, const Box& box,
                  const at::Tensor& target) {
  TITAN_CHECK(target.device().is_cpu() && target.scalar_type() == entry.dtype, "'", name, "' is read to a ",
              target.scalar_type(), " tensor on ", target.device(), "; expected ", entry.dtype,
              " on the CPU");
  TITAN_CHECK(box.offset.size() == entry.box.offset.size() && target.sizes() == at::IntArrayRef(box.length),
              "'", name, "' is read to a tensor of ", target.sizes(), " for a box at ",
              at::IntArrayRef(box.offset), " of lengths ", at::IntArrayRef(box.length), ", from one at ",
              at::IntArrayRef(entry.box.offset), " of lengths ", at::IntArrayRef(entry.box.length));
}

// Checks all blocks; describes the first damaged one. Drops the pages after reading them, so that verifying a
// large checkpoint doesn't push everything else out of memory.
std::string verify_entry(const InputFile& file, const std::string& name, const RankFile::Entry& entry,
                         std::span<std::byte> buffer, const std::function<void(int64_t)>& progress) {
  const BlockReader blocks(file, name, entry);
  std::string problem;
  for (int64_t first = 0; first < blocks.num_blocks(); first += kReadBlocks) {
    const int64_t last = std::min(first + kReadBlocks, blocks.num_blocks());
    blocks.read(first, last, buffer.data());
    if (problem.empty()) problem = blocks.damage(first, last, buffer.data());
    const int64_t num_bytes = blocks.end(last - 1) - blocks.begin(first);
    file.drop(entry.offset + blocks.begin(first), num_bytes);
    if (progress) progress(num_bytes);
  }
  return problem;
}

}  // namespace

struct RankFile::Impl {
  explicit Impl(const std::filesystem::path& path) : file(path) {}
  InputFile file;
  detail::RankFileHeader header;
};

RankFile::RankFile(const std::filesystem::path& path, const FileRecord& record, const FileIdentity* identity)
    : impl_(std::make_shared<Impl>(path)) {
  const InputFile& file = impl_->file;
  const auto hint = [&] { return identity ? identity_difference(file, *identity) : ""; };
  if (file.num_bytes() != record.num_bytes)
    throw Error(str(path.string(), ": has ", file.num_bytes(), " bytes; the checkpoint's manifest says ",
                    record.num_bytes, hint()));
  const std::string header = read_header(file);
  if (const std::string digest = digest_of(header); digest != record.header_digest)
    throw Error(str(path.string(), ": its header has digest ", digest, "; the checkpoint's manifest says ",
                    record.header_digest, hint()));
  if (!identity) {
    auto parsed = parse_safetensors(header, file);
    impl_->header = {
        .identity = {}, .names = parsed.names, .entries = detail::checked_entries(parsed, path.string())};
    TITAN_CHECK(impl_->header.entries.size() == parsed.names.size(), path.string(), ": its metadata has no '",
                detail::kChecksumsKey, "'");
    return;
  }
  impl_->header = parse(header, file);
  const std::string other = detail::difference(impl_->header.identity, *identity);
  if (!other.empty()) throw Error(str(path.string(), ": ", other));
}

const detail::InputFile& RankFile::file() const { return impl_->file; }
const std::vector<std::string>& RankFile::names() const { return impl_->header.names; }

const RankFile::Entry& RankFile::entry(std::string_view name) const {
  const auto found = impl_->header.entries.find(name);
  if (found == impl_->header.entries.end())
    throw Error(str(impl_->file.path().string(), ": has no tensor '", name, "'"));
  return found->second;
}

void RankFile::read(std::string_view name, const Box& target_box, const at::Tensor& target) const {
  const Entry& about = entry(name);
  check_target(name, about, target_box, target);
  const BlockReader blocks(impl_->file, name, about);
  PieceReader(blocks, about, target_box, target).read();
  impl_->file.check_unchanged();
}

void RankFile::verify(const std::function<void(int64_t bytes)>& progress) const {
  std::vector<std::byte> buffer(static_cast<size_t>(kReadBlocks * kBlockBytes));
  std::string problems;
  for (const std::string& name : names()) {
    const std::string problem = verify_entry(impl_->file, name, entry(name), buffer, progress);
    if (!problem.empty()) problems += (problems.empty() ? "" : "\n") + problem;
  }
  impl_->file.drop(0, 0);  // pages that several tensors share
  impl_->file.check_unchanged();
  if (!problems.empty()) throw Error(problems);
}

namespace detail {
namespace {

// One vector per segment; Linux takes 1,024 at once.
constexpr size_t kMaxSegments = 512;

std::span<const std::byte> bytes_of(const PieceToWrite& piece, int64_t begin, int64_t num_bytes) {
  return {static_cast<const std::byte*>(piece.data.const_data_ptr()) + begin, static_cast<size_t>(num_bytes)};
}

// The header's information about the blocks, computed by several threads.
struct BlockSummary {
  Checksums checksums;
  std::atomic<bool> finite{true};

  // Each block is a different element of `checksums`, so threads don't conflict.
  void add(const PieceToWrite& piece, const Segment& segment) {
    const int64_t end = segment.begin + segment.num_bytes;
    for (int64_t at = segment.begin; at < end; at += kBlockBytes) {
      const auto block = bytes_of(piece, at, std::min(kBlockBytes, end - at));
      checksums[segment.piece][static_cast<size_t>(at / kBlockBytes)] = checksum_of(block);
      if (!all_finite(block, piece.data.scalar_type())) finite = false;
    }
  }
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
  BlockSummary blocks{.checksums = blank_checksums(pieces)};
  const auto header_bytes = make_rank_file_header(identity, pieces, blocks.checksums).size();
  const int64_t num_bytes = total_bytes(header_bytes, pieces);
  const auto file = create(num_bytes);
  const std::vector<Chunk> chunks = plan_chunks(pieces);
  run_tasks(options.num_threads, chunks.size(), [&](size_t index) {
    const Chunk& chunk = chunks[index];
    std::vector<std::span<const std::byte>> parts;
    for (const Segment& segment : chunk.segments) {
      const PieceToWrite& piece = pieces[segment.piece];
      blocks.add(piece, segment);
      parts.push_back(bytes_of(piece, segment.begin, segment.num_bytes));
    }
    file->write(parts, static_cast<int64_t>(header_bytes) + chunk.offset);
    if (options.progress) options.progress(chunk.num_bytes);
  });
  // The header is written last: without it, a file can't be mistaken for a whole one.
  const std::string header = make_rank_file_header(identity, pieces, blocks.checksums);
  TITAN_INTERNAL_ASSERT(header.size() == header_bytes, "checksums have a fixed width");
  const auto bytes = std::as_bytes(std::span(header));
  file->write({&bytes, 1}, 0);
  file->finish();
  return {.record = {.num_bytes = num_bytes, .header_digest = digest_of(header)}, .finite = blocks.finite};
}

std::filesystem::path stored_file(const std::filesystem::path& folder, const Manifest& manifest,
                                  int64_t rank) {
  return folder /
         (is_model_alone(manifest) ? model_file_name(rank, manifest.table.world_size()) : file_name(rank));
}

RankFile open_rank_file(const std::filesystem::path& step_folder, const Manifest& manifest, int64_t rank) {
  const std::filesystem::path path = stored_file(step_folder, manifest, rank);
  if (!is_file(path))
    throw Error(titan::str(path.string(), not_a_file(path), is_there(path) ? "; links aren't followed" : ""));
  const FileRecord& record = manifest.files.at(static_cast<size_t>(rank));
  if (is_model_alone(manifest)) return RankFile(path, record);
  return RankFile(path, {manifest.run_id, manifest.step, rank, manifest.table.world_size()}, record);
}

std::shared_ptr<const RankFile> OpenFiles::use(const Manifest& manifest, int64_t rank) {
  const std::shared_ptr<Slot> slot = take_slot(rank);
  // Only threads that need this file wait here.
  const std::lock_guard lock(slot->opening);
  if (!slot->file) slot->file = open_rank_file(folder_, manifest, rank);
  return {slot, &*slot->file};
}

std::shared_ptr<OpenFiles::Slot> OpenFiles::take_slot(int64_t rank) {
  const std::lock_guard lock(mutex_);
  if (!slots_.contains(rank) && slots_.size() >= most_open_) close_oldest();
  std::shared_ptr<Slot>& slot = slots_[rank];
  if (!slot) slot = std::make_shared<Slot>();
  slot->last_use = ++num_uses_;
  return slot;
}

void OpenFiles::close_oldest() {
  auto oldest = slots_.end();
  for (auto slot = slots_.begin(); slot != slots_.end(); ++slot) {
    if (slot->second.use_count() > 1) continue;
    if (oldest == slots_.end() || slot->second->last_use < oldest->second->last_use) oldest = slot;
  }
  if (oldest == slots_.end()) return;  // all are being read: one more than usual stays open for a while
  if (oldest->second->file) bytes_of_closed_ += oldest->second->file->file().bytes_read();
  slots_.erase(oldest);
}

int64_t OpenFiles::bytes_read() const {
  const std::lock_guard lock(mutex_);
  int64_t bytes = bytes_of_closed_;
  for (const auto& [rank, slot] : slots_)
    if (slot->file) bytes += slot->file->file().bytes_read();
  return bytes;
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
