#include "cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace titan::cli {

Progress::Progress() : shows_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (shown_) std::fputs("\n", stderr);
}

void Progress::show(int64_t bytes, int64_t total) {
  const auto now = Clock::now();
  if (!shows_ || (bytes < total && now - last_ < std::chrono::milliseconds(100))) return;
  last_ = now;
  shown_ = true;
  const double seconds = std::max(1e-9, std::chrono::duration<double>(now - start_).count());
  std::fprintf(stderr, "\r%.2f of %.2f GB (%.0f %%), %.2f GB/s ", bytes / 1e9, total / 1e9,
               total > 0 ? 100.0 * static_cast<double>(bytes) / static_cast<double>(total) : 100.0,
               bytes / 1e9 / seconds);
}

}  // namespace titan::cli
