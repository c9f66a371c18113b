// The order of a schedule's first run ([Note: first run of a schedule]), beside a simulation of hosts that wait for their device.

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <utility>

#include "parallel/pipeline/actions.h"
#include "titan/core/error.h"
#include "unit/parallel/pipeline_cases.h"

namespace titan::pipeline {
namespace {

constexpr int kCapacity = 4;

/// Whether all ranks come to their ends if a send lasts until it is received, and before each action that isn't a message a host waits until
/// the rank's earlier messages have ended, as it may where kernels are loaded.
class WaitingHosts {
 public:
  explicit WaitingHosts(const Schedule& schedule) : schedule_(schedule), next_(schedule.ranks.size(), 0) {
    for (const auto& actions : schedule.ranks)
      for (const Action& action : actions)
        if (is_send(action.kind)) number_of_[to_string(receive_of(action))] = num_sends_[ends_of(action)]++;
  }

  bool come_to_their_ends() {
    for (bool goes_on = true; goes_on;) {
      goes_on = false;
      for (size_t rank = 0; rank < next_.size(); ++rank)
        while (next_[rank] < schedule_.ranks[rank].size() && runs(static_cast<int>(rank))) {
          ++next_[rank];
          goes_on = true;
        }
    }
    for (size_t rank = 0; rank < next_.size(); ++rank)
      if (next_[rank] < schedule_.ranks[rank].size()) return false;
    return true;
  }

 private:
  struct Channel {
    int sent = 0, posted = 0;
  };

  std::pair<int, int> ends_of(const Action& message) const {
    const Action receive = receive_of(message);
    const int from = receive.kind == Action::Kind::ReceiveForward ? receive.stage - 1 : receive.stage + 1;
    return {schedule_.rank_of_stage[static_cast<size_t>(from)],
            schedule_.rank_of_stage[static_cast<size_t>(receive.stage)]};
  }

  bool runs(int rank) {
    const Action& action = schedule_.ranks[static_cast<size_t>(rank)][next_[static_cast<size_t>(rank)]];
    if (is_communication(action.kind)) {
      Channel& channel = channels_[ends_of(action)];
      if (!is_send(action.kind)) return ++channel.posted > 0;
      return channel.sent - channel.posted < kCapacity && ++channel.sent > 0;
    }
    for (const auto& [ends, channel] : channels_) {
      if (ends.first == rank && channel.sent > channel.posted) return false;
      if (ends.second == rank && channel.posted > channel.sent) return false;
    }
    const auto receive = receive_for(schedule_, action);
    return !receive || channels_[ends_of(*receive)].sent > number_of_.at(to_string(*receive));
  }

  const Schedule& schedule_;
  std::vector<size_t> next_;
  std::map<std::pair<int, int>, Channel> channels_;
  std::map<std::pair<int, int>, int> num_sends_;
  std::map<std::string, int> number_of_;
};

Schedule complete(const Schedule& schedule) { return with_parameter_actions(with_communication(schedule)); }

void expect_to_end(const Schedule& schedule, const std::string& text) {
  const Schedule first = in_order_of_first_run(schedule, kCapacity);
  EXPECT_TRUE(WaitingHosts(first).come_to_their_ends()) << text;
  const auto purpose = has_backward(schedule) ? Purpose::Training : Purpose::Evaluation;
  EXPECT_EQ(find_problems(first, {.purpose = purpose, .channel_capacity = kCapacity}).size(), 0U) << text;
  // Only receives have moved.
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    const auto without_receives = [&](std::vector<Action> actions) {
      std::erase_if(actions,
                    [](const Action& each) { return is_communication(each.kind) && !is_send(each.kind); });
      return actions;
    };
    EXPECT_EQ(without_receives(first.ranks[rank]), without_receives(schedule.ranks[rank])) << text;
  }
}

TEST(PipelineFirstRun, EndsWhereHostsWaitForTheirDevice) {
  for (const auto& each : titan::testing::pipeline_cases(5, 12)) {
    const Schedule schedule = each.make();
    expect_to_end(complete(schedule), each.text());
    expect_to_end(complete(make_forward_only_schedule(schedule.rank_of_stage, schedule.num_micro_batches)),
                  each.text() + ", forward only");
  }
  for (const auto& [name, ranks, stages, micro_batches] :
       {titan::testing::PipelineCase{"LoopedBFS", 2, 4, 64},
        {"InterleavedZeroBubble", 16, 32, 32},
        {"Interleaved1F1B", 12, 24, 32},
        {"DualPipeV", 16, 32, 40},
        {"ZBVZeroBubble", 16, 32, 40}})
    expect_to_end(complete(make_schedule(name, ranks, stages, micro_batches)), name);
}

// The usual orders hang.
TEST(PipelineFirstRun, IsNeeded) {
  for (const auto& each : {titan::testing::PipelineCase{"GPipe", 2, 2, 1},
                           {"LoopedBFS", 2, 4, 7},
                           {"InterleavedZeroBubble", 2, 4, 2},
                           {"Interleaved1F1B", 2, 4, 2}})
    EXPECT_FALSE(WaitingHosts(complete(each.make())).come_to_their_ends()) << each.text();
}

TEST(PipelineFirstRun, EndsForSchedulesOfUsers) {
  const auto cases = titan::testing::pipeline_cases(4, 5);
  std::mt19937 random(7);
  int num_changed = 0;
  for (int i = 0; i < 2000; ++i) {
    const auto& each = cases[random() % cases.size()];
    Schedule schedule = complete(each.make());
    for (int swap = 0; swap < 30; ++swap) {
      auto& actions = schedule.ranks[random() % schedule.ranks.size()];
      const size_t at = random() % (actions.size() - 1);
      std::swap(actions[at], actions[at + 1]);
      if (find_problems(schedule).empty())
        ++num_changed;
      else
        std::swap(actions[at], actions[at + 1]);
    }
    expect_to_end(schedule, str(each.text(), ", number ", i));
  }
  EXPECT_GT(num_changed, 5000);
}

}  // namespace
}  // namespace titan::pipeline
