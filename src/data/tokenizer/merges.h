#pragma once

// The merges of a byte-pair encoding: the pairs of neighboring tokens that become one token, in order.

#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <queue>
#include <span>
#include <string_view>
#include <vector>

#include "core/hash.h"

namespace titan::data {

/// The result of a pair of neighbors. Lower ranks merge first.
struct Merge {
  static constexpr uint32_t kNever = std::numeric_limits<uint32_t>::max();
  uint32_t rank = kNever;
  int32_t id = -1;
};

/// (left id, right id) -> Merge: a flat hash table, at most half full.
class MergeTable {
 public:
  explicit MergeTable(size_t num_merges = 0)
      : slots_(std::bit_ceil(2 * num_merges + 2)),
        mask_(slots_.size() - 1),
        shift_(64 - std::countr_zero(slots_.size())) {}

  /// A later merge of the same pair replaces an earlier one.
  void add(int32_t left, int32_t right, Merge merge) {
    uint64_t key = key_of(left, right);
    size_t slot = slot_of(key);
    while (slots_[slot].key != kEmpty && slots_[slot].key != key) slot = (slot + 1) & mask_;
    slots_[slot] = {key, merge};
  }

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

/// Merges the tokens of one word in place until no neighbors merge. Holds buffers, so each thread needs its
/// own.
class WordMerger {
 public:
  /// `ids` starts as one token per byte and ends as the word's tokens.
  void merge(const MergeTable& table, std::vector<int32_t>& ids);

 private:
  // For short words: scans all pairs for the best before each merge. Quadratic, but within a cache line.
  void merge_by_scanning(const MergeTable& table, std::vector<int32_t>& ids);
  // For long words (a megabyte of spaces is one): a queue of candidate pairs over a linked list.
  void merge_by_queue(const MergeTable& table, std::vector<int32_t>& ids);

  struct Symbol {
    int32_t id;
    int32_t previous;
    int32_t next;
  };
  // A pair by its left symbol, with the rank in the upper half: numbers compare in merge order (lowest rank
  // first, then leftmost). Its merge is looked up again when its turn comes, because a neighbor may have
  // changed.
  using Candidate = uint64_t;
  void push_candidate(const MergeTable& table, int32_t left);

  std::vector<Merge> pairs_;
  std::vector<Symbol> symbols_;
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue_;  // empty between words
};

/// Remembers the ids of words: text repeats its words, so most never reach the merges. Two direct-mapped
/// tables hold words up to 16 and up to 48 bytes in one or two cache lines per entry. A newer word replaces
/// an older one in its slot; nothing is allocated. Longer words, and words with more ids, aren't remembered.
class WordCache {
 public:
  static constexpr size_t kLongest = 48;

  /// Appends the ids of `word` (not empty) to `ids`, or returns false.
  bool append(std::string_view word, std::vector<int32_t>& ids) const {
    if (word.size() <= ShortKey::kBytes) return short_.append(ShortKey(word), ids);
    return word.size() <= LongKey::kBytes && long_.append(LongKey(word), ids);
  }

  void remember(std::string_view word, std::span<const int32_t> ids) {
    if (word.size() <= ShortKey::kBytes)
      short_.remember(ShortKey(word), ids);
    else if (word.size() <= LongKey::kBytes)
      long_.remember(LongKey(word), ids);
  }

 private:
  // A word in two machine words. Overlapping loads neither read past the end nor go byte by byte; the length
  // distinguishes words whose loads are equal.
  struct ShortKey {
    static constexpr size_t kBytes = 16;
    uint64_t low, high;
    uint8_t size;

    ShortKey() : low(0), high(0), size(0) {}
    explicit ShortKey(std::string_view word) : size(static_cast<uint8_t>(word.size())) {
      const char* p = word.data();
      if (word.size() >= 8) {
        std::memcpy(&low, p, 8);
        std::memcpy(&high, p + word.size() - 8, 8);
      } else if (word.size() >= 4) {
        low = load32(p);
        high = load32(p + word.size() - 4);
      } else {
        low = static_cast<uint8_t>(p[0]) | static_cast<uint8_t>(p[word.size() / 2]) << 8;
        high = static_cast<uint8_t>(p[word.size() - 1]);
      }
    }
    static uint32_t load32(const char* p) {
      uint32_t value;
      std::memcpy(&value, p, 4);
      return value;
    }
    uint64_t hash() const {
      return (low * 0x9E3779B97F4A7C15ull ^ high * 0xC2B2AE3D27D4EB4Full ^ size) * 0xFF51AFD7ED558CCDull;
    }
    bool operator==(const ShortKey& o) const { return low == o.low && high == o.high && size == o.size; }
  };

  struct LongKey {
    static constexpr size_t kBytes = kLongest;
    char bytes[kBytes] = {};
    uint8_t size = 0;

    LongKey() = default;
    explicit LongKey(std::string_view word) : size(static_cast<uint8_t>(word.size())) {
      std::memcpy(bytes, word.data(), word.size());
    }
    uint64_t hash() const { return hash_bytes({bytes, size}); }
    bool operator==(const LongKey& o) const {
      return size == o.size && std::memcmp(bytes, o.bytes, size) == 0;
    }
  };

  template <class Key, size_t kIds, int kBits>
  class Slots {
   public:
    bool append(const Key& key, std::vector<int32_t>& ids) const {
      const Entry& entry = entries_[slot_of(key)];
      if (!(entry.key == key)) return false;
      ids.insert(ids.end(), entry.ids, entry.ids + entry.count);
      return true;
    }
    void remember(const Key& key, std::span<const int32_t> ids) {
      if (ids.size() > kIds) return;
      Entry& entry = entries_[slot_of(key)];
      entry.key = key;
      entry.count = static_cast<uint8_t>(ids.size());
      std::memcpy(entry.ids, ids.data(), ids.size_bytes());
    }

   private:
    struct Entry {
      Key key;
      uint8_t count = 0;
      int32_t ids[kIds];
    };
    static_assert(sizeof(Entry) % 64 == 0);
    static size_t slot_of(const Key& key) { return key.hash() >> (64 - kBits); }

    std::vector<Entry> entries_ = std::vector<Entry>(size_t{1} << kBits);
  };

  Slots<ShortKey, 9, 14> short_;
  Slots<LongKey, 19, 12> long_;
};

}  // namespace titan::data
