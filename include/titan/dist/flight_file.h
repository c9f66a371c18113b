#pragma once

// The ranks' flight records read back: what titan::dist::FlightDump writes, and PyTorch's Flight Recorder in
// its JSON form (torch._C._distributed_c10d._dump_nccl_trace_json).

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
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

}  // namespace titan::dist
