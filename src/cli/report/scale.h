#pragma once

// From values to a place on an axis, and the values that are marked on it.

#include <string>
#include <vector>

namespace titan::cli::report {

class Scale {
 public:
  /// Over [low, high], widened to marks where `widen`; `log`: by powers of ten, for values above 0.
  Scale(double low, double high, bool log, bool widen);

  /// 0 at the low end, 1 at the high one.
  double place(double value) const;
  const std::vector<double>& marks() const { return marks_; }
  bool is_log() const { return log_; }

 private:
  void mark_linear(bool widen);
  void mark_decades(bool widen);

  double low_, high_;
  bool log_;
  std::vector<double> marks_;
};

/// "0.25", "1000", "2.5M"; as many digits as marks `distance` apart need.
std::string mark_text(double value, double distance);

}  // namespace titan::cli::report
