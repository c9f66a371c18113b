#pragma once

// What the ranks' flight records say together: who is missing from which call.

#include <chrono>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "titan/dist/flight_file.h"

namespace titan::dist {

/// Calls that belong together: a group's collectives, or what goes from one of its ranks to another.
struct FlightLane {
  std::string group, purpose;
  std::vector<int> ranks;  ///< of the job, by the group's
  int from = -1, to = -1;  ///< ranks of the group; -1: collectives
  /// By sequence number, then rank of the job. Of a pair, both sides have the same number.
  std::map<int64_t, std::map<int, const FlightCall*>> calls;

  /// The ranks that take part: of a pair, its two.
  std::vector<int> members() const;
  /// The number of the last call of `rank` in its record; -1: it has none.
  int64_t last_of(int rank) const;
};

enum class FlightVerdict {
  Mismatch,  ///< ranks made different calls where they should have made the same
  Missing,   ///< ranks wait in a call that others haven't come to
  Deadlock,  ///< ranks wait for each other, in different calls
  Unknown,   ///< ranks wait for others that live and whose records aren't here
  AllThere,  ///< ranks wait in a call to which all have come
  NoWait     ///< nobody waits
};

struct FlightReport {
  FlightVerdict verdict = FlightVerdict::NoWait;
  std::string summary;  ///< one line
  size_t lane = 0;      ///< of `lanes`: what the summary is about; behind the end: nothing
  int64_t sequence = 0;
  std::vector<int> culprits;  ///< ranks of the job
  std::vector<FlightLane> lanes;
};

struct FlightReportOptions {
  /// It is known that no rank is lost: those without a record have left it on another file system.
  bool all_ranks_live = false;
  /// When to give up on reading further records.
  std::chrono::steady_clock::time_point end = std::chrono::steady_clock::time_point::max();
};

/// Points into `files`, which have to live as long.
FlightReport make_flight_report(const std::vector<FlightFile>& files,
                                const FlightReportOptions& options = {});

/// "all_gather #812 of group 'dp_shard' (fsdp::unshard layers.5)"
std::string describe(const FlightLane& lane, const FlightCall& call);

/// The summary of a folder of records, or why there is none. Doesn't throw.
std::string flight_summary(const std::filesystem::path& folder,
                           const FlightReportOptions& options = {}) noexcept;

}  // namespace titan::dist
