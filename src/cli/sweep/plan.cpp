#include "cli/sweep/sweep.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>

#include <c10/util/StringUtil.h>

#include "config/document.h"
#include "job/job_config.h"
#include "titan/config/load.h"
#include "titan/config/table.h"
#include "titan/core/error.h"
#include "titan/core/file.h"

namespace titan::cli::sweep {

namespace {

namespace fs = std::filesystem;
using config::Leaf;
using config::Raw;

constexpr size_t kMostRuns = 10'000;
constexpr size_t kLongestName = 120;

/// `run."a.b".optimizer.lr` has the components run, a.b, optimizer, lr.
std::vector<std::string> components(const std::string& name) {
  std::vector<std::string> parts(1);
  bool quoted = false;
  for (size_t i = 0; i < name.size(); ++i) {
    if (quoted && name[i] == '\\' && i + 1 < name.size())
      parts.back() += name[++i];
    else if (name[i] == '"')
      quoted = !quoted;
    else if (name[i] == '.' && !quoted)
      parts.emplace_back();
    else
      parts.back() += name[i];
  }
  return parts;
}

std::string key_after(const std::vector<std::string>& parts, size_t skipped) {
  return c10::Join(".", std::span(parts).subspan(skipped));
}

/// A value as a command line takes it; lists as a,b.
std::string word_of(const Raw& raw) {
  if (const auto* text = std::get_if<std::string>(&raw.value)) return *text;
  const auto* list = std::get_if<Raw::List>(&raw.value);
  if (!list) return config::to_text(raw);
  std::vector<std::string> words;
  for (const Raw& item : *list) words.push_back(word_of(item));
  return c10::Join(",", words);
}

/// A setting of the grid, with its values.
struct GridAxis {
  std::string key;
  std::vector<std::string> values;
};

// "lr" for "optimizer.lr", unless another key of the grid ends the same way.
std::string axis_name(const std::vector<GridAxis>& grid, const GridAxis& axis) {
  const auto last = [](const std::string& key) { return key.substr(key.rfind('.') + 1); };
  const auto same = std::count_if(grid.begin(), grid.end(),
                                  [&](const GridAxis& other) { return last(other.key) == last(axis.key); });
  return same > 1 ? axis.key : last(axis.key);
}

std::string folder_name(std::string name) {
  for (char& c : name)
    if (c == '/' || c == '\0' || c == '\n') c = '_';
  if (name.size() <= kLongestName) return name;
  size_t end = kLongestName;
  while (end > 0 && (static_cast<unsigned char>(name[end]) & 0xc0) == 0x80) --end;  // don't cut a character
  return name.substr(0, end);
}

struct PlanReader {
  explicit PlanReader(fs::path given) : file(std::move(given)) {}

  Plan read() {
    plan.folder = fs::path("outputs") / file.stem();
    const config::Document document = config::read_toml(read_file(file), file.string());
    problems = document.problems;
    take_headings(document.headings);
    for (const Leaf& leaf : document.leaves) take(leaf);
    size_t points = std::max<size_t>(1, named.size());
    for (const GridAxis& axis : grid) points = std::min(kMostRuns + 1, points * axis.values.size());
    if (points > kMostRuns) problems.push_back(str(file.string(), ": more than ", kMostRuns, " runs"));
    if (problems.empty() && named.empty() && grid.empty())
      problems.push_back(str(file.string(), ": it has neither a [grid] nor a [run.NAME]"));
    if (!problems.empty()) throw ConfigError(problems);
    plan.runs = all_runs();
    return plan;
  }

  void take(const Leaf& leaf) {
    const std::vector<std::string> parts = components(leaf.name);
    const std::string& table = parts.front();
    const size_t in_table = table == "run" ? 2 : 1;
    if (parts.size() <= in_table && table == "run")
      return problem(leaf, "a run is a table with a name: [run.NAME]");
    if (parts.size() <= in_table || (table != "set" && table != "grid" && table != "run"))
      return take_top(leaf);
    const std::string key = key_after(parts, in_table);
    // The sweep itself chooses each run's folder.
    if (key == "job.dump_folder" || key == "job.config_file")
      return problem(leaf, str(key, " is set by the sweep itself, from base and folder"));
    if (table == "grid") return take_axis(leaf, key);
    std::vector<Setting>& settings = table == "set" ? for_all : run_of(parts[1], leaf.place).settings;
    settings.emplace_back(key, word_of(leaf.value));
  }

  void take_top(const Leaf& leaf) {
    const auto* text = std::get_if<std::string>(&leaf.value.value);
    const auto* number = std::get_if<int64_t>(&leaf.value.value);
    if (leaf.name == "base" && text) {
      plan.base = (file.parent_path() / *text).lexically_normal();
    } else if (leaf.name == "folder" && text && !text->empty()) {
      plan.folder = *text;
    } else if (leaf.name == "nproc" && number && *number >= 1 && *number <= 65536) {
      plan.num_ranks = static_cast<int>(*number);
    } else if (leaf.name == "base" || leaf.name == "folder") {
      problem(leaf, "must be a path in quotes");
    } else if (leaf.name == "nproc") {
      problem(leaf, "must be a number of ranks, 1 or above");
    } else {
      const auto near = nearest_names(leaf.name, {"base", "folder", "nproc", "set", "grid", "run"}, 1);
      problem(leaf, str("unknown; known are base, folder, nproc and the tables [set], [grid] and [run.NAME]",
                        near.empty() ? "" : str("; did you mean '", near.front(), "'?")));
    }
  }

