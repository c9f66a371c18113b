#include <algorithm>
#include <cmath>

#include "titan/train/stragglers.h"

namespace titan::train {

namespace {

// Of a normal distribution, the standard deviation over the median absolute deviation.
constexpr double kSigmaOfMad = 1.4826;
constexpr double kLeastSigma = 0.02;  // of the median: clocks and kernels aren't finer

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

std::vector<double> others_of(const std::vector<RankPace>& ranks, size_t rank) {
  std::vector<double> own;
  for (size_t i = 0; i < ranks.size(); ++i)
    if (i != rank && ranks[i].stage == ranks[rank].stage) own.push_back(ranks[i].own_s);
  return own;
}

double sigma_of(const std::vector<double>& values, double median) {
  std::vector<double> distances;
  for (double value : values) distances.push_back(std::abs(value - median));
  return std::max(kSigmaOfMad * median_of(std::move(distances)), kLeastSigma * median);
}

}  // namespace

std::optional<Straggler> find_straggler(const std::vector<RankPace>& ranks, const StragglerSettings& settings,
                                        double least_share) {
  std::optional<Straggler> worst;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const std::vector<double> others = others_of(ranks, rank);
    if (others.empty()) continue;
    const double median = median_of(others), own = ranks[rank].own_s;
    const double sigma = sigma_of(others, median);
    if (own <= median * settings.ratio || own <= median + settings.sigma * sigma) continue;
    if (own <= median + least_share * ranks[rank].step_s) continue;
    if (worst && own - median <= worst->pace.own_s - worst->median_s) continue;
    worst = Straggler{static_cast<int>(rank), ranks[rank], median, sigma > 0 ? (own - median) / sigma : 0};
  }
  return worst;
}

}  // namespace titan::train
