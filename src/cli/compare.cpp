// titan compare: the settings that differ between runs, their losses and speeds side by side, and where the
// losses part.

#include "cli/compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/text.h"
#include "titan/core/error.h"

namespace titan::cli {

RunFolder read_compared_run(const std::filesystem::path& folder) {
  for (const char* name : {"config.toml", "metrics.jsonl"})
    if (!std::filesystem::exists(folder / name))
      throw ConfigError(str(folder.string(), " holds no run: it has no ", name));
  return read_run_folder(folder, {.bad_lines = BadLines::Refuse});
}

std::set<std::string> keys_of(const std::vector<RunFolder>& runs) {
  std::set<std::string> keys;
  for (const RunFolder& run : runs)
    for (const auto& [key, value] : run.settings) keys.insert(key);
  keys.erase("job.dump_folder");
  return keys;
}

bool same_setting(const std::vector<RunFolder>& runs, const std::string& key) {
  return std::all_of(runs.begin(), runs.end(),
                     [&](const RunFolder& run) { return run.setting(key) == runs.front().setting(key); });
}

std::vector<int64_t> common_steps(const std::vector<RunFolder>& runs, Series series) {
  std::set<int64_t> steps;
  const MetricRows& first = runs.front().*series;
  for (size_t row = 0; row < first.size(); ++row)
    if (std::all_of(runs.begin(), runs.end(),
                    [&](const RunFolder& run) { return (run.*series).row_of(first.step(row)).has_value(); }))
      steps.insert(first.step(row));
  return {steps.begin(), steps.end()};
}

namespace {

double value_at(const MetricRows& rows, int64_t step, const char* key) {
  return rows.value(rows.row_of(step).value(), key).value_or(std::nan(""));
}

}  // namespace

Parting compare_losses(const MetricRows& a, const MetricRows& b, const std::vector<int64_t>& steps) {
  Parting parting;
  for (int64_t step : steps) {
    const double first = value_at(a, step, "loss"), second = value_at(b, step, "loss");
    if (first == second || (std::isnan(first) && std::isnan(second))) continue;
    if (!parting.first_step) parting.first_step = step;
    const double difference = std::abs(first - second);
    if (difference >= parting.largest_difference) {
      parting.largest_difference = difference;
      parting.largest_step = step;
    }
  }
  return parting;
}

namespace {

constexpr int kColumn = 24;

std::string cell(const std::string& text) {
  std::string shown = text.size() > kColumn ? "..." + text.substr(text.size() - kColumn + 3) : text;
  return std::string(kColumn - std::min<size_t>(kColumn, shown.size()), ' ') + shown + "  ";
}

template <class TextOf>
void print_row(const std::vector<RunFolder>& runs, const std::string& head, const TextOf& text_of) {
  std::string line = cell(head);
  for (const RunFolder& run : runs) line += cell(text_of(run));
  std::printf("%s\n", line.c_str());
}

void print_heads(const std::vector<RunFolder>& runs, const char* first) {
  print_row(runs, first, [](const RunFolder& run) { return run.folder.string(); });
}

void print_settings(const std::vector<RunFolder>& runs) {
  std::printf("settings that differ\n");
  print_heads(runs, "");
  bool any = false;
  for (const std::string& key : keys_of(runs)) {
    if (same_setting(runs, key)) continue;
    print_row(runs, key, [&](const RunFolder& run) {
      const std::string value = run.setting(key);
      return value.empty() ? "unset" : value;
    });
    any = true;
  }
  if (!any) std::printf("%s\n", cell("(none)").c_str());
}

// About 20 lines for long runs, always with the first and the last step.
std::vector<int64_t> shown_steps(const std::vector<int64_t>& steps) {
  const size_t stride = (steps.size() + 19) / 20;
  std::vector<int64_t> shown;
  for (size_t i = 0; i < steps.size(); ++i)
    if (i % stride == 0 || i + 1 == steps.size()) shown.push_back(steps[i]);
  return shown;
}

void print_losses(const std::vector<RunFolder>& runs, Series series, const char* title) {
  std::printf("\n%s\n", title);
  print_heads(runs, "step");
  for (int64_t step : shown_steps(common_steps(runs, series)))
    print_row(runs, std::to_string(step), [&](const RunFolder& run) {
      return number("%.6f", value_at(run.*series, step, "loss")) +
             number(" (%.0f)", value_at(run.*series, step, "tps"));
    });
}

void print_speed(const std::vector<RunFolder>& runs) {
  std::printf("\nmedian over the steps after the first\n");
  print_heads(runs, "");
  const auto print_median = [&](const char* head, const char* key, const char* format) {
    print_row(runs, head, [&](const RunFolder& run) {
      return number(format, median_after_first(run.steps.curve(key)).value_or(std::nan("")));
    });
  };
  print_median("tokens/s per device", "tps", "%.1f");
  print_median("seconds per step", "step_s", "%.4f");
}

void print_parting(const std::vector<RunFolder>& runs, Series series, const char* losses) {
  const std::vector<int64_t> steps = common_steps(runs, series);
  std::printf("\n");
  for (size_t i = 1; i < runs.size(); ++i) {
    const Parting parting = compare_losses(runs.front().*series, runs[i].*series, steps);
    const std::string name = runs[i].folder.string();
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
  if (!arguments.help.empty()) return print(arguments.help);
  std::vector<RunFolder> runs;
  for (const std::string& folder : arguments.runs) runs.push_back(read_compared_run(folder));
  if (common_steps(runs, &RunFolder::steps).empty())
    throw ConfigError("these runs have no logged step in common");
  const bool validated = !common_steps(runs, &RunFolder::validations).empty();
  print_settings(runs);
  print_losses(runs, &RunFolder::steps, "loss (tokens/s)");
  if (validated) print_losses(runs, &RunFolder::validations, "validation loss (tokens/s)");
  print_speed(runs);
  print_parting(runs, &RunFolder::steps, "losses");
  if (validated) print_parting(runs, &RunFolder::validations, "validation losses");
  return 0;
}

}  // namespace titan::cli
