#pragma once

// Sends all ranks' reports to rank 0 and its verdict back, in a way that survives lost ranks; and encodes the
// messages.
//
// [Note: the tree] The reports go up and the verdict comes down over a binomial tree: rank r's parent is r
// without its lowest set bit, so the ranks below r are r + 1 ... r + lowest bit - 1.
//
//            0
//      1     2       4
//            3     5   6
//                      7
//
// A rank waits for each child until `timeout` has passed, and a little longer the higher it is in the tree,
// so that a child that waits in vain has time to report which rank it waited for. A child whose process ends
// is lost at once, because its connection closes. A report about a lost rank goes up like any other answer,
// and rank 0's verdict still reaches all remaining ranks. RankTree enforces the time limit itself: gloo
// closes every connection of a group when it times out, and then no message gets through.

#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "titan/core/error.h"
#include "titan/dist/collectives.h"
#include "titan/dist/device_mesh.h"
#include "titan/dist/world.h"

namespace titan::checkpoint::detail {

// ---- messages: numbers, texts, lists, maps and structs of them, encoded as one string. Sender and receiver
// must run the same build. A struct names its fields once, for both directions:
//
//   static void fields(auto& wire, auto& self) { wire(self.rank, self.lost, self.text); }

class WireWriter {
 public:
  template <class... Values>
  void operator()(const Values&... values) {
    (put(values), ...);
  }
  std::string take() { return std::move(bytes_); }

 private:
  template <class Value>
  void put(const Value& value) {
    if constexpr (std::is_arithmetic_v<Value> || std::is_enum_v<Value>) {
      const auto number = static_cast<int64_t>(value);
      bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number));
    } else if constexpr (std::is_convertible_v<Value, std::string_view>) {
      put(value.size());
      bytes_.append(value);
    } else if constexpr (requires { value.begin(); }) {
      put(value.size());
      for (const auto& each : value) put(each);
    } else if constexpr (requires { value.second; }) {
      (*this)(value.first, value.second);
    } else if constexpr (requires { value.has_value(); }) {
      put(value.has_value());
      if (value) put(*value);
    } else {
      Value::fields(*this, value);
    }
  }

  std::string bytes_;
};

/// Throws Error if the message ends too early.
class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : left_(bytes) {}
  bool done() const { return left_.empty(); }

  template <class... Values>
  void operator()(Values&... values) {
    ((values = get<Values>()), ...);
  }
  template <class Value>
  Value get() {
    if constexpr (std::is_arithmetic_v<Value> || std::is_enum_v<Value>) {
      int64_t number = 0;
      std::memcpy(&number, next(sizeof(number)).data(), sizeof(number));
      return static_cast<Value>(number);
    } else if constexpr (std::is_same_v<Value, std::string>) {
      const auto size = get<size_t>();
      return std::string(next(size));
    } else if constexpr (requires(Value values) { values.begin(); }) {
      Value values;
      for (auto left = get<size_t>(); left > 0; --left)
        values.insert(values.end(), get<typename Value::value_type>());
      return values;
    } else if constexpr (requires(Value pair) { pair.second; }) {
      return Value{get<std::remove_const_t<typename Value::first_type>>(),
                   get<typename Value::second_type>()};
    } else if constexpr (requires(Value value) { value.has_value(); }) {
      return get<bool>() ? Value(get<typename Value::value_type>()) : Value();
    } else {
      Value value;
      Value::fields(*this, value);
      return value;
    }
  }

 private:
  std::string_view next(size_t size) {
    TITAN_CHECK(size <= left_.size(), "another rank's message ends early: the ranks run different builds");
    const std::string_view part = left_.substr(0, size);
    left_.remove_prefix(size);
    return part;
  }

  std::string_view left_;
};

template <class... Values>
std::string to_wire(const Values&... values) {
  WireWriter out;
  out(values...);
  return out.take();
}
/// Throws Error for a text that ends early.
template <class Value>
Value from_wire(std::string_view bytes) {
  return WireReader(bytes).get<Value>();
}

