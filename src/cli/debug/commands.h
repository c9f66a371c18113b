#pragma once

// `titan debug COMMAND`: joins the records and logs that the ranks of a job left.

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "cli/run_folder.h"
#include "guard/flight_report.h"

namespace titan::cli {

/// Writes logs as one trace in Chrome's JSON format, for ui.perfetto.dev and chrome://tracing. Each process
/// of the job is a process of the trace, with a track per thread; spans nest, numbers become counters, and
/// other instants become marks. A span without an end (the process was killed) lasts until the process's last
/// event. `next` returns the logs one by one, so they needn't all be in memory.
void write_perfetto(const std::function<std::optional<ProcessLog>()>& next,
                    const std::function<void(std::string_view)>& append);

struct FlightTableOptions {
  int num_calls = 10;
  std::vector<int> ranks;  ///< the columns; empty: chosen automatically
};

/// A line per rank: where it is, and why it wrote its record.
std::string flight_records_table(const std::vector<dist::FlightFile>& files);

/// The calls up to the one that the report is about (or else those of the busiest lane), a column per rank.
std::string flight_calls_table(const std::vector<dist::FlightFile>& files, const dist::FlightReport& report,
                               const FlightTableOptions& options);

// `arguments` are the words after the command's name.
int debug_dump(const Arguments& arguments);
int debug_events(const Arguments& arguments);
int debug_flight(const Arguments& arguments);

}  // namespace titan::cli
