#pragma once

// Pieces of a page.

#include <string>
#include <string_view>
#include <vector>

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

}  // namespace titan::cli::report
