// Evaluation: forwards only, on any map of stages to ranks.

#include <algorithm>

#include "titan/core/error.h"
#include "titan/parallel/pipeline_generators.h"

namespace titan::pipeline {

namespace {

/// In steps of one forward a rank, as if all took equally long.
class ForwardOnly {
 public:
  explicit ForwardOnly(Schedule& schedule)
      : schedule_(schedule), done_(schedule.num_stages), stages_(schedule.ranks.size()) {
    for (int stage = schedule.num_stages - 1; stage >= 0; --stage)
      stages_[schedule.rank_of_stage[stage]].push_back(stage);
  }

  void run() {
    while (done_.back() < schedule_.num_micro_batches) step();
  }

 private:
  bool could_run(int stage) const {
    return done_[stage] < schedule_.num_micro_batches && (stage == 0 || done_[stage] < done_[stage - 1]);
  }

  // Chosen for all ranks before any counts as done: what a stage computes is there for the next one a step
  // later.
  void step() {
    std::vector<int> chosen;
    for (const std::vector<int>& stages : stages_) {
      const auto first =
          std::find_if(stages.begin(), stages.end(), [&](int stage) { return could_run(stage); });
      if (first != stages.end()) chosen.push_back(*first);
    }
    for (int stage : chosen)
      schedule_.ranks[schedule_.rank_of_stage[stage]].push_back(
          {Action::Kind::Forward, stage, done_[stage]++});
  }

  Schedule& schedule_;
  std::vector<int> done_;                 // per stage: its micro-batches
  std::vector<std::vector<int>> stages_;  // per rank, the last first
};

}  // namespace

Schedule make_forward_only_schedule(const std::vector<int>& rank_of_stage, int num_micro_batches) {
  TITAN_CHECK(!rank_of_stage.empty() && num_micro_batches >= 1,
              "a forward-only schedule wants a stage and a micro-batch or more, not ", rank_of_stage.size(),
              " and ", num_micro_batches);
  const int num_ranks = *std::max_element(rank_of_stage.begin(), rank_of_stage.end()) + 1;
  for (int rank = 0; rank < num_ranks; ++rank)
    TITAN_CHECK(std::count(rank_of_stage.begin(), rank_of_stage.end(), rank) > 0, "rank ", rank, " of ",
                num_ranks, " owns no stage");
  TITAN_CHECK(*std::min_element(rank_of_stage.begin(), rank_of_stage.end()) == 0,
              "a stage has a negative rank");
  Schedule schedule{.name = "ForwardOnly",
                    .num_stages = static_cast<int>(rank_of_stage.size()),
                    .num_micro_batches = num_micro_batches,
                    .rank_of_stage = rank_of_stage,
                    .ranks = std::vector<std::vector<Action>>(num_ranks)};
  ForwardOnly(schedule).run();
  return schedule;
}

}  // namespace titan::pipeline
