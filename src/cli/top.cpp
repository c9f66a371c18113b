// titan top: a running run on the terminal.

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "cli/checkpoint/commands.h"
#include "cli/parser.h"
#include "cli/run_folder.h"
#include "cli/text.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

namespace fs = std::filesystem;

struct View {
  std::string text;    ///< lines
  bool ended = false;  ///< the run completed, was stopped or failed
};

struct ViewOptions {
  bool color = false;
  size_t most_ranks = 16;  ///< shown, besides the slowest one
};

constexpr int64_t kRowsTail = 64 << 10;     // bytes of metrics.jsonl: hundreds of rows
constexpr int64_t kEventsTail = 512 << 10;  // bytes of a rank's log: more than a thousand events
constexpr size_t kMostRanksRead = 64;

struct Paint {
  bool on;
  std::string operator()(const char* code, const std::string& text) const {
    return on ? str("\033[", code, "m", text, "\033[0m") : text;
  }
};

struct Figures {
  RunFolder run;
  std::vector<ProcessLog> ranks;
};

// A run writes config.toml when it begins to train; while it loads there are only logs.
Figures read_figures(const fs::path& folder, RankTails& tails) {
  Figures figures;
  figures.run.folder = folder;
  figures.ranks = tails.read(folder);
  const bool trains = fs::exists(folder / "config.toml");
  if (!trains && figures.ranks.empty())
    throw ConfigError(
        str(folder.string(), " holds no run: it has neither a config.toml nor structured logs"));
  if (trains) figures.run = read_run_folder(folder, {.tail_bytes = kRowsTail});
  return figures;
}

std::string bar(double part, size_t width) {
  const auto full = static_cast<size_t>(std::round(std::clamp(part, 0.0, 1.0) * static_cast<double>(width)));
  return "[" + std::string(full, '#') + std::string(width - full, '-') + "]";
}

// Completed steps: the structured log may be ahead of the last logged metrics.
int64_t step_now(const Figures& figures) {
  const int64_t ended = figures.ranks.empty() ? 0 : steps_of(figures.ranks.front()).last;
  return ended > 0 ? ended : figures.run.steps.last_step();
}

std::string progress_line(const Figures& figures, const Paint& paint, bool ended) {
  const int64_t step = step_now(figures), total = figures.run.total_steps();
  const double part = total > 0 ? static_cast<double>(step) / static_cast<double>(total) : 0;
  std::string line =
      str("step ", step, " of ", total, "  ", paint("32", bar(part, 24)), number(" %.0f %%", 100 * part));
  if (const auto step_s = figures.run.steps.last("step_s")) {
    line += str("  ", duration(*step_s), " per step");
    if (!ended && step < total)
      line += str("  ", duration(*step_s * static_cast<double>(total - step)), " left");
  }
  return line + "\n";
}

std::string figure_line(const MetricRows& steps) {
  std::string line;
  const auto add = [&](const char* name, const char* key, const char* format) {
    if (const auto value = steps.last(key))
      line += str(line.empty() ? "" : "  ", name, " ", number(format, *value));
  };
  add("loss", "loss", "%.5f");
  add("grad norm", "grad_norm", "%.4f");
  add("lr", "lr", "%.3g");
  if (const auto tps = steps.last("tps"))
    line += str("  tokens/s per device ", short_number(std::round(*tps)));
  add("MFU %", "mfu", "%.1f");
  add("% of plan", "percent_of_plan", "%.1f");
  return line.empty() ? "no step has been logged yet\n" : line + "\n";
}

std::string validation_line(const MetricRows& validations) {
  const auto loss = validations.last("loss");
  return loss ? str("validation loss ", number("%.5f", *loss), " at step ", validations.last_step(), "\n")
              : "";
}

std::string checkpoint_line(const RunFolder& run) {
  if (run.setting("checkpoint.enable") != "true") return "checkpoints are off\n";
  const auto steps = checkpoint::list_steps(run.checkpoint_folder());
  if (steps.empty()) return "no checkpoint yet\n";
  const StepHealth last = examine_step(steps.back());
  return str("last checkpoint: step ", last.entry.step, ", ", last.written(), ", ", size_text(last.num_bytes),
             ", ", printable(last.state()), "\n");
}

