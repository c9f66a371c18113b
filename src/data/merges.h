#pragma once

// The merges of a byte-pair encoding: which two neighbouring tokens become which, and in what order of
// preference.

#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

namespace titan::data {

/// What a pair of neighbours becomes. Lower ranks merge first.
struct Merge {
  static constexpr uint32_t kNever = std::numeric_limits<uint32_t>::max();
  uint32_t rank = kNever;
  int32_t id = -1;
};

/// (left id, right id) -> Merge: one flat table, at most half full.
class MergeTable {
 public:
  explicit MergeTable(size_t num_merges = 0);
  /// A later merge of the same pair takes the place of an earlier one.
  void add(int32_t left, int32_t right, Merge merge);

  Merge find(int32_t left, int32_t right) const {
    uint64_t key = key_of(left, right);
    for (size_t slot = slot_of(key);; slot = (slot + 1) & mask_) {
      if (slots_[slot].key == key) return slots_[slot].merge;
      if (slots_[slot].key == kEmpty) return {};
    }
  }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  struct Slot {
    uint64_t key = kEmpty;
    Merge merge;
  };
  static uint64_t key_of(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  size_t slot_of(uint64_t key) const { return (key * 0x9E3779B97F4A7C15ull) >> shift_; }

  std::vector<Slot> slots_;
  size_t mask_;
  int shift_;
};

/// Merges the tokens of one word in place until no neighbours merge. Holds buffers, so one a thread.
class WordMerger {
 public:
  /// `ids` in: one token a byte; out: the word's tokens.
  void merge(const MergeTable& table, std::vector<int32_t>& ids);

 private:
  // Short words: look through all pairs for the best, as many times as there are merges. Quadratic, but on
  // one cache line.
  void merge_by_scanning(const MergeTable& table, std::vector<int32_t>& ids);
  // Long words (a megabyte of spaces is one): a queue of candidate pairs over a linked list.
  void merge_by_queue(const MergeTable& table, std::vector<int32_t>& ids);

  struct Symbol {
    int32_t id;
    int32_t previous;
    int32_t next;
  };
  // A pair to merge, by its left symbol: the rank in the upper half, so that numbers compare as merges are
  // due (lowest rank first, leftmost of equals). What it merges into is looked up again when its turn comes,
  // as a neighbour may have changed.
  using Candidate = uint64_t;
  Candidate candidate(const MergeTable& table, int32_t left) const;
  void push(Candidate candidate);
  Candidate pop();

  std::vector<Merge> pairs_;
  std::vector<Symbol> symbols_;
  std::vector<Candidate> queue_;
};

}  // namespace titan::data
