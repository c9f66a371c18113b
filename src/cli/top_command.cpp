// titan top: a run that is under way, on the terminal.

#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <thread>

#include "cli/commands.h"
#include "cli/parser.h"
#include "cli/run/run_history.h"
#include "cli/top/view.h"

namespace titan::cli {

namespace {

constexpr const char* kTopNotes =
    "RUN is a run's job.dump_folder. Shows how far it is, its speed and losses, its last checkpoint, and of "
    "each\n"
    "rank what it is at, its own time of a step, its waits for peers and its memory, until the run ends or "
    "Ctrl-C.\n"
    "Reads the run's files only, so it can be on any machine that sees them. Without a terminal, or with "
    "--once,\n"
    "it prints once.\n";

struct TopArguments {
  std::string help;
  std::filesystem::path run;
  bool once = false;
  double interval_s = 1;
  int most_ranks = 0;
};

TopArguments parse_top_arguments(const Arguments& words) {
  TopArguments arguments;
  Parser parser("titan top", "titan top RUN [--once] [--interval S] [--ranks N]", kTopNotes);
  parser.app.add_option("RUN", arguments.run, "a run's folder")->required()->type_name("FOLDER");
  parser.app.add_flag("--once", arguments.once, "print once, and stop");
  parser.app.add_option("--interval", arguments.interval_s, "seconds between two looks (default 1)")
      ->type_name("S")
      ->check(CLI::Range(0.1, 3600.0).description(""));
  parser.app
      .add_option("--ranks", arguments.most_ranks, "show at most so many (default: as many as fit, or 16)")
      ->type_name("N")
      ->check(CLI::Range(1, 65536).description(""));
  arguments.help = parser.parse(words);
  return arguments;
}

constexpr size_t kLinesAboveRanks = 10;

// Zeros where it doesn't say.
winsize terminal_size() {
  winsize size = {};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 ? size : winsize{};
}

top::ViewOptions options_for(const TopArguments& arguments, bool on_terminal) {
  top::ViewOptions options{.color = on_terminal && !std::getenv("NO_COLOR")};
  const winsize size = on_terminal ? terminal_size() : winsize{};
  if (size.ws_row > 0)
    options.most_ranks = size.ws_row > kLinesAboveRanks ? size.ws_row - kLinesAboveRanks : 1;
  if (arguments.most_ranks > 0) options.most_ranks = static_cast<size_t>(arguments.most_ranks);
  return options;
}

// So many characters of a line; colours take no room, and those behind it still end.
std::string cut(const std::string& line, size_t width) {
  std::string kept;
  size_t used = 0;
  bool in_color = false;
  for (const char c : line) {
    in_color |= c == '\033';
    const bool begins = (c & 0xC0) != 0x80;  // else it goes on with a character of several bytes
    if (!in_color && begins) ++used;
    if (in_color || used <= width) kept += c;
    if (c == 'm') in_color = false;
  }
  return kept;
}

constexpr size_t kScreenBytes = 64 << 10;

// One write for all of it, over what was there: the picture doesn't flicker. Lines end where the terminal
// does: wrapped ones would push the first off it.
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
  const TopArguments arguments = parse_top_arguments(words);
  if (!arguments.help.empty()) return std::fputs(arguments.help.c_str(), stdout), 0;
  const bool on_terminal = ::isatty(STDOUT_FILENO) && !arguments.once;
  if (on_terminal) {
    // By itself each line would be a write. (Without memory of ours glibc takes a kilobyte, whatever is
    // asked.)
    static char screen[kScreenBytes];
    std::setvbuf(stdout, screen, _IOFBF, sizeof screen);
    std::fputs("\033[2J", stdout);
  }
  top::Viewer viewer(arguments.run);
  while (true) {
    const top::View view = viewer.look(now_us(), options_for(arguments, on_terminal));
    on_terminal ? repaint(view.text) : static_cast<void>(std::fputs(view.text.c_str(), stdout));
    if (!on_terminal || view.ended) return 0;
    std::this_thread::sleep_for(std::chrono::duration<double>(arguments.interval_s));
  }
}

}  // namespace titan::cli
