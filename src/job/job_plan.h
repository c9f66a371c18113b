#pragma once

// The plan of a job: its memory and the time of a step, from rehearsals of one rank of each role and a simulation of their traces.

#include <cstdint>
#include <string>
#include <vector>

#include "job/rehearsal.h"
#include "plan/cost_model.h"
#include "plan/outside_memory.h"
#include "plan/simulation.h"
#include "plan/summary.h"

namespace titan::train {

struct PlannedRole {
  PlannedRank rank;
  plan::Summary summary;
  plan::OutsideMemory outside = {};

  /// The allocator's peak, and the memory outside of it.
  int64_t needed_bytes() const { return rank.peak_reserved_bytes + outside.bytes(); }
  /// "fsdp gather", "default", "stream 5"; a group's own: "calls of dp_shard".
  std::string stream_name(int64_t stream) const;
};

struct JobPlan {
  plan::ClusterSpec cluster;
  int world_size = 0;
  std::vector<PlannedRole> roles;  ///< the first ones are those of step.ranks
  /// Below 1, PlanOptions::stops_above has ended the plan after some roles: it has no time.
  double share_rehearsed = 1;

  // ---- memory

  const PlannedRole& largest() const;  ///< the role that needs the most memory
  int64_t peak_bytes() const;          ///< the allocator's largest, of all roles
  int64_t needed_bytes() const { return largest().needed_bytes(); }
  bool fits() const { return needed_bytes() <= cluster.device.usable_bytes(); }

  // ---- time

  plan::StepTime step;
  double tokens = 0;           ///< all ranks' in a step
  double flops_per_token = 0;  ///< the model's, as metrics' tflops count them

  double tokens_per_s_per_device() const;
  /// Against the peak in bfloat16, also of jobs in Float8.
  double mfu() const;
  /// The simulated rank that computes longest, which the others wait for.
  const plan::StepTime::OfRank& busiest() const;
};

struct PlanOptions {
  plan::Kernels kernels = plan::Kernels::Ours;
  bool with_spans = false;       ///< JobPlan::step.spans; else the traces are dropped, too
  bool only_first_rank = false;  ///< the job's last rank isn't looked at
  int64_t stops_above = 0;       ///< ends with the first role that needs more bytes; 0: all are planned
};

/// The config has passed check_job and check_plannable for that size; the device is of the cluster's kind.
JobPlan plan_job(const JobConfig& config, int world_size, const plan::ClusterSpec& cluster,
                 plan::PlannedGpu& device, const PlanOptions& options = {});

}  // namespace titan::train
