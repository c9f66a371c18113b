#pragma once

// fault_tolerance.spike_sigma: a loss far above the last ones sends the run back to a checkpoint from some
// time before, and the data that led to it is skipped: PaLM's recipe (Chowdhery et al. 2022, section 5.1).

#include <cstdint>
#include <deque>
#include <string>

#include "titan/train/policy.h"
#include "train/policies/fault_tolerance_settings.h"

namespace titan::train {

/// When a loss is a spike, and how far a run goes back from it.
class LossSpikes {
 public:
  explicit LossSpikes(const FaultToleranceSettings& settings) : settings_(settings) {}

  /// `loss`: of a step's whole batch, finite, the same bits on every rank. True: it lies more than
  /// spike_sigma standard deviations above the mean of the spike_window losses before it, none of which was a
  /// spike.
  bool add(double loss);
  /// The last loss added, and what it was compared with.
  double last() const { return last_; }
  double mean() const;
  double deviation() const;

  /// Throws UnsoundRun, about `spike`, if max_rewinds are used up.
  void check_rewinds_left(const std::string& spike) const;
  /// Steps to go back from a spike at `step`: spike_rewind_steps, or twice as many as the last time if that
  /// is no more than spike_window steps ago and so wasn't enough.
  int64_t rewind_distance(int64_t step) const;
  void count_rewind(int64_t step);
  int64_t num_rewinds() const { return num_rewinds_; }

  /// For checkpoints, as JSON. Loading keeps the rewinds if this object has counted more of them; throws
  /// Error for a text that is no such state.
  std::string state() const;
  void load(const std::string& state);

 private:
  FaultToleranceSettings settings_;
  std::deque<double> window_;
  double last_ = 0;
  int64_t num_rewinds_ = 0;
  int64_t last_spike_ = 0;     // step of the last spike that was rewound
  int64_t last_distance_ = 0;  // and how far back
};

/// Goes back to a checkpoint after a spike. It needs the loss of every step at its end, also where numbers
/// are read late.
class RewindOnSpike final : public TrainerPolicy {
 public:
  explicit RewindOnSpike(const FaultToleranceSettings& settings) : settings_(settings), spikes_(settings) {}
  void judge(Trainer& trainer, const StepValues& values) override;
  bool end_step(Trainer& trainer) override;
  std::string state() const override { return spikes_.state(); }
  void load(const std::string& state) override { spikes_.load(state); }

 private:
  bool rewind(Trainer& trainer);

  FaultToleranceSettings settings_;
  LossSpikes spikes_;
  bool spiked_ = false;
};

}  // namespace titan::train
