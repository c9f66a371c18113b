#pragma once

// The program `titan`, for a binary of your own that first registers models, data sources, ...
// (docs/extending.md):
//
//   int main(int argc, char** argv) {
//     register_my_model();
//     return titan::cli::main(argc, argv);
//   }

namespace titan::cli {

/// Returns the program's exit code: 0 after success, 2 for wrong settings or usage, 3 for a run whose numbers
/// aren't sound (train::kUnsoundRunCode), and 1 for other errors. Commands add their own: `titan launch` and
/// `titan train --nproc` pass on the code of the rank that failed first, `titan checkpoint verify` and `diff`
/// return 1 for what they find, and a process that a signal stopped may return 128 + the signal. Catches
/// every exception and prints it to standard error.
int main(int argc, char** argv);

}  // namespace titan::cli
