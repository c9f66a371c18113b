#include "cli/report/page.h"

#include "cli/text.h"
#include "titan/core/error.h"
#include "titan/core/version.h"

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

namespace {

struct Part {
  const char* id;
  const char* name;
  std::string html;
};

std::string navigation(const std::vector<Part>& parts) {
  std::string html = "<nav>";
  for (const Part& part : parts)
    if (!part.html.empty()) html += str("<a href=\"#", part.id, "\">", part.name, "</a> ");
  return html + "</nav>\n";
}

std::string heading(const RunHistory& run) {
  const std::string description = run.text_setting("job.description");
  const std::string folder = std::filesystem::absolute(run.folder).lexically_normal().string();
  return str("<header>\n<h1>", escaped(description.empty() ? folder : description), "</h1>\n<p>",
             escaped(run.text_setting("model.name")), " ", escaped(run.text_setting("model.flavor")),
             " &middot; <code>", escaped(folder), "</code></p>\n</header>\n");
}

}  // namespace

std::string page(const PageInput& input) {
  const std::vector<Part> parts = {{"overview", "Overview", overview_section(input)},
                                   {"charts", "Curves", charts_section(input)},
                                   {"time", "Time", time_section(input)},
                                   {"ranks", "Ranks", ranks_section(input)},
                                   {"validation", "Validation", validation_section(input)},
                                   {"checkpoints", "Checkpoints", checkpoints_section(input)},
                                   {"restarts", "Starts", restarts_section(input)},
                                   {"configuration", "Configuration", configuration_section(input)},
                                   {"environment", "Environment", environment_section(input)}};
  std::string body;
  for (const Part& part : parts) body += part.html;
  const std::string title = input.run.folder.filename().empty()
                                ? input.run.folder.parent_path().filename().string()
                                : input.run.folder.filename().string();
  return str("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n",
             "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>",
             escaped(title), " - titan report</title>\n<style>", kPageStyle,
             "</style>\n</head>\n<body>\n<main>\n", heading(input.run), navigation(parts), body,
             "<footer>titan report ", kVersion, ", ", local_time(input.now_us),
             "</footer>\n</main>\n<script>", kPageScript, "</script>\n</body>\n</html>\n");
}

}  // namespace titan::cli::report
