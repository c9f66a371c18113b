#pragma once

// Sizes and times as people read them.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

namespace titan {

constexpr double kMiB = 1024.0 * 1024.0;
constexpr double kGiB = 1024.0 * kMiB;

/// "1 byte", "813 kB", "4.56 GB": decimal units, three or four digits.
inline std::string size_text(int64_t bytes) {
  if (bytes < 1'000) return std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes");
  double size = static_cast<double>(bytes) / 1e3;
  const char* unit = "kB";
  for (const char* larger : {"MB", "GB", "TB"}) {
    if (size < 1e3) break;
    size /= 1e3;
    unit = larger;
  }
  char text[32];
  std::snprintf(text, sizeof text, *unit == 'k' || *unit == 'M' ? "%.3g %s" : "%.4g %s", size, unit);
  return text;
}

/// By the steady clock.
inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace titan
