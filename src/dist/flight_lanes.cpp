#include "flight_lanes.h"

#include <algorithm>
#include <set>

#include "titan/core/error.h"

namespace titan::dist {
namespace {

using LaneKey = std::tuple<std::string, std::string, std::vector<int>, int, int>;

/// Of groups whose ranks the files don't tell: those that have it.
std::map<std::string, std::vector<int>> ranks_seen(const std::vector<FlightFile>& files) {
  std::map<std::string, std::set<int>> seen;
  for (const FlightFile& file : files)
    for (const FlightGroup& group : file.groups) seen[group.name].insert(file.rank);
  std::map<std::string, std::vector<int>> ranks;
  for (const auto& [name, members] : seen) ranks[name] = {members.begin(), members.end()};
  return ranks;
}

std::string sizes_text(const std::vector<std::vector<int64_t>>& all) {
  std::string text;
  for (const auto& sizes : all) {
    text += text.empty() ? "[" : ", [";
    for (size_t i = 0; i < sizes.size(); ++i) text += str(i > 0 ? ", " : "", sizes[i]);
    text += "]";
  }
  return text;
}

/// Whose parts may differ from rank to rank, by their definition.
bool has_uneven_parts(const std::string& op) {
  return op.find("alltoall") != std::string::npos || op == "gather" || op == "scatter" ||
         op.find("coalesced") != std::string::npos;
}

}  // namespace

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

JoinedFlights join_flights(const std::vector<FlightFile>& files) {
  const auto seen = ranks_seen(files);
  std::map<LaneKey, size_t> index;
  JoinedFlights joined;
  for (const FlightFile& file : files)
    for (const FlightCall& call : file.calls) {
      const FlightGroup& group = file.groups[call.group];
      const std::vector<int>& ranks = group.ranks.empty() ? seen.at(group.name) : group.ranks;
      const auto [at, is_new] =
          index.try_emplace({group.name, group.purpose, ranks, call.from, call.to}, joined.lanes.size());
      if (is_new) joined.lanes.push_back({group.name, group.purpose, ranks, call.from, call.to, {}});
      joined.lanes[at->second].calls[call.sequence].emplace(file.rank, &call);
      joined.lane_of[&call] = at->second;
    }
  return joined;
}

std::string difference(const FlightLane& lane, const FlightCall& a, const FlightCall& b) {
  if (lane.from < 0 && a.op != b.op) return "operation";
  if (!a.dtypes.empty() && !b.dtypes.empty() && a.dtypes != b.dtypes) return "dtype";
  if (!has_uneven_parts(a.op) && !has_uneven_parts(b.op)) {
    const bool crossed = lane.from >= 0 && a.op != b.op;  // what one sends is what the other receives
    if (a.in_sizes != (crossed ? b.out_sizes : b.in_sizes) ||
        a.out_sizes != (crossed ? b.in_sizes : b.out_sizes))
      return "shape";
  }
  if (lane.from < 0 && (a.phase != b.phase || a.module != b.module)) return "place in the program";
  return "";
}

std::string describe_tensors(const FlightCall& call) {
  std::string text = call.dtypes.empty() ? "" : call.dtypes.front();
  const std::string in = sizes_text(call.in_sizes), out = sizes_text(call.out_sizes);
  if (!in.empty()) text += (text.empty() ? "" : " ") + in;
  if (!out.empty() && out != in) text += " to " + out;
  return text;
}

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

}  // namespace titan::dist
