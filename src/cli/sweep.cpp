// titan sweep: runs that differ in some settings, one after another.

#include "cli/sweep.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <span>

#include <c10/util/StringUtil.h>
#include <nlohmann/json.hpp>

#include "cli/launch/signals.h"
#include "cli/parser.h"
#include "cli/run_folder.h"
#include "cli/text.h"
#include "config/document.h"
#include "core/file.h"
#include "core/json.h"
#include "core/process.h"
#include "job/build.h"
#include "titan/config/load.h"
#include "titan/config/table.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

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
    const std::string key = c10::Join(".", std::span(parts).subspan(in_table));
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
      problem(leaf, str("unknown; known are base, folder, nproc and the tables [set], [grid] and [run.NAME]",
                        did_you_mean(leaf.name, {"base", "folder", "nproc", "set", "grid", "run"})));
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
    // Shortened names may be equal.
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

constexpr int64_t kEndOfLog = 1 << 20;

fs::path state_file(const fs::path& folder) { return folder / "sweep_run.json"; }

// Applies the rule of `titan train`, with the folder as this process sees it.
bool holds_last_step(const fs::path& folder) {
  train::JobConfig job;
  config::load(train::job_schema(), {folder / "config.toml", {}}, job);
  job.job.dump_folder = folder.string();
  return train::end_of_run(job).has_value();
}

// For a run without a log: fewer than log_freq steps follow the last logged one.
bool trained_all_steps(const fs::path& folder) {
  const RunFolder run = read_run_folder(folder);
  const std::string freq = run.setting("metrics.log_freq");
  return run.steps.last_step() + (freq.empty() ? 1 : std::stoll(freq)) > run.total_steps();
}

struct RunState {
  std::string config;  ///< resolved, as TOML
  bool finished = false;
  int exit_code = 0;   ///< the last attempt's
  double seconds = 0;  ///< the sum over all attempts
  int attempts = 0;
};

/// nullopt if the sweep hasn't started this run. Throws Error for a file that titan sweep didn't write.
std::optional<RunState> read_run_state(const fs::path& folder) {
  const auto file = state_file(folder);
  if (!fs::exists(file)) return std::nullopt;
  std::string problem;
  const auto object = parse_json(read_file(file), &problem);
  if (!problem.empty()) throw Error(str(file.string(), " wasn't written by titan sweep: ", problem));
  try {
    return RunState{.config = object.at("config"),
                    .finished = object.at("finished"),
                    .exit_code = object.at("exit_code"),
                    .seconds = object.at("seconds"),
                    .attempts = object.at("attempts")};
  } catch (const nlohmann::json::exception& error) {
    throw Error(str(file.string(), " wasn't written by titan sweep: ", error.what()));
  }
}

void write_run_state(const fs::path& folder, const RunState& state) {
  make_folder(folder);
  const nlohmann::ordered_json object = {{"finished", state.finished},
                                         {"exit_code", state.exit_code},
                                         {"seconds", state.seconds},
                                         {"attempts", state.attempts},
                                         {"config", state.config}};
  write_file_atomic(state_file(folder), json_text(object, 2) + "\n");
}

/// Settings in which this run and the one in its folder differ, like "training.seq_len: 16 | 24"; none if the
/// folder holds no run.
std::vector<std::string> differences_to_folder(const fs::path& folder, const std::string& config) {
  if (const auto state = read_run_state(folder)) return config::setting_differences(state->config, config);
  const auto resolved = folder / "config.toml";  // perhaps the run of another command
  if (!fs::exists(resolved)) return {};
  return config::setting_differences(read_file(resolved), config);
}

/// While it lives, signals that end a sweep or are passed on to its run stay pending: SIGINT, SIGTERM,
/// SIGHUP, SIGUSR1 and SIGUSR2 (SLURM's --signal), unless this process was started to ignore them; and
/// SIGQUIT (which asks ranks for a report).
class HeldSignals {
 public:
  HeldSignals() : set_(launcher_signals()) { pthread_sigmask(SIG_BLOCK, &set_, &before_); }

  ~HeldSignals() { restore(); }
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;

  /// A pending signal that asks for the end; doesn't wait. The SIGCHLD of a child that has been waited for
  /// may still be pending.
  std::optional<int> pending() const {
    const timespec at_once{};
    for (int signal; (signal = sigtimedwait(&set_, nullptr, &at_once)) > 0;)
      if (signal != SIGCHLD && signal != SIGQUIT) return signal;
    return std::nullopt;
  }

  /// Waits for the next signal, or SIGCHLD.
  int wait() const {
    int signal = 0;
    sigwait(&set_, &signal);
    return signal;
  }