std::string milliseconds_text(const std::optional<double>& seconds) {
  return seconds ? number("%.1f", *seconds * 1e3) : "-";
}

// -1 if there is only one rank, or no rank has logged its time per step.
int slowest_rank(const std::vector<ProcessLog>& ranks) {
  int slowest = -1;
  double most = 0;
  for (const ProcessLog& rank : ranks)
    if (const double own = rank.value("own_s").value_or(0); own > most) {
      most = own;
      slowest = rank.rank;
    }
  return ranks.size() > 1 ? slowest : -1;
}

// The first ranks, as many as fit, and the slowest one.
std::set<int> shown_ranks(const std::vector<ProcessLog>& ranks, int slowest, size_t most) {
  std::set<int> shown;
  for (size_t i = 0; i < ranks.size() && i < most; ++i) shown.insert(ranks[i].rank);
  if (slowest >= 0) shown.insert(slowest);
  return shown;
}

std::string memory_text(const ProcessLog& rank) {
  const auto gib = rank.value("memory_gib");
  return gib ? number("%.2f", *gib) + number(" (%.1f %%)", rank.value("memory_percent").value_or(0)) : "-";
}

std::string ranks_table(const Figures& figures, int64_t now, const ViewOptions& options) {
  if (figures.ranks.empty())
    return "no structured logs (metrics.structured_logs.enable): no data about single ranks\n";
  const int slowest = slowest_rank(figures.ranks);
  const std::set<int> shown = shown_ranks(figures.ranks, slowest, options.most_ranks);
  TextTable table{.rows = {{"rank", "host", "step", "at", "own ms", "waits ms", "memory GiB", "event", ""}},
                  .right = {true, false, true, false, true, true, true, true}};
  for (const ProcessLog& rank : figures.ranks) {
    if (!shown.contains(rank.rank)) continue;
    const double silent_s = static_cast<double>(now - rank.last_us()) * 1e-6;
    const std::string phase = phase_of(rank);
    table.rows.push_back({std::to_string(rank.rank), printable(rank.host),
                          std::to_string(rank.events.empty() ? 0 : rank.events.back().step),
                          phase.empty() ? "-" : phase, milliseconds_text(rank.value("own_s")),
                          milliseconds_text(rank.value("wait_s")), memory_text(rank),
                          duration(std::max(0.0, silent_s)) + " ago", rank.rank == slowest ? "slowest" : ""});
  }
  std::string text = to_string(table);
  if (shown.size() < figures.ranks.size()) text += str(figures.ranks.size() - shown.size(), " more ranks\n");
  return text;
}

// The straggler that rank 0 last reported.
std::string straggler_line(const Figures& figures, const Paint& paint) {
  if (figures.ranks.empty()) return "";
  const LoggedEvent* named = figures.ranks.front().last("straggler");
  if (!named || !named->value || *named->value < 0) return "";
  return paint("33", str("rank ", *named->value, " holds the others up (step ", named->step, ")")) + "\n";
}

// Reads only the ends of files, so a long run takes no longer. Throws ConfigError when there is no run.
View look_at(const fs::path& run, RankTails& tails, const ViewOptions& options) {
  const int64_t now = now_us();
  const Figures figures = read_figures(run, tails);
  const Paint paint{options.color};
  View view;
  std::string state;
  if (!figures.ranks.empty()) {
    const ProcessEnd end = end_of(figures.ranks.front(), now, errors_in(figures.ranks));
    view.ended = end.kind != ProcessEnd::Kind::Silent;
    state = is_failed_restart(end, figures.ranks.front(), figures.run)
                ? paint("32", "completed") + printable("; a later start was ended by " + end.words)
                : paint(end.kind == ProcessEnd::Kind::Failed ? "31" : "32", printable(end.words));
  }
  view.text = str(paint("1", printable(run.string())), "  ", figures.run.text_setting("model.name"), " ",
                  figures.run.text_setting("model.flavor"), "  ", state, "\n");
  if (figures.run.settings.empty()) {
    view.text += "training hasn't started\n";
  } else {
    view.text += progress_line(figures, paint, view.ended) + figure_line(figures.run.steps);
    view.text += validation_line(figures.run.validations) + checkpoint_line(figures.run) +
                 straggler_line(figures, paint);
  }
  view.text += "\n" + ranks_table(figures, now, options);
  return view;
}

