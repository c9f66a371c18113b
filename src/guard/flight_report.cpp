// [Note: who is to blame]
// A rank that waits in a call waits for the members that haven't made it; those may themselves wait in
// another call for others. Following that from rank to rank ends at a rank that waits for nobody (it loads
// data, or is in an endless loop), at one without a record (it is gone), or in a ring of ranks that wait for
// each other. Before all that, ranks that made different calls under the same number explain everything that
// came after.

#include "guard/flight_report.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_map>

#include "titan/core/error.h"

namespace titan::dist {

std::vector<int> FlightLane::members() const {
  if (from < 0) return ranks;
  std::vector<int> pair;
  for (const int side : {from, to})
    if (static_cast<size_t>(side) < ranks.size()) pair.push_back(ranks[static_cast<size_t>(side)]);
  return pair;
}

int64_t FlightLane::last_of(int rank) const {
  for (auto at = calls.rbegin(); at != calls.rend(); ++at)
    if (at->second.contains(rank)) return at->first;
  return -1;
}

std::string describe(const FlightLane& lane, const FlightCall& call) {
  std::string text = str(call.op, " #", call.sequence);
  if (lane.from >= 0) {
    const auto members = lane.members();
    if (members.size() == 2) text += str(" from rank ", members[0], " to rank ", members[1]);
  }
  text += str(" of group '", lane.group, lane.purpose.empty() ? "" : ", ", lane.purpose, "'");
  if (call.phase.empty() && call.module.empty()) return text;
  return text + str(" (", call.phase, call.phase.empty() || call.module.empty() ? "" : " ", call.module, ")");
}

namespace {

using LaneKey = std::tuple<std::string, std::string, std::vector<int>, int, int>;

/// The ranks whose files mention a group, for groups whose files don't list them.
std::map<std::string, std::vector<int>> ranks_seen(const std::vector<FlightFile>& files) {
  std::map<std::string, std::set<int>> seen;
  for (const FlightFile& file : files)
    for (const FlightGroup& group : file.groups) seen[group.name].insert(file.rank);
  std::map<std::string, std::vector<int>> ranks;
  for (const auto& [name, members] : seen) ranks[name] = {members.begin(), members.end()};
  return ranks;
}

std::string sizes_text(const std::vector<std::vector<int64_t>>& all) {
  return list_str(all, ", ", [](const auto& sizes) { return str("[", list_str(sizes), "]"); });
}

/// Operations whose parts may differ from rank to rank by definition.
bool has_uneven_parts(const std::string& op) {
  return op.find("alltoall") != std::string::npos || op == "gather" || op == "scatter" ||
         op.find("coalesced") != std::string::npos;
}

/// The difference between two calls that should be the same; "" if there is none.
std::string difference(const FlightLane& lane, const FlightCall& a, const FlightCall& b) {
  if (lane.from < 0 && a.op != b.op) return "operation";
  if (!a.dtypes.empty() && !b.dtypes.empty() && a.dtypes != b.dtypes) return "dtype";
  if (!has_uneven_parts(a.op) && !has_uneven_parts(b.op)) {
    const bool crossed = lane.from >= 0 && a.op != b.op;  // one sends what the other receives
    if (a.in_sizes != (crossed ? b.out_sizes : b.in_sizes) ||
        a.out_sizes != (crossed ? b.in_sizes : b.out_sizes))
      return "shape";
  }
  if (lane.from < 0 && (a.phase != b.phase || a.module != b.module)) return "place in the program";
  return "";
}

/// "Float [4, 8] to [4]", "" for a barrier
std::string describe_tensors(const FlightCall& call) {
  std::string text = call.dtypes.empty() ? "" : call.dtypes.front();
  const std::string in = sizes_text(call.in_sizes), out = sizes_text(call.out_sizes);
  if (!in.empty()) text += (text.empty() ? "" : " ") + in;
  if (!out.empty() && out != in) text += " to " + out;
  return text;
}

/// "rank 3", "ranks 0-2, 5"; only the first ones of many.
std::string name_ranks(std::vector<int> ranks) {
  constexpr size_t most_runs = 8;
  std::sort(ranks.begin(), ranks.end());
  std::string text;
  size_t runs = 0;
  for (size_t i = 0; i < ranks.size() && runs < most_runs; ++runs) {
    size_t end = i;
    while (end + 1 < ranks.size() && ranks[end + 1] == ranks[end] + 1) ++end;
    text += str(runs > 0 ? ", " : "", ranks[i]);
    if (end > i) text += str(end == i + 1 ? ", " : "-", ranks[end]);
    i = end + 1;
    if (runs + 1 == most_runs && i < ranks.size()) text += str(" and ", ranks.size() - i, " more");
  }
  return str(ranks.size() == 1 ? "rank " : "ranks ", text);
}

/// A call that a rank waits in, and the ranks it waits for.
struct Blocked {
  const FlightFile* file;
  const FlightCall* call;
  size_t lane;
  std::vector<int> missing;

