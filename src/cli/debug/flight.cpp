// titan debug flight: who is missing from what, by the ranks' flight records, and their last calls side by
// side. titan debug dump asks a job for such records.

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <set>
#include <thread>

#include "cli/debug/commands.h"
#include "cli/debug/flight_table.h"
#include "cli/parser.h"
#include "cli/run_record.h"
#include "titan/core/error.h"
#include "titan/core/file.h"
#include "titan/dist/flight_report.h"
#include "titan/dist/heartbeat.h"

namespace titan::cli {

namespace {

namespace fs = std::filesystem;

constexpr const char* kFlightNotes =
    "FOLDER holds the ranks' flight records: a run's job.dump_folder, its comm_traces, or files of "
    "PyTorch's\n"
    "Flight Recorder in JSON. Prints one line, which says who is missing from what, then the calls around "
    "that\n"
    "one, a column a rank: how long a call took, or how long it has been waited for, or that a rank isn't "
    "there.\n";

constexpr const char* kDumpNotes =
    "RUN is the job.dump_folder of a job that runs. All its ranks write their flight records within "
    "seconds,\n"
    "and go on; then titan debug flight says what they hold. kill -QUIT does the same for one rank, "
    "and\n"
    "for all of a host where titan launch or titan train --nproc gets it.\n";

// A run's records are where its comm.save_traces_folder says.
fs::path record_folder(const fs::path& folder) {
  std::string name = "comm_traces";
  if (fs::exists(folder / "config.toml")) {
    const auto settings = settings_of(read_file(folder / "config.toml"));
    const auto given = settings.find("comm.save_traces_folder");
    if (given != settings.end()) name = text_of_toml(given->second);
  }
  return fs::is_directory(folder / name) ? folder / name : folder;
}

void print_flight(const fs::path& folder, const FlightTableOptions& options) {
  const auto files = dist::read_flight_folder(folder);
  const dist::FlightReport report = dist::make_flight_report(files);
  std::fputs((report.summary + "\n\n").c_str(), stdout);
  std::fputs(flight_records_table(files).c_str(), stdout);
  std::fputs(flight_calls_table(files, report, options).c_str(), stdout);
}

/// By file: a record's time.
std::map<fs::path, fs::file_time_type> written_at(const fs::path& folder) {
  std::map<fs::path, fs::file_time_type> times;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".json") times[entry.path()] = entry.last_write_time();
  return times;
}

/// The records that come to a folder from now on.
class NewRecords {
 public:
  explicit NewRecords(fs::path folder) : folder_(std::move(folder)), before_(written_at(folder_)) {}

  /// Looks again.
  bool have_all_come() {
    num_ = 0;
    for (const auto& [path, time] : written_at(folder_)) {
      const auto old = before_.find(path);
      if (old != before_.end() && old->second == time) continue;
      ++num_;
      // Of one record, and once: to read a full one takes a second.
      if (num_ranks_ == 0)
        num_ranks_ = static_cast<size_t>(std::max(1, dist::read_flight_file(path).world_size));
    }
    return num_ > 0 && num_ >= num_ranks_;
  }
  size_t num() const { return num_; }
  /// Of the job, as a record that has come tells.
  size_t num_ranks() const { return num_ranks_; }

 private:
  fs::path folder_;
  std::map<fs::path, fs::file_time_type> before_;
  size_t num_ = 0, num_ranks_ = 0;
};

// Looks once more when the time is over: on a busy machine a single look may take all of it.
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
  Parser parser("titan debug flight", "titan debug flight FOLDER [--last N] [--ranks R,R]", kFlightNotes);
  parser.app.add_option("FOLDER", folder, "where the records are")->required()->type_name("FOLDER");
  parser.app.add_option("--last", options.num_calls, "this many calls (default 10)")
      ->check(CLI::Range(1, 1000000))
      ->type_name("N");
  parser.app
      .add_option("--ranks", options.ranks, "columns of these ranks; default: culprits and some others")
      ->delimiter(',')
      ->type_name("R[,R...]");
  const std::string help = parser.parse(words);
  if (!help.empty()) return std::fputs(help.c_str(), stdout), 0;
  print_flight(record_folder(folder), options);
  return 0;
}

int debug_dump(const Arguments& words) {
  fs::path run;
  double limit_s = 10;
  Parser parser("titan debug dump", "titan debug dump RUN [--seconds S]", kDumpNotes);
  parser.app.add_option("RUN", run, "the running job's folder")->required()->type_name("FOLDER");
  parser.app.add_option("--seconds", limit_s, "wait so long for the records (default 10)")
      ->check(CLI::Range(0.1, 3600.0))
      ->type_name("S");
  const std::string help = parser.parse(words);
  if (!help.empty()) return std::fputs(help.c_str(), stdout), 0;
  const fs::path folder = record_folder(run);
  if (!fs::is_directory(folder)) throw Error(str(folder.string(), ": isn't a folder"));
  NewRecords records(folder);
  const fs::path request = folder / dist::kFlightRequest;
  write_file_atomic(request, "");
  wait_for(records, limit_s);
  std::error_code none;
  fs::remove(request, none);  // nobody took it
  if (records.num() == 0)
    throw Error(str("no rank wrote a record to ", folder.string(), " within ", limit_s,
                    " s: does the job run, with comm.trace_buf_size above 0?"));
  if (records.num() < records.num_ranks())
    std::printf("%zu of %zu ranks wrote their records to %s within %g s; what the others left is older\n",
                records.num(), records.num_ranks(), folder.c_str(), limit_s);
  else
    std::printf("%zu ranks wrote their records to %s\n", records.num(), folder.c_str());
  print_flight(folder, {});
  return 0;
}

}  // namespace titan::cli