  void take_axis(const Leaf& leaf, const std::string& key) {
    const auto* list = std::get_if<Raw::List>(&leaf.value.value);
    if (!list || list->empty()) return problem(leaf, "must be a list with at least one value");
    GridAxis axis{key, {}};
    for (const Raw& value : *list) axis.values.push_back(word_of(value));
    if (std::set<std::string>(axis.values.begin(), axis.values.end()).size() != axis.values.size())
      return problem(leaf, "lists a value twice");
    grid.push_back(std::move(axis));
  }

  // In the order of the file, which defines the index for --only and job arrays. A run may have no settings.
  void take_headings(std::vector<config::Heading> headings) {
    std::stable_sort(headings.begin(), headings.end(), [](const auto& a, const auto& b) {
      return std::pair(a.place.line, a.place.column) < std::pair(b.place.line, b.place.column);
    });
    for (const config::Heading& heading : headings) {
      const auto parts = components(heading.name);
      if (parts.size() > 1 && parts.front() == "run") run_of(parts[1], heading.place);
    }
  }

  // The name becomes the name of a folder.
  Run& run_of(const std::string& name, const config::Place& place) {
    const auto known =
        std::find_if(named.begin(), named.end(), [&](const Run& run) { return run.name == name; });
    if (known != named.end()) return *known;
    if (name.empty() || name == "." || name == "..")
      problems.push_back(str(config::to_text(place), ": [run.\"", name,
                             "\"]: a run's name must be valid as the name of its folder"));
    return named.emplace_back(Run{name, {}});
  }

  void problem(const Leaf& leaf, const std::string& what) {
    problems.push_back(str(config::to_text(leaf.place), ": ", leaf.name, ": ", what));
  }

  std::vector<Run> all_runs() const {
    std::vector<Run> runs;
    for (const Run& start : named.empty() ? std::vector<Run>{Run{}} : named) {
      // Later settings win: first those of all runs, then the named run's, then the grid's.
      Run first{start.name, for_all};
      first.settings.insert(first.settings.end(), start.settings.begin(), start.settings.end());
      for (Run& run : at_all_points(first)) runs.push_back({folder_name(run.name), std::move(run.settings)});
    }
    // Cut names may be equal.
    std::set<std::string> seen;
    for (Run& run : runs) {
      const std::string name = run.name;
      for (int number = 2; !seen.insert(run.name).second; ++number) run.name = str(name, "#", number);
    }
    return runs;
  }

  std::vector<Run> at_all_points(const Run& start) const {
    std::vector<Run> runs = {start};
    for (const GridAxis& axis : grid) {
      std::vector<Run> more;
      for (const Run& run : runs)
        for (const std::string& value : axis.values) {
          Run next = run;
          next.name += str(next.name.empty() ? "" : ",", axis_name(grid, axis), "=", value);
          next.settings.emplace_back(axis.key, value);
          more.push_back(std::move(next));
        }
      runs = std::move(more);
    }
    return runs;
  }

  fs::path file;
  Plan plan;
  std::vector<Setting> for_all;
  std::vector<GridAxis> grid;
  std::vector<Run> named;
  std::vector<std::string> problems;
};

}  // namespace

std::vector<std::string> Plan::setting_words(const Run& run) const {
  std::vector<std::string> words;
  for (const auto& [key, value] : run.settings) words.push_back(str("--", key, "=", value));
  words.push_back("--job.dump_folder=" + folder_of(run).string());
  return words;
}

Plan read_plan(const fs::path& file) { return PlanReader(file).read(); }

namespace {

using RunNames = std::vector<std::string>;

std::string prefix_of(const RunNames& names, size_t num_runs) {
  if (names.size() == num_runs) return num_runs == 1 ? "" : "all runs: ";
  std::string text = names.front();
  if (names.size() == 2) text += " and " + names[1];
  if (names.size() > 2) text += str(" and ", names.size() - 1, " others");
  return text + ": ";
}

std::string checked_config(const Plan& plan, const Run& run, train::JobFiles files) {
  train::JobConfig job;
  const config::Origins origins =
      config::load(train::job_schema(), {plan.base, plan.setting_words(run)}, job);
  train::check_job(job, origins, plan.num_ranks, files);
  return config::print_toml(train::job_schema(), job);
}

}  // namespace

std::vector<std::string> check_runs(const Plan& plan, std::optional<size_t> only) {
  std::vector<std::string> configs, order;
  std::map<std::string, RunNames> problems;
  for (const Run& run : plan.runs) {
    const bool is_meant = !only || &run == &plan.runs[*only];
    try {
      configs.push_back(
          checked_config(plan, run, is_meant ? train::JobFiles::Check : train::JobFiles::Ignore));
    } catch (const ConfigError& error) {
      for (const std::string& problem : error.problems()) {
        if (!problems.contains(problem)) order.push_back(problem);
        problems[problem].push_back(run.name);
      }
    }
  }
  if (problems.empty()) return configs;
  std::vector<std::string> messages;
  for (const std::string& problem : order)
    messages.push_back(prefix_of(problems[problem], plan.runs.size()) + problem);
  throw ConfigError(messages);
}

}  // namespace titan::cli::sweep
