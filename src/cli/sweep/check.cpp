#include <map>

#include "cli/sweep/plan.h"
#include "titan/config/print.h"
#include "titan/core/error.h"
#include "titan/train/job_config.h"

namespace titan::cli::sweep {

namespace {

using RunNames = std::vector<std::string>;

std::string whose(const RunNames& names, size_t num_runs) {
  if (names.size() == num_runs) return num_runs == 1 ? "" : "all runs: ";
  std::string text = names.front();
  if (names.size() == 2) text += " and " + names[1];
  if (names.size() > 2) text += str(" and ", names.size() - 1, " others");
  return text + ": ";
}

std::string checked_config(const Plan& plan, const Run& run, train::JobFiles files) {
  std::vector<std::string> words = plan.train_words(run);
  config::Sources sources;
  if (!plan.base.empty()) {
    sources.file = words.front();
    words.erase(words.begin());
  }
  sources.overrides = std::move(words);
  train::JobConfig job;
  const config::Origins origins = config::load(train::job_schema(), sources, job);
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
  std::vector<std::string> told;
  for (const std::string& problem : order)
    told.push_back(whose(problems[problem], plan.runs.size()) + problem);
  throw ConfigError(told);
}

}  // namespace titan::cli::sweep
