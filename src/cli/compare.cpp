// titan compare: the settings that differ between runs, their losses and speeds side by side, and the first step
// at which the losses differ.

#include "cli/compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cli/arguments.h"
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

LossDifference compare_losses(const MetricRows& a, const MetricRows& b, const std::vector<int64_t>& steps) {
  LossDifference found;
  for (int64_t step : steps) {
    const double first = value_at(a, step, "loss"), second = value_at(b, step, "loss");
    if (first == second || (std::isnan(first) && std::isnan(second))) continue;
    if (!found.first_step) found.first_step = step;
    const double difference = std::abs(first - second);
    if (difference >= found.largest_difference) {
      found.largest_difference = difference;
      found.largest_step = step;
    }
  }
  return found;
}

namespace {

constexpr size_t kMostChars = 24;

/// A column for each run, under its folder.
class RunTable {
 public:
  RunTable(const std::vector<RunFolder>& runs, const char* corner)
      : runs_(runs), table_{{}, std::vector<bool>(runs.size() + 1, true)} {
    add(corner, [](const RunFolder& run) { return run.folder.string(); });
  }
  template <class TextOf>
  void add(const std::string& head, const TextOf& text_of) {
    auto& row = table_.rows.emplace_back(1, cell(head));
    for (const RunFolder& run : runs_) row.push_back(cell(text_of(run)));
  }
  void print_under(const char* title) const { print(str(title, "\n", to_string(table_))); }

 private:
  // Keeps the end of a long text: names of folders and settings differ there.
  static std::string cell(const std::string& text) {
    return text.size() > kMostChars ? "..." + text.substr(text.size() - kMostChars + 3) : text;
  }

  const std::vector<RunFolder>& runs_;
  TextTable table_;
};

void print_settings(const std::vector<RunFolder>& runs) {
  RunTable table(runs, "");
  bool any = false;
  for (const std::string& key : keys_of(runs)) {
    if (same_setting(runs, key)) continue;
    table.add(key, [&](const RunFolder& run) {
      const std::string value = run.setting(key);
      return value.empty() ? "unset" : value;
    });
    any = true;
  }
  if (!any) table.add("(none)", [](const RunFolder&) { return ""; });
  table.print_under("settings that differ");
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
  RunTable table(runs, "step");
  for (int64_t step : shown_steps(common_steps(runs, series)))
    table.add(std::to_string(step), [&](const RunFolder& run) {
      return number("%.6f", value_at(run.*series, step, "loss")) +
             number(" (%.0f)", value_at(run.*series, step, "tps"));
    });
  table.print_under(title);
}

void print_speed(const std::vector<RunFolder>& runs) {
  RunTable table(runs, "");
  const auto add_median = [&](const char* head, const char* key, const char* format) {
    table.add(head, [&](const RunFolder& run) {
      return number(format, median_after_first(run.steps.curve(key)).value_or(std::nan("")));
    });
  };
  add_median("tokens/s per device", "tps", "%.1f");
  add_median("seconds per step", "step_s", "%.4f");
  table.print_under("\nmedian over the steps after the first");
}

void print_differences(const std::vector<RunFolder>& runs, Series series, const char* losses) {
  const std::vector<int64_t> steps = common_steps(runs, series);
  std::printf("\n");
  for (size_t i = 1; i < runs.size(); ++i) {
    const LossDifference found = compare_losses(runs.front().*series, runs[i].*series, steps);
    const std::string name = runs[i].folder.string();
    if (found.first_step)
      std::printf("%s: the %s first differ at step %lld; largest difference %.3g at step %lld\n",
                  name.c_str(), losses, static_cast<long long>(*found.first_step), found.largest_difference,
                  static_cast<long long>(found.largest_step));
    else
      std::printf("%s: all %zu %s are equal, bit for bit\n", name.c_str(), steps.size(), losses);
  }
}

}  // namespace

int compare_command(const Arguments& words) {
  std::vector<RunFolder> runs;
  for (const std::string& folder : parse_compare_arguments(words)) runs.push_back(read_compared_run(folder));
  if (common_steps(runs, &RunFolder::steps).empty())
    throw ConfigError("these runs have no logged step in common");
  const bool validated = !common_steps(runs, &RunFolder::validations).empty();
  print_settings(runs);
  print_losses(runs, &RunFolder::steps, "\nloss (tokens/s)");
  if (validated) print_losses(runs, &RunFolder::validations, "\nvalidation loss (tokens/s)");
  print_speed(runs);
  print_differences(runs, &RunFolder::steps, "losses");
  if (validated) print_differences(runs, &RunFolder::validations, "validation losses");
  return 0;
}

}  // namespace titan::cli