  /// Restores the signal mask, in a process that is about to become another program.
  void restore() const { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t set_, before_{};
};

[[noreturn]] void become(const std::vector<std::string>& command, const HeldSignals& signals, pid_t parent) {
  std::vector<char*> words;
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  setpgid(0, 0);  // so that Ctrl-C reaches it once, through us
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::signal(SIGQUIT, SIG_IGN);  // it would kill `titan train` until that has a handler
  signals.restore();
  if (getppid() == parent) execv(words.front(), words.data());
  _exit(127);
}

struct ChildEnd {
  int exit_code = 0;    ///< 128 + signal, if a signal ended it
  int stop_signal = 0;  ///< the signal that this process received meanwhile and passed on
};

/// Runs a program with this process's output, and waits for it. Passes signals on. The program dies with this
/// process. Throws Error when it can't be started.
ChildEnd run_child(const std::vector<std::string>& command, const HeldSignals& signals) {
  const pid_t parent = getpid(), pid = fork();
  TITAN_CHECK(pid >= 0, "cannot start ", command.front(), ": ", errno_text(errno));
  if (pid == 0) become(command, signals, parent);
  ChildEnd end;
  for (int status = 0;;) {
    if (waitpid(pid, &status, WNOHANG) == pid) {
      end.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      return end;
    }
    const int signal = signals.wait();
    if (signal == SIGCHLD) continue;
    if (signal != SIGQUIT) end.stop_signal = signal;
    kill(pid, signal);
  }
}

constexpr const char* kSweepNotes =
    R"(FILE is TOML: base = a config, folder = where the runs go, nproc = ranks of each run; [set] settings of all
runs, [grid] lists of values (every combination is run), [run.NAME] settings of a named run.

All runs are checked before the first one starts. When the command is given again, finished runs are
skipped; a run that was killed or failed is started again, and resumes from its checkpoints if it has any.
At the end, prints a line per run and the tables of titan compare.

In a SLURM job array (sbatch --array=0-N), each task does the run with its index.
)";

// --only, or this task's index in a SLURM job array.
std::optional<size_t> chosen_index(std::optional<int> only, size_t num_runs) {
  const char* task = std::getenv("SLURM_ARRAY_TASK_ID");
  if (!only && !task) return std::nullopt;
  const std::string text = only ? std::to_string(*only) : task;
  char* end = nullptr;
  const long index = std::strtol(text.c_str(), &end, 10);
  if (*end != '\0' || text.empty() || index < 0 || static_cast<size_t>(index) >= num_runs)
    throw ConfigError(str(only ? "--only " : "SLURM_ARRAY_TASK_ID = ", text, ": the sweep has ", num_runs,
                          " runs, with indices 0 to ", num_runs - 1, " (sbatch --array=0-", num_runs - 1,
                          ")"));
  return static_cast<size_t>(index);
}

/// A sweep whose runs have been checked.
class Sweep {
 public:
  /// `only`: for the other runs only the settings are checked.
  Sweep(Plan plan, std::optional<size_t> only) : plan_(std::move(plan)), configs_(check_runs(plan_, only)) {
    // A run's folder must not hold a run with other settings.
    std::vector<std::string> problems;
    for (size_t i = 0; i < plan_.runs.size(); ++i) {
      if (only && *only != i) continue;
      const auto differences = differences_to_folder(folder(i), configs_[i]);
      if (!differences.empty())
        problems.push_back(str(folder(i).string(), " holds a run with other settings (",
                               c10::Join(", ", differences),
                               "); remove it, or set another folder in the sweep's file"));
    }
    if (!problems.empty()) throw ConfigError(problems);
  }

  const std::vector<Run>& runs() const { return plan_.runs; }
  bool finished(size_t index) const {
    const auto state = read_run_state(folder(index));
    return state && state->finished;
  }
  /// Returns the signal that ended the sweep; 0: none.
  int do_run(size_t index, const HeldSignals& signals) {
    const std::string place =
        str("run ", index, " of ", plan_.runs.size(), " (", plan_.runs[index].name, ")");
    RunState state = read_run_state(folder(index)).value_or(RunState{});
    if (state.finished) {
      log::info(place + " is finished already");
      return 0;
    }
    log::info(str(place, state.attempts > 0 ? " starts again" : " starts"));
    state.config = configs_[index];
    ++state.attempts;
    write_run_state(folder(index), state);
    const auto start = std::chrono::steady_clock::now();
    const ChildEnd end = run_child(command(index), signals);
    state.seconds += seconds_since(start);
    state.exit_code = end.exit_code;
    // A run also exits with 0 if anyone asked it to stop.
    state.finished = end.exit_code == 0 && is_finished(folder(index), end.stop_signal != 0);
    write_run_state(folder(index), state);
    if (end.exit_code != 0) log::warning(str(place, " ended with exit code ", end.exit_code));
    if (end.exit_code == 0 && !state.finished) log::warning(str(place, " was stopped before its end"));
    return end.stop_signal;
  }