constexpr const char* kTopNotes =
    R"(RUN is a run's job.dump_folder. Shows progress, speed, losses and the last checkpoint, and for each rank its
phase, its own time per step, its waits for peers and its memory, until the run ends or Ctrl-C. Reads only the
run's files, so it works on any machine that sees them. Without a terminal, or with --once, it prints once.
)";

constexpr size_t kLinesAboveRanks = 10;

// Zeros if unknown.
winsize terminal_size() {
  winsize size = {};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 ? size : winsize{};
}

// `most_ranks`: 0 for as many as fit.
ViewOptions options_for(int most_ranks, bool on_terminal) {
  ViewOptions options{.color = on_terminal && !std::getenv("NO_COLOR")};
  const winsize size = on_terminal ? terminal_size() : winsize{};
  if (size.ws_row > 0)
    options.most_ranks = size.ws_row > kLinesAboveRanks ? size.ws_row - kLinesAboveRanks : 1;
  if (most_ranks > 0) options.most_ranks = static_cast<size_t>(most_ranks);
  return options;
}

// Cuts a line to `width` characters. Color codes have no width, and those after the cut are kept.
std::string cut(const std::string& line, size_t width) {
  std::string kept;
  size_t used = 0;
  bool in_color = false;
  for (const char c : line) {
    in_color |= c == '\033';
    const bool begins = (c & 0xC0) != 0x80;  // else it continues a multi-byte character
    if (!in_color && begins) ++used;
    if (in_color || used <= width) kept += c;
    if (c == 'm') in_color = false;
  }
  return kept;
}

constexpr size_t kScreenBytes = 64 << 10;

// Overwrites the screen with a single write, so that it doesn't flicker. Lines are cut at the terminal's
// width: wrapped lines would push the first ones off the screen.
void repaint(const std::string& text) {
  const size_t width = terminal_size().ws_col;
  std::string screen = "\033[H";
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    screen += "\033[2K" + (width > 0 ? cut(line, width) : line) + "\n";
  screen += "\033[J";
  std::fputs(screen.c_str(), stdout);
  std::fflush(stdout);
}

}  // namespace

int top_command(const Arguments& words) {
  fs::path run;
  bool once = false;
  double interval_s = 1;
  int most_ranks = 0;
  Parser parser("titan top", "RUN [--once] [--interval S] [--ranks N]", kTopNotes);
  parser.path("RUN", run, "a run's folder");
  parser.flag("--once", once, "print once, and stop");
  parser.number("--interval", interval_s, CLI::Range(0.1, 3600.0), "seconds between updates (default 1)",
                "S");
  parser.number("--ranks", most_ranks, CLI::Range(1, kMostRanks),
                "show at most N ranks (default: as many as fit, or 16)");
  parser.parse(words);
  const bool on_terminal = ::isatty(STDOUT_FILENO) && !once;
  if (on_terminal) {
    // Otherwise each line is a write. (With a null buffer glibc ignores the size and uses a kilobyte.)
    static char screen[kScreenBytes];
    std::setvbuf(stdout, screen, _IOFBF, sizeof screen);
    std::fputs("\033[2J", stdout);
  }
  RankTails tails(kEventsTail, kMostRanksRead);
  while (true) {
    const View view = look_at(run, tails, options_for(most_ranks, on_terminal));
    on_terminal ? repaint(view.text) : static_cast<void>(std::fputs(view.text.c_str(), stdout));
    if (!on_terminal || view.ended) return 0;
    std::this_thread::sleep_for(std::chrono::duration<double>(interval_s));
  }
}

}  // namespace titan::cli
