#pragma once

// The page of `titan report`: one HTML document that needs nothing else.

#include <string>

#include "cli/run/run_history.h"

namespace titan::cli::report {

struct PageInput {
  RunHistory run;
  /// Of each rank's newest process, what it logged each log_freq steps; at most kMostRanks of them.
  std::vector<ProcessLog> ranks;
  int num_ranks = 0;   ///< that have a log
  int64_t now_us = 0;  ///< when the page is made
};
inline constexpr size_t kMostRanks = 64;

std::string page(const PageInput& input);

// Its parts, each a section; "" where there is nothing to show.
std::string overview_section(const PageInput& input);
std::string charts_section(const PageInput& input);
std::string time_section(const PageInput& input);
std::string ranks_section(const PageInput& input);
std::string validation_section(const PageInput& input);
std::string checkpoints_section(const PageInput& input);
std::string restarts_section(const PageInput& input);
std::string configuration_section(const PageInput& input);
std::string environment_section(const PageInput& input);

extern const char* const kPageStyle;
extern const char* const kPageScript;

}  // namespace titan::cli::report