  int64_t start_ns() const { return call->start_ns; }
};

std::string seconds_text(int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(std::max<int64_t>(ns, 0)) / 1e9);
  return text;
}

class Investigation {
 public:
  Investigation(const std::vector<FlightFile>& files, bool all_ranks_live, FlightReport& report)
      : files_(files), all_ranks_live_(all_ranks_live), report_(report) {
    for (const FlightFile& file : files_) by_rank_[file.rank] = &file;
    join_calls();
  }

  void solve() {
    report_.lane = report_.lanes.size();
    find_blocked(/*background=*/false);
    if (blocked_.empty()) find_blocked(/*background=*/true);
    if (find_mismatch() || find_missing() || find_all_there()) return;
    report_.summary = str("no rank waits for another: all calls of the ", files_.size(),
                          files_.size() == 1 ? " record" : " records", " have finished or are in progress");
  }

 private:
  // Sorts the calls of all files into lanes. If a rank made several calls under one number (PyTorch's
  // coalesced ones), the first stands for all.
  void join_calls() {
    const auto seen = ranks_seen(files_);
    std::map<LaneKey, size_t> index;
    for (const FlightFile& file : files_)
      for (const FlightCall& call : file.calls) {
        const FlightGroup& group = file.groups[call.group];
        const std::vector<int>& ranks = group.ranks.empty() ? seen.at(group.name) : group.ranks;
        const auto [at, is_new] =
            index.try_emplace({group.name, group.purpose, ranks, call.from, call.to}, report_.lanes.size());
        if (is_new) report_.lanes.push_back({group.name, group.purpose, ranks, call.from, call.to, {}});
        report_.lanes[at->second].calls[call.sequence].emplace(file.rank, &call);
        lane_of_[&call] = at->second;
      }
  }

  // Background work may wait for a long time: it matters only if nothing else waits.
  void find_blocked(bool background) {
    for (const FlightFile& file : files_)
      if (auto blocked = blocked_call(file, background)) blocked_.push_back(std::move(*blocked));
  }

  // A rank is blocked in the first call that it waits for and that isn't done.
  std::optional<Blocked> blocked_call(const FlightFile& file, bool background) const {
    for (auto call = file.calls.begin(); call != file.calls.end(); ++call) {
      if (call->background != background) continue;
      const bool has_failed = call->state == FlightState::Failed && !was_survived(file, *call);
      const bool waits =
          call->state == FlightState::Waiting || has_failed || (!file.is_titan && !call->has_ended());
      if (!waits) continue;
      Blocked blocked{&file, &*call, lane_of_.at(&*call), {}};
      const FlightLane& lane = report_.lanes[blocked.lane];
      for (const int rank : lane.members())
        if (rank != file.rank && lane.last_of(rank) < call->sequence) blocked.missing.push_back(rank);
      return blocked;
    }
    return std::nullopt;
  }

  // Whether the rank has made calls since the failure.
  static bool was_survived(const FlightFile& file, const FlightCall& failed) {
    return failed.end_ns > 0 && std::ranges::any_of(file.calls, [&](const FlightCall& call) {
             return call.background == failed.background && call.start_ns > failed.end_ns;
           });
  }

