#pragma once

namespace titan::cli {

/// The program `titan`, for a binary of your own that registers models, data sources, ... first
/// (docs/extending.md):
///
///   int main(int argc, char** argv) {
///     register_my_model();
///     return titan::cli::main(argc, argv);
///   }
///
/// Returns 0, 2 for wrong settings or usage, else 1; a launched job's exit code is passed on. Catches
/// everything and prints it to standard error.
int main(int argc, char** argv);

}  // namespace titan::cli
