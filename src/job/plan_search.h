#pragma once

// [Note: search for a layout]
// Which degrees, schedule, micro-batch, recomputation, resharding and precision train a job fastest on a cluster. All layouts that the program
// could run are too many to plan each, so a search goes in two rounds:
// 1. Each kind of block, which is a combination of what a block's time depends on, is planned with three layers and with five (with other numbers, if
//    every n-th layer is recomputed). Their difference is a layer's time and memory; sums of these, and for pipelines a simulation of the schedule's actions, estimate every layout. Without a
//    pipeline, the blocks are planned on all ranks. A pipeline gathers and reduces parameters only once a step, so its blocks are planned on
//    the ranks of one replica, and the states' bytes are counted by the ranks that share them.
// 2. The best estimates are planned as they are, and ranked by that, until no estimate that is left can be among the best, even if it is as
//    pessimistic as the most pessimistic one so far. Memory is corrected by how far the estimates of the same schedule, depth and recomputation
//    were off so far; what delayed weight gradients keep, which estimates leave out, is learned from plans of the same tensor-parallel degree and
//    recomputation. A plan ends at the first rank that doesn't fit, so what may be the best is tried early even if it seems not to fit. Other
//    layouts that seem not to fit are planned last, and not at all if they are far from fitting.
//
// The kinds of blocks that can't be of use aren't planned:
// - what doesn't fit, by far, doesn't fit with a larger micro-batch either;
// - what fits easily needs no more recomputation, which computes more, and neither does what computes too long without it;
// - larger micro-batches, once they can save no more than half a percent, or not enough to be among the best;
// - what can't be among the best with its bubble, by the time of its block with a smaller micro-batch or less recomputation;
// - parameters that stay gathered, and replicas of them (HSDP; DDP if each rank has all), only save communication between replicas: they must
//   be fast enough without any. They take more memory, so they are never the layouts that take least. A group that shares parameters is a
//   part of a host, or whole hosts.
// In a pipeline, replicas save no more than some latency once a step, which no estimate shows: they are tried for the best layout only, at the
// end. So are parameters that stay sharded over the ranks of a host after the forward, gathers in Float8, and the other ways in which keys and
// values reach context-parallel ranks: each alone, and only those that are faster count. Stages of a rank are multiplied only while they divide the layers evenly and the bubble is above 1 % of a step.

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "job/job_config.h"
#include "job/job_plan.h"
#include "job/layouts.h"

namespace titan::train {

/// A job to plan: settings on top of the base's.
struct PlanRequest {
  std::vector<Layout::Setting> settings;
  int world = 0;
  bool only_first_rank = false;  ///< PlanOptions::only_first_rank
  int64_t stops_above = 0;       ///< PlanOptions::stops_above
};

struct PlanAnswer {
  std::string error;        ///< if it can't be planned
  bool has_failed = false;  ///< with an error that isn't the program's refusal of these settings
  double planning_s = 0;    ///< the time that planning took
  /// JobPlan::share_rehearsed: below 1, only `needed_bytes` is known, as the least that is needed.
  double share_rehearsed = 1;
  double step_s = 0, tokens = 0, mfu = 0;
  double parameters = 0;               ///< the model's
  int64_t peak_bytes = 0;              ///< from the device, by the allocator
  int64_t needed_bytes = 0;            ///< with memory outside the allocator
  plan::BytesByCategory most_bytes{};  ///< the most that each category takes, at different times
  int64_t saved_bytes = 0;             ///< the activations when the backward begins
  std::array<double, plan::kNumActivities> seconds{};  ///< the busiest rank's

  bool operator==(const PlanAnswer&) const = default;
};

using NextRequest = std::function<std::optional<PlanRequest>()>;
using TakeAnswer = std::function<void(size_t number, const PlanAnswer&)>;
/// Plans what `next` returns, several at a time, until it returns nothing and all are answered; `take` gets each answer with its request's number, from
/// 0 in the order of `next`. After an answer there may be more requests.
using Planner = std::function<void(const NextRequest& next, const TakeAnswer& take)>;

struct SearchOptions {
  int world = 0;
  int64_t sequences = 0;     ///< all ranks' in a step
  int64_t usable_bytes = 0;  ///< a device's
  int64_t host_devices = 8;
  /// Degrees that are given; 0: all are tried. `shard` is data_parallel_shard_degree.
  int64_t tensor = 0, context = 0, pipeline = 0, replicate = 0, shard = 0;
  int64_t max_tensor = 0, max_context = 0, max_pipeline = 0;  ///< limits of the degrees that are tried
  bool may_use_float8 = false;
  bool may_gather_float8 = true, may_change_context = true;  ///< variants of the best one may set these keys
  bool only_degrees = false;  ///< recomputation, precision and the rest stay as the base has them
  bool least_memory = false;  ///< rank what fits by memory instead of tokens/s
  size_t num_best = 10;
  size_t num_at_once = 2;  ///< jobs that are planned at the same time
  double seconds = 200;    ///< after which no more layouts are planned; the first round may take half of it
};

struct FoundLayout {
  Layout layout;
  PlanAnswer plan;
  double estimated_s = 0, estimated_bytes = 0;  ///< before the plan
};

struct SearchResult {
  std::vector<FoundLayout> best;  ///< best first; all fit
  size_t num_layouts = 0;         ///< that the search chooses from
  size_t num_estimated = 0;       ///< the others can't be among the best, or time was up
  size_t num_planned = 0;
  size_t num_too_large = 0;  ///< planned, but they don't fit
  bool time_is_up = false;   ///< before the search was through
  size_t num_left = 0;       ///< that could still be among the best; 0 unless time is up

  /// Layouts without a plan.
  struct Unplanned {
    size_t num = 0;
    std::string last;  ///< and why
  };
  Unplanned refused;  ///< by the program
  Unplanned failed;   ///< by any other error

  /// The smallest of the layouts that don't fit, by its plan or else its estimate.
  struct Smallest {
    Layout layout;
    double bytes = 0;       ///< 0: there is none
    bool is_least = false;  ///< it may need more
  };
  Smallest smallest;
};

/// How many were refused and have failed, with the last one's reason: sentences, or "" if there are none.
std::string unplanned_text(const SearchResult& result);

/// Throws ConfigError if no layout can be planned. `progress` gets a line now and then.
SearchResult search_layouts(const JobConfig& base, const SearchOptions& options, const Planner& planner,
                            const std::function<void(const std::string&)>& progress);

}  // namespace titan::train