  bool find_mismatch() {
    int64_t earliest = 0;
    bool found = false;
    for (size_t i = 0; i < report_.lanes.size(); ++i)
      for (const auto& [sequence, calls] : report_.lanes[i].calls) {
        const auto& first = *calls.begin()->second;
        for (const auto& [rank, call] : calls) {
          if (difference(report_.lanes[i], first, *call).empty()) continue;
          if (found && call->start_ns >= earliest) continue;
          found = true;
          earliest = call->start_ns;
          report_mismatch(i, sequence);
        }
      }
    return found;
  }

  void report_mismatch(size_t index, int64_t sequence) {
    const FlightLane& lane = report_.lanes[index];
    const auto& calls = lane.calls.at(sequence);
    std::vector<std::pair<const FlightCall*, std::vector<int>>> kinds;
    for (const auto& [rank, call] : calls) {
      auto kind = std::find_if(kinds.begin(), kinds.end(), [&, call = call](const auto& other) {
        return difference(lane, *other.first, *call).empty();
      });
      if (kind == kinds.end()) kind = kinds.insert(kinds.end(), {call, {}});
      kind->second.push_back(rank);
    }
    // The largest set first: the other ranks are the ones to look at.
    std::stable_sort(kinds.begin(), kinds.end(),
                     [](const auto& a, const auto& b) { return a.second.size() > b.second.size(); });
    const std::string text = list_str(kinds, "; ", [&](const auto& kind) {
      const auto& [call, ranks] = kind;
      const std::string tensors = describe_tensors(*call);
      return str(name_ranks(ranks), ranks.size() > 1 ? " call " : " calls ", describe(lane, *call),
                 tensors.empty() ? "" : " of ", tensors);
    });
    report_.culprits.clear();
    for (size_t i = 1; i < kinds.size(); ++i)
      report_.culprits.insert(report_.culprits.end(), kinds[i].second.begin(), kinds[i].second.end());
    settle(FlightVerdict::Mismatch, index, sequence,
           str("the ranks fell out of step, in the ", difference(lane, *kinds[0].first, *kinds[1].first),
               " of a call: ", text));
  }

  const Blocked* blocked_of(int rank) const {
    for (const Blocked& blocked : blocked_)
      if (blocked.file->rank == rank) return &blocked;
    return nullptr;
  }

  bool find_missing() {
    const Blocked* first = nullptr;
    for (const Blocked& blocked : blocked_)
      if (!blocked.missing.empty() && (!first || blocked.start_ns() < first->start_ns())) first = &blocked;
    if (!first) return false;
    std::set<int> visited;
    const Blocked* at = first;
    while (true) {
      visited.insert(at->file->rank);
      const Blocked* next = nullptr;
      for (const int rank : at->missing) {
        const Blocked* waits = blocked_of(rank);
        if (!waits || waits->missing.empty()) {
          report_missing(*at, rank);
          return true;
        }
        if (!next) next = waits;
      }
      if (visited.contains(next->file->rank)) {
        report_deadlock(*next);
        return true;
      }
      at = next;
    }
  }

  /// Names all ranks that are missing where `blocked` waits for the same reason as `culprit`.
  void report_missing(const Blocked& blocked, int culprit) {
    const FlightLane& lane = report_.lanes[blocked.lane];
    const int64_t sequence = blocked.call->sequence;
    std::vector<int> waiting, missing;
    for (const int rank : blocked.missing)
      if (!by_rank_.contains(rank) == !by_rank_.contains(culprit) && !blocked_of(rank))
        missing.push_back(rank);
    if (missing.empty()) missing = {culprit};
    for (const Blocked& other : blocked_)
      if (other.lane == blocked.lane && other.call->sequence == sequence) waiting.push_back(other.file->rank);
    if (all_ranks_live_ && !by_rank_.contains(missing.front()))
      return report_unknown(blocked, waiting, missing);
    report_.culprits = missing;
    settle(
        FlightVerdict::Missing, blocked.lane, sequence,
        str(name_ranks(missing), host_of(missing), missing.size() == 1 ? " is" : " are", " missing from ",
            describe(lane, *blocked.call), ", where ", name_ranks(waiting),
            waiting.size() == 1 ? " waits" : " wait", " for ", waited(blocked), "; ", whereabouts(missing)));
  }

