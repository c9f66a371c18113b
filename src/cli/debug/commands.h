#pragma once

// The ranks' logs as one trace in Chrome's JSON form, which ui.perfetto.dev and chrome://tracing open.

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "cli/run/structured_events.h"
#include "guard/flight_report.h"

namespace titan::cli {

/// Each process of the job becomes one of the trace, with a track a thread; spans nest, numbers are counters,
/// and other instants are marks. A span that a process never ended (it was killed) lasts to its last event.
/// `next` is asked for the logs one after another, until it has none: they needn't all be in memory.
void write_perfetto(const std::function<std::optional<ProcessLog>()>& next,
                    const std::function<void(std::string_view)>& append);

// Flight records as tables.

struct FlightTableOptions {
  int num_calls = 10;
  std::vector<int> ranks;  ///< the columns; empty: chosen
};

/// A line for each kind of rank: where they are, and why they wrote.
std::string flight_records_table(const std::vector<dist::FlightFile>& files);

/// The calls up to the one that the report is about (or, without one, of the busiest lane), a column a rank.
std::string flight_calls_table(const std::vector<dist::FlightFile>& files, const dist::FlightReport& report,
                               const FlightTableOptions& options);

// `titan debug COMMAND`: what ranks left behind, joined. `arguments` are the words behind the command's name.

int debug_dump(const Arguments& arguments);
int debug_events(const Arguments& arguments);
int debug_flight(const Arguments& arguments);

}  // namespace titan::cli
