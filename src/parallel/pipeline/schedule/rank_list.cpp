#include "parallel/pipeline/schedule/rank_list.h"

#include <algorithm>

#include "titan/core/error.h"

namespace titan::pipeline {

namespace {

auto of_stage(int stage) {
  return [stage](const Action& action) { return action.stage == stage; };
}

}  // namespace

void RankList::input(int stage) {
  const int micro_batch = next_[stage].backward++;
  add(Action::Kind::BackwardInput, stage, micro_batch);
  owed_.push_back({Action::Kind::BackwardWeight, stage, micro_batch});
}

void RankList::weight(int stage) {
  const auto owed = std::find_if(owed_.begin(), owed_.end(), of_stage(stage));
  TITAN_INTERNAL_ASSERT(owed != owed_.end(), "stage ", stage, " owes no W");
  actions_.push_back(*owed);
  owed_.erase(owed);
}

void RankList::oldest_weight() {
  if (owed_.empty()) return;
  actions_.push_back(owed_.front());
  owed_.pop_front();
}

bool RankList::owes_weight(int stage) const {
  return std::any_of(owed_.begin(), owed_.end(), of_stage(stage));
}

}  // namespace titan::pipeline
