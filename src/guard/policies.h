#pragma once

// The trainer policies of the guard: rewinding after a loss spike, replaying a step whose numbers aren't finite, and
// comparing replicas.

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "titan/dist/world.h"
#include "titan/parallel/parameters.h"
#include "titan/train/policy.h"
#include "train/policies/fault_tolerance.h"

namespace titan::train {

// fault_tolerance.spike_sigma: a loss far above the last ones sends the run back to a checkpoint from some time before,
// and the data that led to it is skipped: PaLM's recipe (Chowdhery et al. 2022, section 5.1).

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

/// Finds where a step's non-finite numbers come from: once gradients are summed over ranks, they don't show which rank
/// made them. Runs the step's forwards and backwards again, with the same weights and batches, and looks at each
/// module's numbers. Explains the step with the same text on every rank: the module and the rank that made
/// the first number that isn't finite (all ranks that sum parts of it, if there are such); the parameter
/// whose gradient it is in, if no module made one; that only the loss isn't finite; or that all numbers are
/// finite this time. Collective over the world.
class NanReplay final : public TrainerPolicy {
 public:
  std::string explain(Trainer& trainer, const NonFiniteStep& step) override;

 private:
  std::string replay(Trainer& trainer, const NonFiniteStep& step);
};

// fault_tolerance.check_replicas_freq: silent corruption by a memory or a processor. Ranks that have a copy of the same
// part of a parameter (replicated over dp_replicate, tp or cp) always compute the same bits for it; a checksum of each
// copy shows when one no longer does.

/// The sum of the tensor's bits, read as integers of its element size, modulo 2^64: a 0-d int64 tensor on its
/// device. Any one flipped bit changes it, the order of additions doesn't.
at::Tensor bit_sum(const at::Tensor& tensor);

/// `sums`: of the copies of one part. The positions that differ from what more than half of them have; all of
/// them if no more than half agree, none if all do.
std::vector<size_t> differing(const std::vector<int64_t>& sums);

/// Throws UnsoundRun on every rank of the world if any copies differ: the message names the ranks and, for
/// each mesh, its first parameter that differs. `parameters`: all of this rank's. Blocking; collective over
/// the world.
void check_replicas(const dist::World& world, const std::vector<Parameter>& parameters, int64_t step);

/// Compares replicas every `freq` steps and before each save.
class ReplicaCheck final : public TrainerPolicy {
 public:
  explicit ReplicaCheck(int64_t freq) : freq_(freq) {}
  bool end_step(Trainer& trainer) override;
  void before_save(Trainer& trainer) override;

 private:
  void compare(Trainer& trainer);

  int64_t freq_;
  int64_t compared_step_ = -1;
};

}  // namespace titan::train
