#include "cli/report/page.h"

#include "cli/report/html.h"
#include "cli/text.h"
#include "titan/core/error.h"
#include "titan/core/version.h"

namespace titan::cli::report {

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