  // Blames nobody for a record that is elsewhere.
  void report_unknown(const Blocked& blocked, const std::vector<int>& waiting,
                      const std::vector<int>& unknown) {
    settle(FlightVerdict::Unknown, blocked.lane, blocked.call->sequence,
           str(name_ranks(waiting), waiting.size() == 1 ? " waits" : " wait", " in ",
               describe(report_.lanes[blocked.lane], *blocked.call), " for ", waited(blocked),
               "; it is unknown whether ", name_ranks(unknown), " reached it: ", name_ranks(unknown),
               unknown.size() == 1 ? " is alive but has" : " are alive but have",
               " no record in this folder (on another host?)"));
  }

  static std::string waited(const Blocked& blocked) {
    return seconds_text(blocked.file->time_ns - blocked.start_ns());
  }

  std::string host_of(const std::vector<int>& ranks) const {
    const auto file = by_rank_.find(ranks.front());
    return ranks.size() == 1 && file != by_rank_.end() && !file->second->host.empty()
               ? str(" (host ", file->second->host, ")")
               : "";
  }

  std::string whereabouts(const std::vector<int>& ranks) const {
    const auto found = by_rank_.find(ranks.front());
    const char* it = ranks.size() == 1 ? "it" : "the first of them";
    if (found == by_rank_.end())
      return str(ranks.size() == 1 ? "it has" : "they have",
                 " left no record: killed, or on another file system");
    const FlightFile& file = *found->second;
    std::string text;
    if (!file.activity.empty()) {
      text = str(it, " is in ", file.activity, " of step ", file.step);
      if (file.activity_since_ns > 0)
        text += str(" for ", seconds_text(file.time_ns - file.activity_since_ns));
    } else {
      text = str(it, " waits for nobody");
    }
    if (file.calls.empty()) return text + " and has made no call";
    const FlightCall& last = file.calls.back();
    return text + str("; its last call was ", describe(report_.lanes[lane_of_.at(&last)], last));
  }

  void report_deadlock(const Blocked& start) {
    std::string text;
    std::vector<int>& ring = report_.culprits;
    ring.clear();
    for (const Blocked* at = &start; at && std::ranges::find(ring, at->file->rank) == ring.end();
         at = blocked_of(at->missing.front())) {
      ring.push_back(at->file->rank);
      text += str(text.empty() ? "" : "; ", "rank ", at->file->rank, " waits in ",
                  describe(report_.lanes[at->lane], *at->call), " for ", name_ranks(at->missing));
    }
    settle(FlightVerdict::Deadlock, start.lane, start.call->sequence,
           str("ranks wait for each other, in different calls: ", text));
  }

  bool find_all_there() {
    if (blocked_.empty()) return false;
    const Blocked& first = *std::ranges::min_element(blocked_, {}, &Blocked::start_ns);
    settle(FlightVerdict::AllThere, first.lane, first.call->sequence,
           str("all ranks have reached ", describe(report_.lanes[first.lane], *first.call), ", where rank ",
               first.file->rank, " waits for ", waited(first),
               "; the delay is in a device, the network, or earlier work"));
    return true;
  }

  void settle(FlightVerdict verdict, size_t lane, int64_t sequence, std::string summary) {
    report_.verdict = verdict;
    report_.lane = lane;
    report_.sequence = sequence;
    report_.summary = std::move(summary);
  }

  const std::vector<FlightFile>& files_;
  std::unordered_map<const FlightCall*, size_t> lane_of_;
  bool all_ranks_live_;
  FlightReport& report_;
  std::map<int, const FlightFile*> by_rank_;
  std::vector<Blocked> blocked_;
};

}  // namespace

FlightReport make_flight_report(const std::vector<FlightFile>& files, const FlightReportOptions& options) {
  FlightReport report;
  Investigation(files, options.all_ranks_live, report).solve();
  return report;
}

std::string flight_summary(const std::filesystem::path& folder, const FlightReportOptions& options) noexcept {
  try {
    return make_flight_report(read_flight_folder(folder, options.end), options).summary;
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace titan::dist
