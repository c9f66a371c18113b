#pragma once

// Numbers and texts in one string, for what ranks of one build send each other.

#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "titan/core/error.h"
#include "titan/dist/collectives.h"
#include "titan/dist/world.h"

namespace titan::checkpoint::detail {

class WireWriter {
 public:
  void number(int64_t value) { bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value)); }
  void text(std::string_view value) {
    number(static_cast<int64_t>(value.size()));
    bytes_.append(value);
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

/// Throws Error where less is left than is asked for.
class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : left_(bytes) {}
  bool done() const { return left_.empty(); }
  int64_t number() {
    int64_t value = 0;
    std::memcpy(&value, next(sizeof(value)).data(), sizeof(value));
    return value;
  }
  std::string text() {
    const int64_t size = number();
    return std::string(next(static_cast<size_t>(size)));
  }

 private:
  std::string_view next(size_t size) {
    TITAN_CHECK(size <= left_.size(), "a message of another rank ends early: the ranks run different builds");
    const std::string_view part = left_.substr(0, size);
    left_.remove_prefix(size);
    return part;
  }

  std::string_view left_;
};

// Which ranks have come how far, in the job's store: whoever waited in vain for a rank that passes on what
// others say finds out there which of them it was.

class Arrivals {
 public:
  /// `name`: the same on all ranks, and nobody else's.
  Arrivals(const dist::World& world, std::string name);

  /// This rank is at its call number `call`. Doesn't throw.
  void tell(int64_t call) const;
  /// Those of the ranks first ... last - 1 that aren't there yet. Empty where the store doesn't answer.
  std::vector<int> missing(int first, int last, int64_t call) const;

 private:
  std::string key_of(int rank) const;

  dist::World world_;
  std::string name_;
};

// [Note: the tree]
// What all ranks have to say goes to rank 0, and its answer back, over a binomial tree: rank r's parent is r
// without its lowest set bit, so the ranks below r are r + 1 ... r + lowest bit - 1.
//
//            0
//      1     2       4
//            3     5   6
//                      7
//
// A rank waits for each child until `timeout` has passed, and a little longer the higher it stands: a child
// that waits in vain has time to say for whom. A child whose process ends is lost at once, as its connection
// closes. What the ranks say of a lost one goes up like any other answer, and rank 0's verdict still comes to
// all who are there. The time is kept here and not by gloo, which on a time-out closes every connection of
// the group: then nobody could be told anything.

/// gloo's own limit, never reached, of a group whose time is kept here.
constexpr std::chrono::milliseconds kNoLimit = std::chrono::hours(24 * 7);

struct Answer {
  int rank = 0;
  std::string text;   // of a lost rank: how it was lost
  bool lost = false;  // the ranks are out of step: the tree is of no use any more
};

struct Verdict {
  std::string text;
  bool lost = false;
};

struct TreeOptions {
  std::string name;                // of the group; nobody else uses it
  std::string run_id;              // tells this tree's arrivals from an earlier one's
  std::vector<std::string> hosts;  // by rank
  std::chrono::milliseconds timeout{};
};

/// Used by one thread.
class RankTree {
 public:
  RankTree(const dist::World& world, std::shared_ptr<dist::Group> group, const TreeOptions& options);

  /// `own` and what the ranks below this one say; on rank 0 of all ranks, by rank. Every call is followed by
  /// spread().
  std::vector<Answer> gather(std::string own);
  /// Rank 0's verdict on every rank; `verdict` is its own. Where it doesn't come it says why, and `lost`; so
  /// do all later calls.
  Verdict spread(Verdict verdict);

  /// "rank 3 (host)"
  std::string name_of(int rank) const;
  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }

 private:
  using Milliseconds = std::chrono::milliseconds;

  std::vector<Answer> lost_below(int child, Milliseconds waited) const;
  void send_up(const std::vector<Answer>& answers);
  Verdict receive_verdict() const;
  void send_down(const Verdict& verdict, std::string& problem);
  Milliseconds longest_gather() const;

  std::shared_ptr<dist::Group> group_;
  TreeOptions options_;
  Arrivals arrivals_;
  std::vector<int> children_;
  std::vector<bool> lost_;  // of children_: in this call
  Milliseconds grace_{};
  int64_t call_ = 0;
  std::string cut_off_;      // why this rank can't reach its parent
  std::string out_of_step_;  // since a rank was lost: no call makes sense any more
};

int parent_of(int rank);
std::vector<int> children_of(int rank, int size);
/// One behind the last rank of those below `rank`.
int end_below(int rank, int size);
/// Edges to the lowest rank below.
int height_of(int rank, int size);

// What ranks come to an agreement about over a tree.

/// All ranks' problems as one: empty where nobody has one. `lost` where a rank is.
Verdict merged_problems(const RankTree& tree, const std::vector<Answer>& answers);
/// On rank 0: who says something else than rank 0, as "rank 3 (host) WHAT rank 0 (host)".
Verdict unequal(const RankTree& tree, const std::vector<Answer>& answers, const std::string& what);
/// What any rank has against going on, the same on all: empty for nothing.
Verdict agree(RankTree& tree, const std::string& problem);
/// What the lowest rank says that says anything; empty: none does. Throws Error where a rank is lost.
std::string any_text(RankTree& tree, const std::string& text);

}  // namespace titan::checkpoint::detail
