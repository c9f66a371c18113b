#include "cli/report/scale.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "titan/core/error.h"

namespace titan::cli::report {

namespace {

constexpr int kMarks = 5;  // about so many

// 1, 2 or 5 times a power of ten.
double round_distance(double wanted) {
  const double power = std::pow(10, std::floor(std::log10(wanted)));
  for (double factor : {1.0, 2.0, 5.0})
    if (wanted <= factor * power * 1.0000001) return factor * power;
  return 10 * power;
}

}  // namespace

Scale::Scale(double low, double high, bool log, bool widen) : low_(low), high_(high), log_(log && low > 0) {
  // One value, or values that differ by their rounding, between which no marks can be: in the middle.
  if (high_ - low_ <= 1e-12 * std::max(std::abs(low_), std::abs(high_))) {
    const double half = low_ == 0 ? 1 : std::abs(low_) / 2;
    high_ = low_ + half;
    low_ -= log_ ? half / 2 : half;
  }
  log_ ? mark_decades(widen) : mark_linear(widen);
}

void Scale::mark_linear(bool widen) {
  const double distance = round_distance((high_ - low_) / kMarks);
  if (widen) {
    low_ = std::floor(low_ / distance) * distance;
    high_ = std::ceil(high_ / distance) * distance;
  }
  for (double at = std::ceil(low_ / distance - 1e-9); at * distance <= high_ + distance * 1e-9; ++at)
    marks_.push_back(at * distance + 0.0);  // no -0
}

void Scale::mark_decades(bool widen) {
  if (widen) {
    low_ = std::pow(10, std::floor(std::log10(low_) + 1e-9));
    high_ = std::pow(10, std::ceil(std::log10(high_) - 1e-9));
  }
  const double decades = std::log10(high_ / low_);
  const double stride = std::max(1.0, std::ceil(decades / 6));
  for (double power = std::ceil(std::log10(low_) - 1e-9); power <= std::log10(high_) + 1e-9; power += stride)
    marks_.push_back(std::pow(10, power));
}

double Scale::place(double value) const {
  if (!log_) return (value - low_) / (high_ - low_);
  return std::log(value / low_) / std::log(high_ / low_);
}

std::string mark_text(double value, double distance) {
  static constexpr std::array<std::pair<double, const char*>, 4> kUnits = {
      {{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e4, "k"}}};
  double unit = 1;
  const char* letter = "";
  for (const auto& [least, name] : kUnits) {
    if (std::abs(value) < least) continue;
    unit = least == 1e4 ? 1e3 : least;
    letter = name;
    break;
  }
  const double shown = distance / unit;
  const int decimals =
      shown > 0 ? std::clamp(static_cast<int>(std::ceil(-std::log10(shown) - 1e-9)), 0, 9) : 0;
  std::array<char, 48> text{};
  if (value != 0 && std::abs(value) < 1e-4)
    std::snprintf(text.data(), text.size(), "%.0e", value);
  else
    std::snprintf(text.data(), text.size(), "%.*f", decimals, value / unit);
  return str(text.data(), letter);
}

}  // namespace titan::cli::report
