#include <cstdio>

#include "cli/arguments.h"

namespace titan::cli {

int launch_command(const std::vector<std::string>& words) {
  const LaunchArguments arguments = parse_launch_arguments(words);
  if (!arguments.help.empty()) return std::fputs(arguments.help.c_str(), stdout), 0;
  return launch_local(arguments.options);
}

}  // namespace titan::cli
