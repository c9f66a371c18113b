#pragma once

// Pieces of a page.

#include <string>
#include <string_view>
#include <vector>

#include "cli/run/run_history.h"

namespace titan::cli::report {

/// For text and for attributes.
std::string escaped(std::string_view text);

struct HtmlTable {
  std::vector<std::string> heads;
  std::vector<std::vector<std::string>> rows = {};  ///< of text
  std::vector<bool> numbers = {};                   ///< by column: to the right; missing: text
  std::vector<std::string> row_classes = {};        ///< by row; missing: none
};
std::string to_html(const HtmlTable& table);

/// A part of the page under a heading that can be linked to.
std::string section(std::string_view id, std::string_view title, const std::string& body);
std::string paragraph(std::string_view text);

// The page of `titan report`: one HTML document that needs nothing else.

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
