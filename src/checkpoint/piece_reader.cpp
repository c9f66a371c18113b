#include "piece_reader.h"

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <sstream>

#include "block_checks.h"
#include "titan/core/error.h"

namespace titan::checkpoint::detail {
namespace {

std::string hex(uint64_t value) {
  std::ostringstream text;
  text << std::hex << std::setw(16) << std::setfill('0') << value;
  return text.str();
}

// One by one, for targets whose elements don't lie in a row.
template <size_t kSize>
void copy_strided(const std::byte* from, std::byte* to, int64_t length, int64_t to_stride) {
  for (int64_t i = 0; i < length; ++i)
    std::memcpy(to + i * to_stride * int64_t{kSize}, from + i * int64_t{kSize}, kSize);
}

}  // namespace

// ---- blocks

BlockReader::BlockReader(const InputFile& file, std::string_view name, const RankFile::Entry& entry)
    : file_(file), name_(name), entry_(entry) {}

int64_t BlockReader::num_blocks() const { return static_cast<int64_t>(entry_.checksums.size()); }

void BlockReader::read(int64_t first, int64_t last, std::byte* into) const {
  const auto num_bytes = static_cast<size_t>(end(last - 1) - begin(first));
  file_.read({into, num_bytes}, entry_.offset + begin(first));
}

std::string BlockReader::damage(int64_t first, int64_t last, const std::byte* bytes) const {
  for (int64_t block = first; block < last; ++block) {
    const uint64_t recorded = entry_.checksums[static_cast<size_t>(block)];
    const uint64_t found =
        checksum_of({bytes + (begin(block) - begin(first)), static_cast<size_t>(end(block) - begin(block))});
    if (found == recorded) continue;
    return str(file_.path().string(), ": tensor '", name_, "' is damaged: block ", block, " of ",
               num_blocks(), " (bytes ", entry_.offset + begin(block), " to ", entry_.offset + end(block),
               " of the file) has checksum ", hex(found), ", recorded is ", hex(recorded));
  }
  return "";
}

void BlockReader::read_checked(int64_t first, int64_t last, std::byte* into) const {
  read(first, last, into);
  const std::string problem = damage(first, last, into);
  if (!problem.empty()) throw Error(problem);
}

// ---- parts of a tensor

PieceReader::PieceReader(const BlockReader& blocks, const RankFile::Entry& entry, const Box& target_box,
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

void PieceReader::read() {
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

std::vector<PieceReader::BlockRange> PieceReader::needed_blocks() const {
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

// How many blocks from `first` on hold nothing but the current run, which lies in the target as in the file.
int64_t PieceReader::num_whole_blocks(int64_t first, int64_t last) const {
  if (run_.to_stride != 1 || run_.from > first * block_elements_) return 0;
  const int64_t end = run_.from + run_.length;
  if (end * element_size_ == entry_.num_bytes) return last - first;
  return std::max<int64_t>(end / block_elements_ - first, 0);
}

void PieceReader::read_into_target(int64_t first, int64_t last) {
  blocks_.read_checked(first, last, target_at(run_.to));
  consume((blocks_.end(last - 1) - blocks_.begin(first)) / element_size_);
}

void PieceReader::read_through_buffer(int64_t first, int64_t last) {
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

void PieceReader::copy_run(const std::byte* from, int64_t length) {
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

void PieceReader::consume(int64_t length) {
  run_.from += length;
  run_.to += length * run_.to_stride;
  run_.length -= length;
  if (run_.length == 0) more_ = runs_.next(run_);
}

}  // namespace titan::checkpoint::detail
