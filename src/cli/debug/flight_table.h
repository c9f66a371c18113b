#pragma once

// Flight records as tables.

#include <string>
#include <vector>

#include "titan/dist/flight_report.h"

namespace titan::cli {

struct FlightTableOptions {
  int num_calls = 10;
  std::vector<int> ranks;  ///< the columns; empty: chosen
};

/// A line for each kind of rank: where they are, and why they wrote.
std::string flight_records_table(const std::vector<dist::FlightFile>& files);

/// The calls up to the one that the report is about (or, without one, of the busiest lane), a column a rank.
std::string flight_calls_table(const std::vector<dist::FlightFile>& files, const dist::FlightReport& report,
                               const FlightTableOptions& options);

}  // namespace titan::cli
