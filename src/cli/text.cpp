#include "cli/text.h"

#include <sys/stat.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <ctime>

#include <c10/util/StringUtil.h>

#include "titan/core/error.h"

namespace titan::cli {

namespace {

std::string time_text(std::time_t seconds, bool utc) {
  std::tm parts = {};
  utc ? gmtime_r(&seconds, &parts) : localtime_r(&seconds, &parts);
  std::array<char, 64> text{};
  const size_t length =
      std::strftime(text.data(), text.size(), utc ? "%Y-%m-%dT%H:%M:%SZ" : "%Y-%m-%d %H:%M:%S", &parts);
  return std::string(text.data(), length);
}

}  // namespace

int print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  return 0;
}

std::string number(const char* format, double value) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

std::string number_or_none(const char* format, const std::optional<double>& value, const char* none) {
  return value ? number(format, *value) : none;
}

std::string shape_text(const std::vector<int64_t>& shape) { return "[" + c10::Join(", ", shape) + "]"; }

std::string written_text(const std::filesystem::path& file, bool utc) {
  struct stat status = {};
  return ::lstat(file.c_str(), &status) == 0 ? time_text(status.st_mtime, utc) : "";
}

std::string short_number(double value) {
  const bool whole = value == std::round(value) || std::abs(value) >= 1000;
  if (!whole || std::abs(value) >= 1e15) return number("%.5g", value);
  std::string digits = number("%.0f", value);
  const size_t first = digits.front() == '-' ? 1 : 0;
  for (size_t at = digits.size(); at > first + 3; at -= 3) digits.insert(at - 3, 1, ',');
  return digits;
}

std::string duration(double seconds) {
  if (seconds < 0.01) return number("%.2g ms", seconds * 1e3);
  if (seconds < 1) return number("%.0f ms", seconds * 1e3);
  if (seconds < 60) return number("%.1f s", seconds);
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  if (whole < 3600) return str(whole / 60, " min ", whole % 60, " s");
  if (whole < 86400) return str(whole / 3600, " h ", whole % 3600 / 60, " min");
  return str(whole / 86400, " d ", whole % 86400 / 3600, " h");
}

std::string local_time(int64_t time_us) { return time_text(time_us / 1'000'000, /*utc=*/false); }

std::string printable(std::string text) {
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  return text;
}

}  // namespace titan::cli
