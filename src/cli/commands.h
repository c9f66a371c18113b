#pragma once

// The commands of the program. `arguments` are the words after the command's name. They return the exit code;
// errors pass through.

#include <string>
#include <vector>

namespace titan::cli {

using Arguments = std::vector<std::string>;

int train_command(const Arguments& arguments);
int checkpoint_command(const Arguments& arguments);
int compare_command(const Arguments& arguments);
int debug_command(const Arguments& arguments);
int docs_command(const Arguments& arguments);
int report_command(const Arguments& arguments);
int schedule_command(const Arguments& arguments);
int sweep_command(const Arguments& arguments);
int top_command(const Arguments& arguments);

}  // namespace titan::cli
