#include "cli/launch_arguments.h"

#include <cmath>

#include <CLI/CLI.hpp>

#include "titan/core/error.h"

namespace titan::cli {
namespace {

using std::chrono::milliseconds;

constexpr double kLongestSeconds = 1e6;

milliseconds read_seconds(const std::string& option, const std::string& text, const char* allowed) {
  double seconds = 0;
  if (!CLI::detail::lexical_cast(text, seconds) || !(seconds >= 0 && seconds <= kLongestSeconds))
    throw CLI::ValidationError(option, str("'", text, "' isn't ", allowed));
  return milliseconds(std::llround(seconds * 1000));
}

std::set<int> read_codes(const std::string& option, const std::string& text) {
  std::set<int> codes;
  for (const std::string& word : CLI::detail::split(text, ',')) {
    int code = 0;
    if (!CLI::detail::lexical_cast(word, code) || code < 1 || code > 255)
      throw CLI::ValidationError(
          option, str("'", text, "' isn't exit codes from 1 to 255 with commas between them, or 'none'"));
    codes.insert(code);
  }
  return codes;
}

}  // namespace

void add_restart_options(CLI::App& app, RestartWords& words, const char* default_grace) {
  app.add_option("--max-restarts", words.max_restarts,
                 "start the ranks again when one is lost, K times at most (default 0)")
      ->type_name("K")
      ->check(CLI::Range(0, 1'000'000).description(""));
  app.add_option("--min-ranks", words.min_ranks,
                 "with --max-restarts: go on without lost ranks, as long as M are left (default: N, all are "
                 "started again at once)")
      ->type_name("M")
      ->check(CLI::Range(1, 65536).description(""));
  app.add_option_function<std::string>(
         "--rejoin-after",
         [&words](const std::string& text) {
           words.rejoin_after.reset();
           if (text != "never")
             words.rejoin_after = read_seconds("--rejoin-after", text, "a number of seconds or 'never'");
         },
         "with --min-ranks: seconds until a lost rank's place is used again, or never (default 60); SIGUSR2 "
         "brings all back at once")
      ->type_name("S");
  app.add_option_function<std::string>(
         "--longest-delay",
         [&words](const std::string& text) {
           words.longest_delay = read_seconds("--longest-delay", text, "a number of seconds");
         },
         "with --max-restarts: the longest wait before a restart; waits become longer while groups soon fail "
         "(default 60)")
      ->type_name("S");
  app.add_option_function<std::string>(
         "--grace",
         [&words](const std::string& text) {
           words.stop_grace = read_seconds("--grace", text, "a number of seconds");
         },
         str("seconds that the ranks have for a last checkpoint when they are told to end (default: ",
             default_grace, ")"))
      ->type_name("S");
}

void add_final_codes(CLI::App& app, std::optional<std::set<int>>& codes) {
  app.add_option_function<std::string>(
         "--final-codes",
         [&codes](const std::string& text) {
           codes = text == "none" ? std::set<int>() : read_codes("--final-codes", text);
         },
         "with --max-restarts: exit codes behind which ranks aren't started again, or none (default 2,3: "
         "settings that are refused, and a run that found itself wrong)")
      ->type_name("C[,C...]");
}

void RestartWords::apply(LaunchOptions& options) const {
  options.restarts.max_restarts = max_restarts;
  options.restarts.min_ranks = min_ranks;
  options.restarts.rejoin_after = rejoin_after;
  options.restarts.longest_delay = longest_delay;
  if (stop_grace) options.stop_grace = *stop_grace;
}

void RestartWords::check_unused(const char* command) const {
  if (min_ranks > 0)
    throw ConfigError(
        str(command, ": --min-ranks is about restarts, and without --max-restarts there are none"));
}

}  // namespace titan::cli
