// titan compare: the settings that differ between runs, their losses and speeds side by side, and the first
// step at which the losses differ.

#include <algorithm>
#include <cmath>

#include "cli/parser.h"
#include "cli/run_folder.h"
#include "cli/text.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

constexpr size_t kMostChars = 24;

constexpr const char* kCompareNotes =
    R"(RUN is a run's job.dump_folder. Prints the settings that differ, loss and tokens/s of the logged steps and
validations side by side, and the first step at which a loss differs from the first run's.
)";

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
    if (std::ranges::all_of(
            runs, [&](const RunFolder& run) { return run.setting(key) == runs.front().setting(key); }))
      continue;
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
      return number("%.6f", (run.*series).value_at_step(step, "loss")) +
             number(" (%.0f)", (run.*series).value_at_step(step, "tps"));
    });
  table.print_under(title);
}

// At the run's last start, by the log of its rank 0.
std::string num_ranks(const RunFolder& run) {
  std::string ranks;
  const std::filesystem::path folder = structured_folder(run.folder);
  if (folder.empty()) return "unknown";
  for (const ProcessFiles& files : list_structured_logs(folder))
    if (files.rank == 0) ranks = read_structured_log(files, {.tail_bytes = 0}).world_size();
  return ranks.empty() ? "unknown" : ranks;
}

void print_speed(const std::vector<RunFolder>& runs) {
  RunTable table(runs, "");
  table.add("ranks", num_ranks);
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
  print("\n");
  for (size_t i = 1; i < runs.size(); ++i) {
    const LossDifference found = compare_losses(runs.front().*series, runs[i].*series, steps);
    print(runs[i].folder.string() + ": ");
    if (found.first_step)
      print(str("the ", losses, " first differ at step ", *found.first_step, "; largest difference ",
                number("%.3g", found.largest_difference), " at step ", found.largest_step, "\n"));
    else
      print(str("all ", steps.size(), " ", losses, " are equal, bit for bit\n"));
  }
}

}  // namespace

int compare_command(const Arguments& words) {
  Parser parser("titan compare", "RUN RUN ...", kCompareNotes);
  parser.app.allow_extras();
  parser.parse(words);
  const Arguments folders = parser.app.remaining();
  for (const std::string& word : folders)
    if (word.starts_with("-")) parser.refuse_option(word);
  if (folders.size() < 2) parser.refuse("needs at least two runs");
  std::vector<RunFolder> runs;
  for (const std::string& folder : folders) runs.push_back(read_compared_run(folder));
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
