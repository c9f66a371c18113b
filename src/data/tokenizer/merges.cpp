#include "data/tokenizer/merges.h"

#include <algorithm>

namespace titan::data {
namespace {

constexpr size_t kScanned = 48;  // for longer words the queue is faster than scanning

}  // namespace

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

void WordMerger::push_candidate(const MergeTable& table, int32_t left) {
  if (left < 0 || symbols_[left].next < 0) return;
  uint32_t rank = table.find(symbols_[left].id, symbols_[symbols_[left].next].id).rank;
  if (rank != Merge::kNever) queue_.push(uint64_t{rank} << 32 | static_cast<uint32_t>(left));
}

void WordMerger::merge_by_queue(const MergeTable& table, std::vector<int32_t>& ids) {
  constexpr int32_t kGone = -1;  // merged into its left neighbor
  auto count = static_cast<int32_t>(ids.size());
  symbols_.clear();
  for (int32_t i = 0; i < count; ++i) symbols_.push_back({ids[i], i - 1, i + 1 < count ? i + 1 : -1});
  for (int32_t i = 0; i < count; ++i) push_candidate(table, i);
  while (!queue_.empty()) {
    const Candidate top = queue_.top();
    queue_.pop();
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
    push_candidate(table, left.previous);
    push_candidate(table, position);
  }
  ids.clear();
  for (int32_t i = 0; i >= 0; i = symbols_[i].next) ids.push_back(symbols_[i].id);
}

}  // namespace titan::data
