#pragma once

// fault_tolerance.check_replicas_freq: silent corruption by a memory or a processor. Ranks that have a copy
// of the same part of a parameter (replicated over dp_replicate, tp or cp) always compute the same bits for
// it; a checksum of each copy shows when one no longer does.

#include <cstdint>
#include <string>
#include <vector>

#include "titan/dist/world.h"
#include "titan/parallel/parameters.h"
#include "titan/train/policy.h"

namespace titan::train {

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
