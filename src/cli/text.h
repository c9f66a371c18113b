#pragma once

// Numbers and times for people.

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "core/units.h"
#include "titan/core/error.h"

namespace titan::cli {

/// Prints `text` to standard output. Returns the exit code 0.
int print(const std::string& text);

/// printf of one number.
std::string number(const char* format, double value);
/// The same; `none` without a value.
std::string number_or_none(const char* format, const std::optional<double>& value, const char* none = "");
/// "1 file", "2 files"
std::string plural(std::integral auto count, const char* noun) {
  return str(count, " ", noun, count == 1 ? "" : "s");
}
/// "[2, 3]"
std::string shape_text(const std::vector<int64_t>& shape);

/// When a file was written, "2026-11-21 20:05:44" local time, or "2026-11-21T20:05:44Z"; "" without a file.
std::string written_text(const std::filesystem::path& file, bool utc = false);

/// "1,234,567", "0.00012", "3.25": five significant digits, and grouped where whole.
std::string short_number(double value);
/// "3 h 20 min", "4 min 5 s", "12.3 s", "45 ms"
std::string duration(double seconds);
/// Local time: "2026-11-21 20:05:44"
std::string local_time(int64_t time_us);
/// For a terminal: replaces control characters by '?'.
std::string printable(std::string text);

}  // namespace titan::cli
