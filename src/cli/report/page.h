#pragma once

// The page of `titan report`: one HTML document that needs no other file.

#include <string>
#include <string_view>
#include <vector>

#include "cli/run/run_history.h"

namespace titan::cli::report {

/// Escapes HTML, for text and attributes.
std::string escaped(std::string_view text);

struct HtmlTable {
  std::vector<std::string> heads;
  std::vector<std::vector<std::string>> rows = {};  ///< plain text
  std::vector<bool> numbers = {};                   ///< by column: right-aligned; missing: text
  std::vector<std::string> row_classes = {};        ///< by row; missing: none
};
std::string to_html(const HtmlTable& table);

/// A part of the page under a heading with an anchor.
std::string section(std::string_view id, std::string_view title, const std::string& body);
std::string paragraph(std::string_view text);

struct PageInput {
  RunHistory run;
  /// What each rank's newest process logged every log_freq steps; of at most kMostRanks ranks.
  std::vector<ProcessLog> ranks;
  int num_ranks = 0;   ///< ranks that have a log
  int64_t now_us = 0;  ///< when the page is made
};
inline constexpr size_t kMostRanks = 64;

std::string page(const PageInput& input);

// The sections of the page; "" when there is nothing to show.
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
