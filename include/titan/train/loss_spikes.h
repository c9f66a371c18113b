#pragma once

// When a loss is a spike: fault_tolerance.spike_sigma. What is done about one (back to a checkpoint of some
// time before it, on behind its batch) is PaLM's recipe (Chowdhery et al. 2022, section 5.1), and the
// trainer's.

#include <cstdint>
#include <deque>
#include <string>

#include "titan/train/fault_tolerance_settings.h"

namespace titan::train {

class LossSpikes {
 public:
  explicit LossSpikes(const FaultToleranceSettings& settings) : settings_(settings) {}

  bool on() const { return settings_.spike_sigma > 0; }

  /// `loss`: of a step's whole batch, finite, the same bits on every rank. Whether it lies more than
  /// spike_sigma standard deviations above the mean of the spike_window losses before it, none of which was a
  /// spike.
  bool add(double loss);

  /// The last one added. For messages.
  double last() const { return last_; }
  double mean() const;
  double deviation() const;

  /// Throws UnsoundRun, about `spike`, where max_rewinds are used up.
  void check_rewinds_left(const std::string& spike) const;
  /// Steps to go back from a spike at `step`, if it can be: spike_rewind_steps, or twice as many as the last
  /// time where that is no more than spike_window steps ago and so wasn't enough.
  int64_t rewind_distance(int64_t step) const;
  void count_rewind(int64_t step);
  int64_t num_rewinds() const { return num_rewinds_; }

  /// For checkpoints, as JSON. Loading one keeps the rewinds where this object has counted more of them;
  /// throws Error of a text that is no such state.
  std::string state() const;
  void load(const std::string& state);

 private:
  FaultToleranceSettings settings_;
  std::deque<double> window_;
  double last_ = 0;
  int64_t num_rewinds_ = 0;
  int64_t last_spike_ = 0;     // the step of the last rewind's
  int64_t last_distance_ = 0;  // and how far it was to go back
};

}  // namespace titan::train
