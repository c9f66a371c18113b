#include "data/tokenizer/merges.h"

#include <algorithm>
#include <bit>
#include <functional>

namespace titan::data {
namespace {

constexpr size_t kScanned = 48;  // above, the queue is faster than scanning

constexpr uint64_t kNothing = ~uint64_t{0};  // the pair doesn't merge

}  // namespace

MergeTable::MergeTable(size_t num_merges)
    : slots_(std::bit_ceil(2 * num_merges + 2)),
      mask_(slots_.size() - 1),
      shift_(64 - std::countr_zero(slots_.size())) {}

void MergeTable::add(int32_t left, int32_t right, Merge merge) {
  uint64_t key = key_of(left, right);
  size_t slot = slot_of(key);
  while (slots_[slot].key != kEmpty && slots_[slot].key != key) slot = (slot + 1) & mask_;
  slots_[slot] = {key, merge};
}

void WordMerger::merge(const MergeTable& table, std::vector<int32_t>& ids) {
  if (ids.size() < 2) return;
  if (ids.size() <= kScanned) return merge_by_scanning(table, ids);
  merge_by_queue(table, ids);
}

void WordMerger::merge_by_scanning(const MergeTable& table, std::vector<int32_t>& ids) {
  pairs_.clear();
  for (size_t i = 0; i + 1 < ids.size(); ++i) pairs_.push_back(table.find(ids[i], ids[i + 1]));
  while (!pairs_.empty()) {
    // min_element gives the leftmost of equal ranks.
    auto best = std::min_element(pairs_.begin(), pairs_.end(),
                                 [](const Merge& a, const Merge& b) { return a.rank < b.rank; });
    if (best->rank == Merge::kNever) break;
    size_t at = best - pairs_.begin();
    ids[at] = best->id;
    ids.erase(ids.begin() + at + 1);
    pairs_.erase(best);
    if (at > 0) pairs_[at - 1] = table.find(ids[at - 1], ids[at]);
    if (at < pairs_.size()) pairs_[at] = table.find(ids[at], ids[at + 1]);
  }
}

WordMerger::Candidate WordMerger::candidate(const MergeTable& table, int32_t left) const {
  if (left < 0 || symbols_[left].next < 0) return kNothing;
  uint32_t rank = table.find(symbols_[left].id, symbols_[symbols_[left].next].id).rank;
  return rank == Merge::kNever ? kNothing : uint64_t{rank} << 32 | static_cast<uint32_t>(left);
}

void WordMerger::push(Candidate candidate) {
  if (candidate == kNothing) return;
  queue_.push_back(candidate);
  std::push_heap(queue_.begin(), queue_.end(), std::greater<>());
}

WordMerger::Candidate WordMerger::pop() {
  std::pop_heap(queue_.begin(), queue_.end(), std::greater<>());
  Candidate top = queue_.back();
  queue_.pop_back();
  return top;
}

void WordMerger::merge_by_queue(const MergeTable& table, std::vector<int32_t>& ids) {
  constexpr int32_t kGone = -1;  // merged into its left neighbour
  auto count = static_cast<int32_t>(ids.size());
  symbols_.clear();
  queue_.clear();
  for (int32_t i = 0; i < count; ++i) symbols_.push_back({ids[i], i - 1, i + 1 < count ? i + 1 : -1});
  for (int32_t i = 0; i < count; ++i)
    if (Candidate pair = candidate(table, i); pair != kNothing) queue_.push_back(pair);
  std::make_heap(queue_.begin(), queue_.end(), std::greater<>());
  while (!queue_.empty()) {
    Candidate top = pop();
    auto position = static_cast<int32_t>(top & 0xFFFFFFFF);
    Symbol& left = symbols_[position];
    if (left.id == kGone || left.next < 0) continue;
    Symbol& right = symbols_[left.next];
    Merge merge = table.find(left.id, right.id);
    if (merge.rank != top >> 32) continue;
    left.id = merge.id;
    right.id = kGone;
    left.next = right.next;
    if (left.next >= 0) symbols_[left.next].previous = position;
    push(candidate(table, left.previous));
    push(candidate(table, position));
  }
  ids.clear();
  for (int32_t i = 0; i >= 0; i = symbols_[i].next) ids.push_back(symbols_[i].id);
}

}  // namespace titan::data
