// `titan debug flight` and `titan debug dump`: the last collectives of each rank, of a hang or of a job that
// is running.

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <thread>

#include <c10/util/StringUtil.h>

#include "cli/debug/commands.h"
#include "cli/parser.h"
#include "cli/text.h"
#include "core/file.h"
#include "guard/flight_dump.h"
#include "guard/flight_report.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

using dist::FlightCall;
using dist::FlightFile;
using dist::FlightLane;
using dist::FlightReport;
using dist::FlightState;

constexpr size_t kMostRankColumns = 8;
constexpr size_t kMostListed = 16;  // ranks in a table

std::string duration_text(int64_t ns) {
  const auto seconds = static_cast<double>(std::max<int64_t>(ns, 0)) / 1e9;
  if (seconds >= 1) return number("%.1f s", seconds);
  return seconds >= 1e-3 ? number("%.1f ms", seconds * 1e3) : number("%.0f us", seconds * 1e6);
}

std::string clock_text(int64_t ns) {
  const std::string date_and_time = local_time(ns / 1000);
  return date_and_time.substr(date_and_time.find(' ') + 1) +
         number(".%03.0f", static_cast<double>(ns / 1'000'000 % 1000));
}

std::string place_text(const FlightFile& file) {
  std::string text = file.activity.empty() ? "-" : str(file.activity, ", step ", file.step);
  if (file.activity_since_ns > 0 && !file.activity.empty())
    text += str(", for ", duration_text(file.time_ns - file.activity_since_ns));
  return text;
}

std::string call_text(const FlightCall& call) {
  std::string text = call.phase;
  if (!call.module.empty()) text += (text.empty() ? "" : " ") + call.module;
  return text;
}

std::string call_tensors_text(const FlightCall& call) {
  std::string text = call.dtypes.empty() ? "" : call.dtypes.front();
  for (const auto* all : {&call.in_sizes, &call.out_sizes}) {
    if (all == &call.out_sizes && call.in_sizes == call.out_sizes) break;
    if (all == &call.out_sizes && !all->empty()) text += " to";
    for (const auto& sizes : *all) text += " [" + c10::Join(",", sizes) + "]";
  }
  return text;
}

/// How a call went on a rank: "1.2 ms", "waits 12.0 s".
std::string call_state_text(const FlightFile& file, const FlightCall& call) {
  const std::string since = duration_text(file.time_ns - call.start_ns);
  switch (call.state) {
    case FlightState::Finished:
      // A call on a device is found finished some time after it has ended.
      if (call.device_ns > 0) return duration_text(call.device_ns);
      return call.end_ns > 0 ? duration_text(call.end_ns - call.start_ns) : "done";
    case FlightState::Failed:
      return call.end_ns > 0 ? "failed, " + duration_text(call.end_ns - call.start_ns) : "failed";
    case FlightState::Launched:
      return "launched";
    case FlightState::Waiting:
      break;
  }
  return "waits " + since;
}

/// Culprits first, up to the number of columns; then sorted by rank.
std::vector<int> chosen_ranks(const FlightLane& lane, const FlightReport& report,
                              const FlightTableOptions& options) {
  std::vector<int> members = lane.members();
  if (!options.ranks.empty()) {
    std::erase_if(members, [&](int rank) { return std::ranges::count(options.ranks, rank) == 0; });
    return members;
  }
  std::ranges::stable_partition(members,
                                [&](int rank) { return std::ranges::count(report.culprits, rank) > 0; });
  if (members.size() > kMostRankColumns) members.resize(kMostRankColumns);
  std::sort(members.begin(), members.end());
  return members;
}

