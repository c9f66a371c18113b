// titan compare: the settings that differ between runs, their losses and speeds side by side, and where they
// part.

#include <cstdio>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/run/run_folder.h"
#include "cli/text.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

constexpr int kColumn = 24;

std::string cell(const std::string& text) {
  std::string shown = text.size() > kColumn ? "..." + text.substr(text.size() - kColumn + 3) : text;
  return std::string(kColumn - std::min<size_t>(kColumn, shown.size()), ' ') + shown + "  ";
}

void print_heads(const std::vector<RunRecord>& runs, const char* first) {
  std::string line = cell(first);
  for (const RunRecord& run : runs) line += cell(run.folder.string());
  std::printf("%s\n", line.c_str());
}

void print_settings(const std::vector<RunRecord>& runs) {
  std::printf("settings that differ\n");
  print_heads(runs, "");
  bool any = false;
  for (const std::string& key : keys_of(runs)) {
    if (same_setting(runs, key)) continue;
    std::string line = cell(key);
    for (const RunRecord& run : runs) line += cell(run.setting(key));
    std::printf("%s\n", line.c_str());
    any = true;
  }
  if (!any) std::printf("%s\n", cell("(none)").c_str());
}

// Long runs in some 20 lines: the first and last step are always among them.
std::vector<int64_t> shown_steps(const std::vector<int64_t>& steps) {
  const size_t stride = (steps.size() + 19) / 20;
  std::vector<int64_t> shown;
  for (size_t i = 0; i < steps.size(); ++i)
    if (i % stride == 0 || i + 1 == steps.size()) shown.push_back(steps[i]);
  return shown;
}

void print_losses(const std::vector<RunRecord>& runs, Series series, const char* title) {
  std::printf("\n%s\n", title);
  print_heads(runs, "step");
  for (int64_t step : shown_steps(common_steps(runs, series))) {
    std::string line = cell(std::to_string(step));
    for (const RunRecord& run : runs) {
      const LoggedStep& logged = (run.*series).at(step);
      line += cell(number("%.6f", logged.loss) + number(" (%.0f)", logged.tps));
    }
    std::printf("%s\n", line.c_str());
  }
}

void print_speed(const std::vector<RunRecord>& runs) {
  std::printf("\nmedian over the steps behind the first\n");
  print_heads(runs, "");
  std::string tokens = cell("tokens/s and device"), seconds = cell("seconds a step");
  for (const RunRecord& run : runs) {
    tokens += cell(number("%.1f", run.median_tps()));
    seconds += cell(number("%.4f", run.median_step_s()));
  }
  std::printf("%s\n%s\n", tokens.c_str(), seconds.c_str());
}

void print_parting(const std::vector<RunRecord>& runs, Series series, const char* losses) {
  const std::vector<int64_t> steps = common_steps(runs, series);
  std::printf("\n");
  for (size_t i = 1; i < runs.size(); ++i) {
    Parting parting = compare_losses(runs.front().*series, runs[i].*series, steps);
    std::string name = runs[i].folder.string();
    if (parting.first_step)
      std::printf("%s: the %s part at step %lld; largest difference %.3g at step %lld\n", name.c_str(),
                  losses, static_cast<long long>(*parting.first_step), parting.largest_difference,
                  static_cast<long long>(parting.largest_step));
    else
      std::printf("%s: all %zu %s are equal, bit for bit\n", name.c_str(), steps.size(), losses);
  }
}

}  // namespace

int compare_command(const Arguments& words) {
  const CompareArguments arguments = parse_compare_arguments(words);
  if (!arguments.help.empty()) return std::fputs(arguments.help.c_str(), stdout), 0;
  std::vector<RunRecord> runs;
  for (const std::string& folder : arguments.runs) runs.push_back(read_run(folder));
  if (common_steps(runs, &RunRecord::steps).empty())
    throw ConfigError("these runs have no logged step in common");
  const bool validated = !common_steps(runs, &RunRecord::validations).empty();
  print_settings(runs);
  print_losses(runs, &RunRecord::steps, "loss (tokens/s)");
  if (validated) print_losses(runs, &RunRecord::validations, "validation loss (tokens/s)");
  print_speed(runs);
  print_parting(runs, &RunRecord::steps, "losses");
  if (validated) print_parting(runs, &RunRecord::validations, "validation losses");
  return 0;
}

}  // namespace titan::cli
