#pragma once

// The ranks' flight records read back: what titan::dist::FlightDump writes, and PyTorch's Flight Recorder in
// its JSON form (torch._C._distributed_c10d._dump_nccl_trace_json).

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace titan::dist {

enum class FlightState : uint8_t { Launched, Waiting, Finished, Failed };

struct FlightGroup {
  std::string name;
  std::string purpose;
  std::vector<int> ranks;  ///< of the job; empty: the file doesn't tell
};

struct FlightCall {
  int64_t record = 0;      ///< of the rank's calls
  int64_t sequence = 0;    ///< of the group's collectives, or of what goes from one rank to another
  size_t group = 0;        ///< of the file's groups
  std::string op;          ///< "all_gather", ...
  int from = -1, to = -1;  ///< ranks of the group; send and receive only
  std::string phase, module;
  std::vector<std::vector<int64_t>> in_sizes, out_sizes;
  std::vector<std::string> dtypes;
  int64_t start_ns = 0, end_ns = 0;  ///< times of day; 0: not yet
  FlightState state = FlightState::Launched;
  bool background = false;  ///< of work beside the training

  bool is_pair() const { return from >= 0; }
  bool has_ended() const { return state == FlightState::Finished; }
};

struct FlightFile {
  std::filesystem::path path;
  int rank = -1;
  int world_size = 0;  ///< 0: not told
  std::string host, reason, activity;
  int64_t step = 0;
  int64_t time_ns = 0;            ///< when it was written; else the last time in it
  int64_t activity_since_ns = 0;  ///< 0: not told
  bool is_titan = false;
  bool is_whole = true;  ///< it begins with the rank's first call
  std::vector<FlightGroup> groups;
  std::vector<FlightCall> calls;  ///< as they were made
};

/// Throws Error that names the file and the place in it.
FlightFile read_flight_file(const std::filesystem::path& path);
/// From memory; `name` is a file name that ends in the rank, as in "rank_3.json" or "nccl_trace_rank_3".
FlightFile parse_flight_file(const std::string& text, const std::filesystem::path& name);

/// All of a folder, by rank. A file whose name doesn't end in a number isn't one. Throws Error where there is
/// none, where two are of one rank, or one can't be read. Files of a job of another size than the newest
/// file's are left out: an earlier run's. Throws Error when `end` comes first.
std::vector<FlightFile> read_flight_folder(
    const std::filesystem::path& folder,
    std::chrono::steady_clock::time_point end = std::chrono::steady_clock::time_point::max());

// What the ranks' flight records say together: who is missing from which call.

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

struct JoinedFlights {
  std::vector<FlightLane> lanes;
  std::unordered_map<const FlightCall*, size_t> lane_of;
};

/// All files' calls by group, purpose and ranks, and by sequence number. Of several calls of a rank under one
/// number (PyTorch's coalesced ones) the first stands for all.
JoinedFlights join_flights(const std::vector<FlightFile>& files);

/// Why two calls of one sequence number can't be the same; "" where they can.
std::string difference(const FlightLane& lane, const FlightCall& a, const FlightCall& b);

/// "Float [4, 8] to [4]", "" for a barrier
std::string describe_tensors(const FlightCall& call);

/// "rank 3", "ranks 0-2, 5", of many the first
std::string name_ranks(std::vector<int> ranks);

}  // namespace titan::dist
