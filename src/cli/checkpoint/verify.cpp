// titan checkpoint verify: every byte of a checkpoint against its checksum.

#include "titan/checkpoint/saved_state.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "cli/checkpoint/commands.h"
#include "cli/text.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

using Clock = std::chrono::steady_clock;

// More wait for the disk only.
constexpr int kMostThreads = 8;

int default_threads() {
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMostThreads);
}

std::string amount_text(const checkpoint::VerifyReport& report, double seconds) {
  return str(plural(report.num_tensors, "tensor"), " in ", plural(report.num_files, "file"), ", ",
             size_text(report.num_bytes), " read in ", number("%.2f s", seconds),
             number(", %.2f GB/s", static_cast<double>(report.num_bytes) / 1e9 / std::max(seconds, 1e-9)));
}

}  // namespace

int checkpoint_verify(const Arguments& words) {
  const VerifyArguments arguments = parse_verify_arguments(words);
  if (!arguments.help.empty()) return print(arguments.help);
  const auto folder = step_folder(arguments.folder, "verify");
  checkpoint::VerifyOptions options;
  options.num_threads = arguments.num_threads > 0 ? arguments.num_threads : default_threads();
  const auto start = Clock::now();
  const checkpoint::VerifyReport report = [&] {
    Progress progress;
    options.progress = [&progress](int64_t bytes, int64_t total) { progress.show(bytes, total); };
    return checkpoint::verify_step(folder, options);
  }();
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  for (const checkpoint::Damage& damage : report.damages) std::printf("%s\n", to_string(damage).c_str());
  const std::string amount = amount_text(report, seconds);
  if (report.damages.empty()) return print(str(folder.string(), " is whole: ", amount, "\n"));
  std::printf("%s is damaged in %s: %s\n", folder.c_str(),
              plural(static_cast<int64_t>(report.damages.size()), "place").c_str(), amount.c_str());
  return 1;
}

}  // namespace titan::cli
