#pragma once

// Sizes, times and tables as people read them.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

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

/// Rows of equal length, the first one with the column heads. Columns are as wide as necessary.
struct TextTable {
  std::vector<std::vector<std::string>> rows;
  std::vector<bool> right;  ///< right-aligned columns; missing: left
};

inline std::string to_string(const TextTable& table) {
  std::vector<size_t> widths;
  for (const auto& row : table.rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : table.rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string padding(widths[i] - row[i].size(), ' ');
      const bool right = i < table.right.size() && table.right[i];
      line += (i == 0 ? "" : "  ") + (right ? padding + row[i] : row[i] + padding);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

}  // namespace titan