std::string cell_of(const std::map<int, const FlightFile*>& files, const FlightLane& lane, int64_t sequence,
                    int rank) {
  const auto file = files.find(rank);
  if (file == files.end()) return "no record";
  const auto& calls = lane.calls.at(sequence);
  const auto call = calls.find(rank);
  if (call != calls.end()) {
    std::string text = call_state_text(*file->second, *call->second);
    const FlightCall& first = *calls.begin()->second;
    const bool differs = lane.from < 0 && (first.op != call->second->op ||
                                           call_tensors_text(first) != call_tensors_text(*call->second) ||
                                           call_text(first) != call_text(*call->second));
    return differs ? str(text, " (", call->second->op, " ", call_text(*call->second), " ",
                         call_tensors_text(*call->second), ")")
                   : text;
  }
  return lane.last_of(rank) < sequence ? "MISSING" : "left the ring";
}

}  // namespace

std::string flight_records_table(const std::vector<FlightFile>& files) {
  TextTable table{{{"rank", "host", "written", "at", "calls", "because of"}}, {}};
  for (const FlightFile& file : files) {
    if (table.rows.size() > kMostListed) break;
    table.rows.push_back({std::to_string(file.rank), file.host.empty() ? "-" : file.host,
                          clock_text(file.time_ns), place_text(file), std::to_string(file.calls.size()),
                          file.reason.substr(0, 60)});
  }
  std::string text = to_string(table);
  if (files.size() > kMostListed) text += str("  and ", files.size() - kMostListed, " more ranks\n");
  return text;
}

std::string flight_calls_table(const std::vector<FlightFile>& files, const FlightReport& report,
                               const FlightTableOptions& options) {
  if (report.lanes.empty()) return "\nNo calls are recorded.\n";
  const bool is_about = report.lane < report.lanes.size();
  const FlightLane& lane = is_about ? report.lanes[report.lane]
                                    : *std::ranges::max_element(report.lanes, {}, [](const FlightLane& each) {
                                        return each.calls.size();
                                      });
  std::map<int, const FlightFile*> by_rank;
  for (const FlightFile& file : files) by_rank[file.rank] = &file;
  const std::vector<int> ranks = chosen_ranks(lane, report, options);

  TextTable table{{{"#", "operation", "in", "of"}}, {true}};
  for (const int rank : ranks) table.rows[0].push_back(str("rank ", rank));
  std::vector<int64_t> shown;
  for (const auto& [sequence, calls] : lane.calls)
    if (!is_about || sequence <= report.sequence + 2) shown.push_back(sequence);
  if (shown.size() > static_cast<size_t>(options.num_calls))
    shown.erase(shown.begin(), shown.end() - options.num_calls);
  for (const int64_t sequence : shown) {
    const FlightCall& call = *lane.calls.at(sequence).begin()->second;
    std::vector<std::string> row = {std::to_string(sequence), call.op, call_text(call),
                                    call_tensors_text(call)};
    for (const int rank : ranks) row.push_back(cell_of(by_rank, lane, sequence, rank));
    table.rows.push_back(std::move(row));
  }
  const size_t others = lane.members().size() - ranks.size();
  return str("\ngroup '", lane.group, lane.purpose.empty() ? "" : ", " + lane.purpose, "', ",
             lane.from < 0 ? "its collectives" : "what one rank sends to the other", ":\n", to_string(table),
             others > 0 ? str("  and ", others, " more ranks (choose them with --ranks)\n") : "");
}

namespace {

namespace fs = std::filesystem;

constexpr const char* kFlightNotes =
    R"(FOLDER has the ranks' flight records: a run's job.dump_folder, its comm_traces, or JSON files of PyTorch's
Flight Recorder. Prints a line that says which rank is missing from which call, then the calls around that
one, with a column per rank: how long the call took or has been waiting, or that the rank is missing.
)";

constexpr const char* kDumpNotes =
    R"(RUN is the job.dump_folder of a running job. All its ranks write their flight records within seconds, and
continue; then titan debug flight shows them. kill -QUIT does the same for one rank, and for all ranks of a
host when sent to titan launch or titan train --nproc.
)";

