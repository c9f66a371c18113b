#include <charconv>
#include <cstdio>

#include "titan/cli/launch.h"
#include "titan/core/error.h"

namespace titan::cli {
namespace {

constexpr const char* kUsage =
    "usage: titan launch -n N [--log-rank RANKS] [--] program [arguments ...]\n"
    "\n"
    "Starts N ranks of a program on this machine and waits for them.\n"
    "  -n, --nproc N      number of ranks\n"
    "  --log-rank RANKS   whose output is shown: 0 (default), a list such as 0,3, all, none\n"
    "The ranks find each other by dist::init(). When one fails, the others are ended, its last lines are\n"
    "printed at the end, and its exit code is this command's.\n";

int parse_count(const std::string& text) {
  int count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc() || end != text.data() + text.size() || count < 1) {
    throw ConfigError(str("titan launch -n: '", text, "' isn't a number of ranks"));
  }
  return count;
}

/// Takes "--name value" and "--name=value"; true if `arguments[at]` is this option, with `at` on its last
/// word.
bool take_option(const std::vector<std::string>& arguments, size_t& at, const std::string& name,
                 std::string& value) {
  if (arguments[at].rfind(name + "=", 0) == 0) {
    value = arguments[at].substr(name.size() + 1);
    return true;
  }
  if (arguments[at] != name) return false;
  if (++at == arguments.size()) throw ConfigError(str("titan launch: ", name, " wants a value"));
  value = arguments[at];
  return true;
}

}  // namespace

int launch_command(const std::vector<std::string>& arguments) {
  LaunchOptions options;
  std::string count;
  size_t at = 0;
  for (; at < arguments.size(); ++at) {
    if (arguments[at] == "--help" || arguments[at] == "-h") return std::fputs(kUsage, stdout), 0;
    if (take_option(arguments, at, "-n", count) || take_option(arguments, at, "--nproc", count)) continue;
    if (take_option(arguments, at, "--log-rank", options.log_rank)) continue;
    if (arguments[at] == "--")
      ++at;
    else if (arguments[at][0] == '-')
      throw ConfigError(str("titan launch: unknown option '", arguments[at], "'\n", kUsage));
    break;
  }
  options.command.assign(arguments.begin() + static_cast<std::ptrdiff_t>(std::min(at, arguments.size())),
                         arguments.end());
  if (count.empty() || options.command.empty())
    throw ConfigError(str("titan launch wants -n and a program\n", kUsage));
  options.num_ranks = parse_count(count);
  return launch_local(options);
}

}  // namespace titan::cli
