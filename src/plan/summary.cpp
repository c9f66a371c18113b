#include "plan/summary.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

namespace titan::plan {

namespace {

// The points, and which allocations are there at the peak.
void add_memory(const Trace& trace, Summary& summary) {
  const std::vector<Entry>& entries = trace.entries();
  const size_t entries_of_point = entries.size() / Summary::kMostPoints + 1;
  MemoryPoint now, highest;
  int64_t in_use = 0, most_of_part = -1, most = -1;
  bool in_backward = false;
  for (size_t i = 0; i < entries.size(); ++i) {
    const Entry& entry = entries[i];
    if (entry.kind == Entry::Kind::Step) now.step = static_cast<int>(entry.index) + 1;
    if (entry.kind == Entry::Kind::Allocate || entry.kind == Entry::Kind::Free) {
      const Allocation& allocation = trace.allocations()[entry.index];
      const int64_t change = entry.kind == Entry::Kind::Allocate ? allocation.bytes : -allocation.bytes;
      const auto category = static_cast<size_t>(allocation.category);
      now.bytes[category] += change;
      summary.most_bytes[category] = std::max(summary.most_bytes[category], now.bytes[category]);
      now.module = trace.name(allocation.module);
      in_use += change;
    }
    now.entry = i + 1;
    if (entry.kind == Entry::Kind::Launch && now.step == trace.num_steps()) summary.after_step = now.bytes;
    if (entry.kind == Entry::Kind::Launch && now.step == trace.num_steps() && !in_backward &&
        trace.name(trace.launches()[entry.index].module).ends_with(" backward")) {
      in_backward = true;
      summary.at_backward = now.bytes;
      if (most_of_part >= 0) summary.over_time.push_back(highest);
      summary.backward_point = summary.over_time.size();
      summary.over_time.push_back(now);
      most_of_part = -1;
    }
    if (in_use > most_of_part) {
      most_of_part = in_use;
      highest = now;
    }
    if (in_use > most) {
      most = in_use;
      summary.peak = now;
    }
    if ((i + 1) % entries_of_point == 0 || i + 1 == entries.size()) {
      if (most_of_part >= 0) summary.over_time.push_back(highest);
      most_of_part = -1;
    }
  }
}

void add_modules(const Trace& trace, Summary& summary) {
  struct Owner {
    int64_t bytes = 0, last = 0;  // now, and at the last point
    size_t row = 0;               // place in by_module, from 1; 0: none yet
    bool is_touched = false;      // since the last point
  };
  std::vector<Owner> owners;
  std::vector<size_t> touched;
  size_t entry = 0;
  for (size_t point = 0; point < summary.over_time.size(); ++point) {
    for (; entry < summary.over_time[point].entry; ++entry) {
      const auto& [kind, index] = trace.entries()[entry];
      if (kind != Entry::Kind::Allocate && kind != Entry::Kind::Free) continue;
      const Allocation& allocation = trace.allocations()[index];
      const size_t number =
          static_cast<size_t>(allocation.module) * kNumCategories + static_cast<size_t>(allocation.category);
      if (number >= owners.size()) owners.resize(number + 1);
      owners[number].bytes += kind == Entry::Kind::Allocate ? allocation.bytes : -allocation.bytes;
      if (!std::exchange(owners[number].is_touched, true)) touched.push_back(number);
    }
    for (const size_t number : touched) {
      Owner& owner = owners[number];
      owner.is_touched = false;
      if (owner.bytes == owner.last) continue;
      owner.last = owner.bytes;
      if (owner.row == 0) {
        summary.by_module.push_back({.module = trace.name(static_cast<int>(number / kNumCategories)),
                                     .category = static_cast<Category>(number % kNumCategories),
                                     .changes = {}});
        owner.row = summary.by_module.size();
      }
      summary.by_module[owner.row - 1].changes.push_back({point, owner.bytes});
    }
    touched.clear();
  }
}

void add_owners(const Trace& trace, Summary& summary) {
  std::map<std::string, int64_t> bytes;
  for (size_t i = 0; i < summary.peak.entry; ++i) {
    const Entry& entry = trace.entries()[i];
    if (entry.kind != Entry::Kind::Allocate && entry.kind != Entry::Kind::Free) continue;
    const Allocation& allocation = trace.allocations()[entry.index];
    bytes[trace.name(allocation.module)] +=
        entry.kind == Entry::Kind::Allocate ? allocation.bytes : -allocation.bytes;
  }
  for (const auto& [name, amount] : bytes)
    if (amount > 0) summary.peak_by_module.push_back({name, amount});
  std::ranges::stable_sort(summary.peak_by_module, std::greater<>(), &NamedAmount::bytes);
}

void add_last_step(const Trace& trace, Summary& summary) {
  std::map<std::string, LaunchTotals> launches;
  std::map<std::tuple<std::string, std::string, std::string, int64_t>, CollectiveTotals> collectives;
  std::map<std::tuple<const CollectiveTotals*, int, int64_t>, size_t> alike;  // by label and bytes
  int step = 0;
  for (const Entry& entry : trace.entries()) {
    if (entry.kind == Entry::Kind::Step) ++step;
    if (step < trace.num_steps()) continue;
    if (entry.kind == Entry::Kind::Allocate) ++summary.num_allocations;
    if (entry.kind == Entry::Kind::Launch) {
      const Launch& launch = trace.launches()[entry.index];
      LaunchTotals& totals = launches[trace.name(launch.name)];
      ++summary.num_launches;
      ++totals.launches;
      summary.flops += launch.flops;
      totals.flops += launch.flops;
      totals.bytes_read += launch.bytes_read;
      totals.bytes_written += launch.bytes_written;
    }
    if (entry.kind == Entry::Kind::Collective) {
      const Collective& call = trace.collectives()[entry.index];
      const std::string &op = trace.name(call.op), &group = trace.name(call.group);
      const std::string& full = trace.name(call.label);  // "fsdp::all_gather layers.3"
      const size_t space = full.find(' ');
      const std::string label = full.substr(0, space);
      CollectiveTotals& totals = collectives[{op, group, label, call.stream}];
      totals.op = op;
      totals.group = group;
      totals.label = label;
      totals.group_size = call.group_size;
      totals.stream = call.stream;
      ++totals.calls;
      totals.bytes += call.bytes;
      const auto [place, is_new] = alike.try_emplace({&totals, call.label, call.bytes}, totals.each.size());
      if (is_new)
        totals.each.push_back(
            {.module = space == std::string::npos ? "" : full.substr(space + 1), .bytes = call.bytes});
      ++totals.each[place->second].calls;
    }
  }
  for (auto& [name, totals] : launches) {
    totals.name = name;
    summary.launches.push_back(totals);
  }
  for (auto& [key, totals] : collectives) summary.collectives.push_back(totals);
}

}  // namespace

int64_t total(const BytesByCategory& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

Summary summarize(const Trace& trace) {
  Summary summary;
  add_memory(trace, summary);
  add_modules(trace, summary);
  add_owners(trace, summary);
  add_last_step(trace, summary);
  return summary;
}

}  // namespace titan::plan
