#pragma once

// `titan debug COMMAND`: what ranks left behind, joined. `arguments` are the words behind the command's name.

#include "cli/commands.h"

namespace titan::cli {

int debug_dump(const Arguments& arguments);
int debug_events(const Arguments& arguments);
int debug_flight(const Arguments& arguments);

}  // namespace titan::cli
