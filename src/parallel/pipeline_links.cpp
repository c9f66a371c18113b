#include "titan/parallel/pipeline_links.h"

#include <algorithm>
#include <set>

#include "titan/core/error.h"

namespace titan::pipeline {

namespace {

constexpr const char* kPhase = "pp::transfer";

// Neighbouring stages on different ranks, both ways, in an order that all ranks share.
std::set<std::pair<int, int>> directions_of(const Schedule& schedule) {
  std::set<std::pair<int, int>> directions;
  for (size_t stage = 1; stage < schedule.rank_of_stage.size(); ++stage) {
    const int before = schedule.rank_of_stage[stage - 1], here = schedule.rank_of_stage[stage];
    if (before == here) continue;
    directions.insert({before, here});
    directions.insert({here, before});
  }
  return directions;
}

}  // namespace

dist::Work Link::send(const at::Tensor& tensor, const char* label) const {
  return group_->send(tensor, peer_, {kPhase, label});
}

dist::Work Link::receive(const at::Tensor& tensor, const char* label) const {
  return group_->receive(tensor, peer_, {kPhase, label});
}

dist::Work Link::send(const std::vector<at::Tensor>& tensors, const char* label) const {
  return group_->send(tensors, peer_, {kPhase, label});
}

dist::Work Link::receive(const std::vector<at::Tensor>& tensors, const char* label) const {
  return group_->receive(tensors, peer_, {kPhase, label});
}

void Links::connect(const Schedule& schedule) {
  TITAN_CHECK(schedule.num_ranks() == pp_.size(), "a schedule of ", schedule.num_ranks(),
              " pipeline ranks on a mesh of ", pp_.size());
  for (const auto& [from, to] : directions_of(schedule)) {
    if ((from != pp_.rank() && to != pp_.rank()) || links_.contains({from, to})) continue;
    std::vector<int> ranks = {pp_.ranks()[static_cast<size_t>(from)], pp_.ranks()[static_cast<size_t>(to)]};
    std::sort(ranks.begin(), ranks.end());
    const char* purpose = from < to ? "pipeline.down" : "pipeline.up";
    auto group = pp_.world().group(ranks, str("pp.", from, "-", to), purpose);
    const int peer = 1 - group->rank();
    links_.emplace(std::pair(from, to), Link(std::move(group), peer));
  }
}

void Links::close() const {
  for (const auto& [ends, link] : links_) link.close();
}

}  // namespace titan::pipeline