// `folder`: a run's folder, or the records' folder itself.
fs::path record_folder(const fs::path& folder) {
  const fs::path named = folder_of_setting(folder, "comm.save_traces_folder", "comm_traces");
  return fs::is_directory(named) ? named : folder;
}

void print_flight(const fs::path& folder, const FlightTableOptions& options) {
  const auto files = dist::read_flight_folder(folder);
  const dist::FlightReport report = dist::make_flight_report(files);
  print(str(report.summary, "\n\n", flight_records_table(files), flight_calls_table(files, report, options)));
}

/// When each record was written, by file.
std::map<fs::path, fs::file_time_type> written_at(const fs::path& folder) {
  std::map<fs::path, fs::file_time_type> times;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".json") times[entry.path()] = entry.last_write_time();
  return times;
}

/// The records that ranks write to a folder from now on.
class NewRecords {
 public:
  explicit NewRecords(fs::path folder) : folder_(std::move(folder)), before_(written_at(folder_)) {}

  /// Reads the folder again.
  bool have_all_come() {
    num_ = 0;
    for (const auto& [path, time] : written_at(folder_)) {
      const auto old = before_.find(path);
      if (old != before_.end() && old->second == time) continue;
      ++num_;
      // Reads only one record, once: a full one takes a second.
      if (num_ranks_ == 0)
        num_ranks_ = static_cast<size_t>(std::max(1, dist::read_flight_file(path).world_size));
    }
    return num_ > 0 && num_ >= num_ranks_;
  }
  size_t num() const { return num_; }
  /// The job's number of ranks, by a record that has come.
  size_t num_ranks() const { return num_ranks_; }

 private:
  fs::path folder_;
  std::map<fs::path, fs::file_time_type> before_;
  size_t num_ = 0, num_ranks_ = 0;
};

// Checks once more after the time limit: on a busy machine a single check may take all of it.
void wait_for(NewRecords& records, double limit_s) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit_s);
  for (bool is_over = false; !records.have_all_come() && !is_over;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    is_over = std::chrono::steady_clock::now() >= end;
  }
}

}  // namespace

int debug_flight(const Arguments& words) {
  fs::path folder;
  FlightTableOptions options;
  Parser parser("titan debug flight", "FOLDER [--last N] [--ranks R,R]", kFlightNotes);
  parser.path("FOLDER", folder, "the folder of the records");
  parser.number("--last", options.num_calls, CLI::Range(1, 1'000'000), "how many calls (default 10)");
  parser
      .value("--ranks", options.ranks, "R[,R...]",
             "only columns of these ranks (default: culprits and some others)")
      ->delimiter(',');
  parser.parse(words);
  print_flight(record_folder(folder), options);
  return 0;
}

int debug_dump(const Arguments& words) {
  fs::path run;
  double limit_s = 10;
  Parser parser("titan debug dump", "RUN [--seconds S]", kDumpNotes);
  parser.path("RUN", run, "the running job's folder");
  parser.number("--seconds", limit_s, CLI::Range(0.1, 3600.0),
                "how long to wait for the records (default 10)", "S");
  parser.parse(words);
  const fs::path folder = record_folder(run);
  if (!fs::is_directory(folder)) throw Error(str(folder.string(), ": not a folder"));
  NewRecords records(folder);
  const fs::path request = folder / dist::kFlightRequest;
  write_file_atomic(request, "");
  wait_for(records, limit_s);
  std::error_code none;
  fs::remove(request, none);  // if no rank took it
  if (records.num() == 0)
    throw Error(str("no rank wrote a record to ", folder.string(), " within ", limit_s,
                    " s: is the job running, with comm.trace_buf_size above 0?"));
  if (records.num() < records.num_ranks())
    std::printf("%zu of %zu ranks wrote their records to %s within %g s; the other records are older\n",
                records.num(), records.num_ranks(), folder.c_str(), limit_s);
  else
    std::printf("%zu ranks wrote their records to %s\n", records.num(), folder.c_str());
  print_flight(folder, {});
  return 0;
}

}  // namespace titan::cli
