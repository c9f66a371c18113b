#include "cli/report/html.h"

#include "titan/core/error.h"

namespace titan::cli::report {

std::string escaped(std::string_view text) {
  std::string html;
  for (const char c : text) {
    if (c == '&')
      html += "&amp;";
    else if (c == '<')
      html += "&lt;";
    else if (c == '>')
      html += "&gt;";
    else if (c == '"')
      html += "&quot;";
    else
      html += c;
  }
  return html;
}

std::string to_html(const HtmlTable& table) {
  const auto cell = [&](const char* tag, size_t column, const std::string& text) {
    const bool number = column < table.numbers.size() && table.numbers[column];
    return str("<", tag, number ? " class=\"n\">" : ">", escaped(text), "</", tag, ">");
  };
  std::string html = "<div class=\"scroll\"><table><thead><tr>";
  for (size_t i = 0; i < table.heads.size(); ++i) html += cell("th", i, table.heads[i]);
  html += "</tr></thead><tbody>\n";
  for (size_t row = 0; row < table.rows.size(); ++row) {
    const bool has_class = row < table.row_classes.size() && !table.row_classes[row].empty();
    html += has_class ? str("<tr class=\"", table.row_classes[row], "\">") : std::string("<tr>");
    for (size_t i = 0; i < table.rows[row].size(); ++i) html += cell("td", i, table.rows[row][i]);
    html += "</tr>\n";
  }
  return html + "</tbody></table></div>\n";
}

std::string section(std::string_view id, std::string_view title, const std::string& body) {
  return str("<section id=\"", id, "\">\n<h2>", escaped(title), "</h2>\n", body, "</section>\n");
}

std::string paragraph(std::string_view text) { return str("<p>", escaped(text), "</p>\n"); }

}  // namespace titan::cli::report
