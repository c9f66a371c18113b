#pragma once

// Reads the ranks' flight records (what FlightDump writes, and PyTorch's Flight Recorder in its JSON form,
// torch._C._distributed_c10d._dump_nccl_trace_json) and finds out which rank is missing from which call.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace titan::dist {

enum class FlightState : uint8_t { Launched, Waiting, Finished, Failed };

struct FlightGroup {
  std::string name;
  std::string purpose;
  std::vector<int> ranks;  ///< world ranks; empty: unknown
};

struct FlightCall {
  int64_t record = 0;  ///< number among the rank's calls
  /// Number among the group's collectives, or among the messages from one rank to another.
  int64_t sequence = 0;
  size_t group = 0;        ///< index into FlightFile::groups
  std::string op;          ///< "all_gather", ...
  int from = -1, to = -1;  ///< ranks of the group; send and receive only
  std::string phase, module;
  std::vector<std::vector<int64_t>> in_sizes, out_sizes;
  std::vector<std::string> dtypes;
  int64_t start_ns = 0, end_ns = 0;  ///< times of day; 0: not yet
  int64_t device_ns = 0;             ///< how long a device ran it; 0: unknown
  FlightState state = FlightState::Launched;
  bool background = false;  ///< belongs to background work

  bool is_pair() const { return from >= 0; }
  bool has_ended() const { return state == FlightState::Finished; }
};

struct FlightFile {
  std::filesystem::path path;
  int rank = -1;
  int world_size = 0;  ///< 0: unknown
  std::string host, reason, activity;
  int64_t step = 0;
  int64_t time_ns = 0;            ///< when it was written; else the last time in it
  int64_t activity_since_ns = 0;  ///< 0: unknown
  bool is_titan = false;
  bool is_whole = true;  ///< it begins with the rank's first call
  std::vector<FlightGroup> groups;
  std::vector<FlightCall> calls;  ///< in the order they were made
};

/// Throws Error that names the file and the place in it.
FlightFile read_flight_file(const std::filesystem::path& path);
/// Parses it from memory; `name` is a file name that ends in the rank, as in "rank_3.json" or
/// "nccl_trace_rank_3".
FlightFile parse_flight_file(const std::string& text, const std::filesystem::path& name);

/// All records of a folder, by rank. Ignores files whose names don't end in a number, and files of an earlier
/// run: those with another world size than the newest file. Throws Error if there is none, if two belong to
/// one rank, if one can't be read, or if `end` comes first.
std::vector<FlightFile> read_flight_folder(
    const std::filesystem::path& folder,
    std::chrono::steady_clock::time_point end = std::chrono::steady_clock::time_point::max());

/// Calls that belong together: a group's collectives, or messages from one of its ranks to another.
struct FlightLane {
  std::string group, purpose;
  std::vector<int> ranks;  ///< world ranks in group order
  int from = -1, to = -1;  ///< ranks of the group; -1: collectives
  /// Calls by sequence number, then world rank. Both sides of a message have the same number.
  std::map<int64_t, std::map<int, const FlightCall*>> calls;

  /// The world ranks that take part; for a message, its sender and receiver.
  std::vector<int> members() const;
  /// The number of the last call of `rank` in its record; -1: it has none.
  int64_t last_of(int rank) const;
};

enum class FlightVerdict {
  Mismatch,  ///< ranks made different calls where they should have made the same
  Missing,   ///< ranks wait in a call that others haven't made
  Deadlock,  ///< ranks wait for each other, in different calls
  Unknown,   ///< ranks wait for others that are alive, but whose records aren't here
  AllThere,  ///< ranks wait in a call that all have made
  NoWait     ///< no rank waits
};

struct FlightReport {
  FlightVerdict verdict = FlightVerdict::NoWait;
  std::string summary;  ///< one line
  size_t lane = 0;      ///< index of the lane that the summary is about; lanes.size(): none
  int64_t sequence = 0;
  std::vector<int> culprits;  ///< world ranks
  std::vector<FlightLane> lanes;
};

struct FlightReportOptions {
  /// No rank is lost: those without a record have left it on another file system.
  bool all_ranks_live = false;
  /// When to stop reading records.
  std::chrono::steady_clock::time_point end = std::chrono::steady_clock::time_point::max();
};

/// The report points into `files`, which must outlive it.
FlightReport make_flight_report(const std::vector<FlightFile>& files,
                                const FlightReportOptions& options = {});

/// "all_gather #812 of group 'dp_shard' (fsdp::all_gather layers.5)"
std::string describe(const FlightLane& lane, const FlightCall& call);

/// The summary of a folder of records, or why there is none. Doesn't throw.
std::string flight_summary(const std::filesystem::path& folder,
                           const FlightReportOptions& options = {}) noexcept;

}  // namespace titan::dist
