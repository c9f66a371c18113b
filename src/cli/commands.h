#pragma once

// The commands of the program. Each takes the words after its name and returns the exit code. Errors pass
// through.

#include <exception>
#include <string>
#include <vector>

namespace titan::cli {

using Arguments = std::vector<std::string>;

/// Thrown by a command's parser when the words ask for help. main() prints the text.
struct HelpText {
  std::string text;
};

/// Thrown after an error has been reported in full: main() only returns the code.
struct ReportedError {
  int code;
};

/// The exit code that main() returns for an error: 2 for ConfigError, 3 for UnsoundRun, otherwise 1.
int code_of(const std::exception& error);

/// Registers the models that come with the library. An explicit call, because a linker may drop a file of the
/// library whose only use is a static initializer. Does nothing the second time.
void register_builtin_models();

int checkpoint_command(const Arguments& words);
int compare_command(const Arguments& words);
int debug_command(const Arguments& words);
int docs_command(const Arguments& words);
int launch_command(const Arguments& words);
int plan_command(const Arguments& words);
int report_command(const Arguments& words);
int schedule_command(const Arguments& words);
int sweep_command(const Arguments& words);
int top_command(const Arguments& words);
int train_command(const Arguments& words);

}  // namespace titan::cli
