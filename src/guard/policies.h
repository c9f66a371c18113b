#pragma once

// The guard's trainer policies: rewinding after a loss spike, replaying a non-finite step, and comparing
// replicas.

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "titan/dist/world.h"
#include "titan/parallel/parameters.h"
#include "titan/train/policy.h"
#include "train/policies/fault_tolerance.h"

namespace titan::train {

// fault_tolerance.spike_sigma: after a loss far above the recent ones, the run rewinds to an earlier
// checkpoint and skips the data that led to it. This is PaLM's recipe (Chowdhery et al. 2022, section 5.1).

/// Decides when a loss is a spike, and how far to rewind.
class LossSpikes {
 public:
  explicit LossSpikes(const FaultToleranceSettings& settings) : settings_(settings) {}

  /// `loss`: over a step's whole batch, finite, the same bits on every rank. True: it is more than
  /// spike_sigma standard deviations above the mean of the last spike_window losses, leaving out spikes.
  bool add(double loss);
  /// The last loss added, and the mean and deviation of the window; a spike isn't added to that.
  double last() const { return last_; }
  double mean() const;
  double deviation() const;

  /// Throws UnsoundRun, with the text `spike`, if max_rewinds is used up.
  void check_rewinds_left(const std::string& spike) const;
  /// Steps to rewind from a spike at `step`: spike_rewind_steps, or twice as many as the last time if that
  /// was at most spike_window steps ago, and so wasn't enough.
  int64_t rewind_distance(int64_t step) const;
  void count_rewind(int64_t step);
  int64_t num_rewinds() const { return num_rewinds_; }

  /// State for checkpoints, as JSON. load() keeps this object's count of rewinds if it is higher, and throws
  /// Error for an invalid text.
  std::string state() const;
  void load(const std::string& state);

 private:
  FaultToleranceSettings settings_;
  std::deque<double> window_;
  double last_ = 0;
  int64_t num_rewinds_ = 0;
  int64_t last_spike_ = 0;     // step of the last spike that was rewound
  int64_t last_distance_ = 0;  // steps that it was rewound by
};

/// Rewinds to a checkpoint after a spike. Reads the loss at the end of every step, even if numbers are read
/// late.
class RewindOnSpike final : public TrainerPolicy {
 public:
  explicit RewindOnSpike(const FaultToleranceSettings& settings) : settings_(settings), spikes_(settings) {}
  bool reads_loss() const override { return true; }
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

/// Finds the source of a step's non-finite numbers: once gradients are summed over ranks, they don't show
/// which rank made them. Runs the step's forwards and backwards again, with the same weights and batches, and
/// checks each module's numbers. Returns the same explanation on every rank: the module and the rank that
/// made the first non-finite number (or all ranks that sum parts of it); the parameter with such a gradient,
/// if no module made one; that only the loss isn't finite; or that all numbers are finite this time.
/// Collective over the world.
class NanReplay final : public TrainerPolicy {
 public:
  std::string explain(Trainer& trainer, const NonFiniteStep& step) override;

 private:
  std::string replay(Trainer& trainer, const NonFiniteStep& step);
};

// fault_tolerance.check_replicas_freq: finds silent corruption by a memory or a processor. Ranks that have a
// copy of the same part of a parameter (replicated over dp_replicate, tp or cp) always compute the same bits
// for it. A checksum of each copy shows when one no longer does.

/// The sum of the elements' bits, read as integers, times 1, 3, 5, ... by position, modulo 2^64: a 0-d int64
/// tensor on the tensor's device. Any one flipped bit changes it, and so do swapped elements and changes that
/// cancel in a plain sum; the order of additions doesn't.
at::Tensor bit_sum(const at::Tensor& tensor);

/// `sums`: the checksums of the copies of one part. Returns the positions that differ from the majority: all
/// of them if no more than half agree, none if all do.
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
