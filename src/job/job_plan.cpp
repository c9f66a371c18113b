#include "job/job_plan.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "titan/core/error.h"

namespace titan::train {

namespace {

// They may differ by a few allocations, which take no memory and no time.
bool are_alike(const PlannedRole& a, const PlannedRole& b) {
  const int64_t allocations = a.summary.num_allocations;
  return std::abs(allocations - b.summary.num_allocations) <= allocations / 100 &&
         a.rank.peak_allocated_bytes == b.rank.peak_allocated_bytes &&
         a.rank.peak_reserved_bytes == b.rank.peak_reserved_bytes &&
         a.summary.num_launches == b.summary.num_launches && a.summary.flops == b.summary.flops &&
         a.summary.collectives.size() == b.summary.collectives.size();
}

}  // namespace

std::string PlannedRole::stream_name(int64_t stream) const {
  if (stream == 0) return "default";
  for (const auto& [number, name] : rank.streams)
    if (number == stream) return name;
  return str("stream ", stream);
}

const PlannedRole& JobPlan::largest() const {
  return *std::ranges::max_element(roles, {}, &PlannedRole::needed_bytes);
}

int64_t JobPlan::peak_bytes() const {
  int64_t peak = 0;
  for (const PlannedRole& role : roles) peak = std::max(peak, role.rank.peak_reserved_bytes);
  return peak;
}

double JobPlan::tokens_per_s_per_device() const { return tokens / step.seconds / world_size; }

double JobPlan::mfu() const {
  return flops_per_token * tokens_per_s_per_device() / cluster.device.peak_flops(c10::kBFloat16);
}

const plan::StepTime::OfRank& JobPlan::busiest() const {
  return *std::ranges::max_element(step.ranks, {}, [](const plan::StepTime::OfRank& rank) {
    return rank.seconds[static_cast<size_t>(plan::Activity::Compute)] +
           rank.seconds[static_cast<size_t>(plan::Activity::Optimizer)];
  });
}

JobPlan plan_job(const JobConfig& config, int world_size, const plan::ClusterSpec& cluster,
                 plan::PlannedGpu& device, const PlanOptions& options) {
  JobPlan plan{.cluster = cluster, .world_size = world_size, .roles = {}, .step = {}};
  std::vector<Role> all = roles_of(config, world_size);
  if (options.only_first_rank && all.back().is_last) all.pop_back();
  for (const Role& role : all) {
    PlannedRank rank = rehearse(config, world_size, role, device);
    plan::Summary summary = plan::summarize(*rank.trace);
    const plan::OutsideMemory outside = plan::outside_memory(*rank.trace, cluster, rank.symmetric_owners);
    plan.roles.push_back({std::move(rank), std::move(summary), outside});
    if (options.stops_above > 0 && plan.needed_bytes() > options.stops_above) {
      plan.share_rehearsed = static_cast<double>(plan.roles.size()) / static_cast<double>(all.size());
      if (plan.share_rehearsed < 1) return plan;
    }
  }
  // The last rank is one of its own only if it does something else than the first of its pipeline rank.
  std::vector<PlannedRole>& roles = plan.roles;
  const auto depth = static_cast<size_t>(config.parallelism.pipeline_parallel_degree);
  if (roles.back().rank.role.is_last && are_alike(roles[depth - 1], roles.back())) roles.pop_back();
  if (roles.size() == 1) roles[0].rank.role.name = "every rank";

  std::vector<plan::SimulatedRank> ranks;
  for (size_t i = 0; i < depth; ++i) ranks.push_back({roles[i].rank.trace.get(), roles[i].rank.role.rank});
  plan.step = plan::simulate(ranks, world_size / static_cast<int>(depth),
                             plan::CostModel(cluster, options.kernels), options.with_spans);
  plan.tokens = roles[0].rank.tokens_of_step;
  plan.flops_per_token = config.spec().flops_per_token(config.args(), config.training.seq_len);
  if (!options.with_spans)
    for (PlannedRole& role : roles) role.rank.trace.reset();  // long lists
  return plan;
}

}  // namespace titan::train