  std::string summary() const {
    TextTable table{.rows = {{"", "run", "state", "step", "loss", "validation", "tokens/s", "seconds"}},
                    .right = {true, false, false, true, true, true, true, true}};
    for (size_t i = 0; i < plan_.runs.size(); ++i) {
      const auto state = read_run_state(folder(i));
      const MetricRows steps(folder(i) / "metrics.jsonl"), validations(folder(i) / "validation.jsonl");
      const std::string words = !state                  ? "not started"
                                : state->finished       ? "finished"
                                : state->exit_code != 0 ? str("exit code ", state->exit_code)
                                                        : "not finished";
      table.rows.push_back(
          {std::to_string(i), plan_.runs[i].name, words,
           steps.empty() ? "" : std::to_string(steps.last_step()), number_or_none("%.5f", steps.last("loss")),
           number_or_none("%.5f", validations.last("loss")), number_or_none("%.0f", steps.last("tps")),
           state ? number("%.1f", state->seconds) : ""});
    }
    return to_string(table);
  }

  /// The folders of the finished runs.
  std::vector<std::string> folders() const {
    std::vector<std::string> done;
    for (size_t i = 0; i < plan_.runs.size(); ++i)
      if (finished(i)) done.push_back(folder(i).string());
    return done;
  }

 private:
  fs::path folder(size_t index) const { return plan_.folder_of(plan_.runs[index]); }
  std::vector<std::string> command(size_t index) const {
    std::vector<std::string> words = {fs::read_symlink("/proc/self/exe").string(), "train"};
    if (!plan_.base.empty()) words.push_back(plan_.base.string());
    if (plan_.num_ranks > 1) words.insert(words.end(), {"--nproc", std::to_string(plan_.num_ranks)});
    const std::vector<std::string> settings = plan_.setting_words(plan_.runs[index]);
    words.insert(words.end(), settings.begin(), settings.end());
    return words;
  }

  Plan plan_;
  std::vector<std::string> configs_;
};

int print_end(const Sweep& sweep) {
  std::printf("%s", sweep.summary().c_str());
  const std::vector<std::string> done = sweep.folders();
  if (done.size() > 1) {
    std::printf("\n");
    std::fflush(stdout);
    compare_command(done);
  }
  return done.size() == sweep.runs().size() ? 0 : 1;
}

}  // namespace

std::vector<std::string> Plan::setting_words(const Run& run) const {
  std::vector<std::string> words;
  for (const auto& [key, value] : run.settings) words.push_back(str("--", key, "=", value));
  words.push_back("--job.dump_folder=" + folder_of(run).string());
  return words;
}

Plan read_plan(const fs::path& file) { return PlanReader(file).read(); }

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

bool is_finished(const fs::path& folder, bool stop_requested) {
  if (!fs::exists(folder / "config.toml")) return false;  // stopped before it began
  if (holds_last_step(folder)) return true;
  const std::vector<ProcessLog> logs = newest_of_ranks(folder, 1, {.tail_bytes = kEndOfLog});
  // The newest process may have been stopped before it had a log; then the previous one wasn't finished
  // either.
  if (!logs.empty()) return end_of(logs.front(), now_us()).kind == ProcessEnd::Kind::Completed;
  return !stop_requested && trained_all_steps(folder);
}

}  // namespace titan::cli::sweep

namespace titan::cli {

int sweep_command(const Arguments& words) {
  using namespace sweep;
  std::filesystem::path file;
  std::optional<int> given;
  bool list = false;
  Parser parser("titan sweep", "FILE [--list] [--only INDEX]", kSweepNotes);
  parser.path("FILE", file, "the file that describes the runs");
  parser.flag("--list", list, "check and print the runs and their state; start nothing");
  parser.value("--only", given, "INDEX",
               "only the run with this index, from 0 (default: SLURM_ARRAY_TASK_ID)");
  parser.parse(words);
  sweep::Plan plan = read_plan(file);
  const auto only = chosen_index(given, plan.runs.size());
  Sweep sweep(std::move(plan), only);
  if (list) return print(sweep.summary());
  const HeldSignals signals;  // otherwise signals would kill this process between two runs
  for (size_t i = 0; i < sweep.runs().size(); ++i) {
    if (only && *only != i) continue;
    if (const auto signal = signals.pending()) return 128 + *signal;
    if (const int signal = sweep.do_run(i, signals)) return 128 + signal;
  }
  // A task of an array reports its own run only; the tables come when all runs are finished.
  if (only && sweep.folders().size() < sweep.runs().size()) return sweep.finished(*only) ? 0 : 1;
  return print_end(sweep);
}

}  // namespace titan::cli
