#pragma once

// Reading one tensor of a rank's file, block by block, each checked.

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "box_runs.h"
#include "input_file.h"
#include "titan/checkpoint/rank_file.h"

namespace titan::checkpoint::detail {

/// As many bytes are read at once.
constexpr int64_t kReadBlocks = 8;

/// A tensor's blocks in its file.
class BlockReader {
 public:
  /// All three outlive it.
  BlockReader(const InputFile& file, std::string_view name, const RankFile::Entry& entry);

  int64_t num_blocks() const;
  /// In the tensor, of `count` blocks from `first` on.
  int64_t begin(int64_t block) const { return block * kBlockBytes; }
  int64_t end(int64_t block) const { return std::min(begin(block + 1), entry_.num_bytes); }

  /// Reads blocks [first, last); `into` holds as many bytes.
  void read(int64_t first, int64_t last, std::byte* into) const;
  /// What is wrong with blocks [first, last), lying at `bytes`; empty: nothing.
  std::string damage(int64_t first, int64_t last, const std::byte* bytes) const;
  /// read(), and throws Error for damage.
  void read_checked(int64_t first, int64_t last, std::byte* into) const;

 private:
  const InputFile& file_;
  std::string_view name_;
  const RankFile::Entry& entry_;
};

/// RankFile::read, of checked arguments.
class PieceReader {
 public:
  PieceReader(const BlockReader& blocks, const RankFile::Entry& entry, const Box& target_box,
              const at::Tensor& target);
  void read();

 private:
  struct BlockRange {
    int64_t first, last;  // [first, last)
  };

  std::vector<BlockRange> needed_blocks() const;
  int64_t num_whole_blocks(int64_t first, int64_t last) const;
  void read_into_target(int64_t first, int64_t last);
  void read_through_buffer(int64_t first, int64_t last);
  void copy_run(const std::byte* from, int64_t length);
  void consume(int64_t length);
  std::byte* target_at(int64_t position) const { return target_ + position * element_size_; }

  const BlockReader& blocks_;
  const RankFile::Entry& entry_;
  const Box& target_box_;
  const std::vector<int64_t> target_strides_;
  std::byte* const target_;
  const int64_t element_size_;
  const int64_t block_elements_;
  BoxRuns runs_;
  Run run_;  // what is left of the current one
  bool more_;
  std::unique_ptr<std::byte[]> buffer_;
};

}  // namespace titan::checkpoint::detail