// ---- the tree

/// As within(); the flight recorder counts the collectives of `call` as background calls.
bool within_in_background(std::chrono::milliseconds limit, std::function<void()> call);

/// A limit for gloo that is never reached, for groups whose time limit is enforced outside it.
constexpr std::chrono::milliseconds kNoLimit = std::chrono::hours(24 * 7);

struct Answer {
  int rank = 0;
  std::string text;   // if the rank is lost: how
  bool lost = false;  // the ranks are out of step: the tree can't be used any more
  static void fields(auto& wire, auto& self) { wire(self.rank, self.lost, self.text); }
};

struct Verdict {
  std::string text;
  bool lost = false;
  static void fields(auto& wire, auto& self) { wire(self.lost, self.text); }
};

struct TreeOptions {
  std::string name;                // the group's; nothing else uses the group
  std::string run_id;              // distinguishes this tree's arrivals from an earlier tree's
  std::vector<std::string> hosts;  // by rank
  std::chrono::milliseconds timeout{};
};

/// "rank 3 (host)"
std::string rank_on(size_t rank, const std::string& host);

/// Not thread-safe.
class RankTree {
 public:
  RankTree(const dist::World& world, std::shared_ptr<dist::Group> group, const TreeOptions& options);

  /// Returns `own` and the answers of the ranks below this one, sorted by rank; on rank 0 that is all ranks.
  /// Follow every call by spread().
  std::vector<Answer> gather(std::string own);
  /// Returns rank 0's `verdict` on every rank. If it doesn't arrive, the result says why and is `lost`, as
  /// are the results of all later calls.
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
  std::string send_down(const Verdict& verdict);
  Milliseconds longest_gather() const;

  dist::World world_;
  std::shared_ptr<dist::Group> group_;
  TreeOptions options_;
  std::string arrivals_;  // prefix of the store keys that say which call each rank has reached
  std::vector<int> children_;
  std::vector<bool> lost_;  // by position in children_: lost in this call
  Milliseconds grace_{};
  int64_t call_ = 0;
  std::string cut_off_;      // why this rank can't reach its parent
  std::string out_of_step_;  // how a rank was lost; empty: none was
};

int parent_of(int rank);
std::vector<int> children_of(int rank, int size);
/// One past the last rank below `rank`.
int end_below(int rank, int size);
/// The number of edges to the deepest rank below `rank`.
int height_of(int rank, int size);

// ---- agreements over a tree

/// All ranks' problems as one text; empty if no rank has one. `lost` if a rank is.
Verdict merged_problems(const RankTree& tree, const std::vector<Answer>& answers);
/// On rank 0: the first rank whose answer differs from rank 0's, as "rank 3 (host) WHAT rank 0 (host)".
Verdict unequal(const RankTree& tree, const std::vector<Answer>& answers, const std::string& what);
/// Collective: all ranks' problems, the same text on all ranks; empty: no rank has one.
Verdict agree(RankTree& tree, const std::string& problem);
/// Collective: the text of the lowest rank that has one; empty: none has. Throws Error if a rank is lost.
std::string any_text(RankTree& tree, const std::string& text);
/// The names that any stage of `pipeline` has. Collective over it.
std::set<std::string> names_of_stages(const std::vector<std::string>& own, const DeviceMesh& pipeline,
                                      dist::Label label);
/// Runs `part` and returns the message of the exception that it throws; empty: none.
template <class Part>
std::string problem_of(const Part& part) {
  try {
    part();
  } catch (const std::exception& error) {
    return *error.what() != '\0' ? error.what() : "an error without a message";
  }
  return "";
}

/// Runs `part` on rank 0 and returns its result on all ranks; if it throws, every rank throws Error.
/// Collective over the world.
std::string from_rank_0(const dist::World& world, dist::Label label,
                        const std::function<std::string()>& part);

}  // namespace titan::checkpoint::detail
