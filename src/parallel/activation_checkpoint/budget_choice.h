#pragma once

// MemoryBudget's arithmetic: sizes and times in, one level per layer out. No tensors.

#include <cstdint>
#include <string>
#include <vector>

namespace titan::activations {

/// What a layer keeps, least first.
enum class Level { Full, Op, None };

struct LevelCost {
  double bytes = 0;        ///< kept between forward and backward
  double recompute_s = 0;  ///< spent in the backward
};

/// Indexed by Level.
struct LayerCosts {
  LevelCost full, op, none;
  const LevelCost& at(Level level) const;
};

/// Gives layers of the same sizes the least of their measured times, and of those that Op spares: a single
/// measurement has the noise of its moment in it.
void equalize_times(std::vector<LayerCosts>& layers);

/// The levels of least total recompute time within `budget_bytes`; exact but for the rounding of sizes to
/// 1/16384 of the budget. Of layers of the same sizes the later ones keep more. Throws Error where the budget
/// doesn't hold what Full keeps.
std::vector<Level> choose_levels(const std::vector<LayerCosts>& layers, double budget_bytes);

/// bytes, or where that is negative, by the fraction between keeping least and keeping everything.
double budget_bytes_of(const std::vector<LayerCosts>& layers, int64_t bytes, double fraction);

/// A table for the log.
std::string describe_choice(const std::vector<LayerCosts>& layers, const std::vector<Level>& levels,
                            double budget_bytes);

}  // namespace titan::activations
