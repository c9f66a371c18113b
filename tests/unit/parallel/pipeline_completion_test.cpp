#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <algorithm>
#include <set>

#include "titan/core/error.h"
#include "titan/parallel/pipeline_schedule.h"
#include "unit/parallel/pipeline_cases.h"

namespace titan::pipeline {
namespace {

using titan::testing::pipeline_cases;
using Kind = Action::Kind;

std::vector<Action> compute_of(std::vector<Action> actions) {
  std::erase_if(actions, [](const Action& action) { return !is_compute(action.kind); });
  return actions;
}

int count(const Schedule& schedule, Kind kind) {
  int number = 0;
  for (const auto& actions : schedule.ranks)
    number += std::count_if(actions.begin(), actions.end(),
                            [kind](const Action& action) { return action.kind == kind; });
  return number;
}

/// The number of compute actions between each receive and its use, except for receives that can't be posted
/// earlier.
std::vector<int> leads(const Schedule& schedule) {
  std::vector<int> result;
  for (const auto& actions : schedule.ranks)
    for (size_t i = 0; i < actions.size(); ++i) {
      const bool forward = actions[i].kind == Kind::ReceiveForward;
      if (!forward && actions[i].kind != Kind::ReceiveBackward) continue;
      int lead = 0;
      for (size_t use = i + 1;; ++use) {
        const Action& action = actions.at(use);
        if (!is_compute(action.kind)) continue;
        if (action.stage == actions[i].stage && action.micro_batch == actions[i].micro_batch &&
            (action.kind == Kind::Forward) == forward)
          break;
        ++lead;
      }
      if (lead > 0 || !compute_of({actions.begin(), actions.begin() + i}).empty()) result.push_back(lead);
    }
  return result;
}

TEST(PipelineCompletion, RunsWhereSendsBlock) {
  for (const auto& one : pipeline_cases(5, 12)) {
    const Schedule plain = one.make(), whole = with_communication(plain);
    const auto problems = find_problems(whole, {.channel_capacity = 0});
    EXPECT_TRUE(problems.empty()) << one.text() << ": " << to_string(problems.front(), whole);
    for (int rank = 0; rank < plain.num_ranks(); ++rank)
      EXPECT_EQ(compute_of(whole.ranks[rank]), plain.ranks[rank]) << one.text();
  }
}

TEST(PipelineCompletion, PostsReceivesOneActionAheadOfTheirUse) {
  for (const auto& one : pipeline_cases(5, 12))
    for (int lead : leads(with_communication(one.make()))) EXPECT_GE(lead, 1) << one.text();
  // They aren't posted earlier than necessary, because that would need another buffer.
  for (const char* name : {"GPipe", "1F1B", "Interleaved1F1B"}) {
    const int stages = default_num_stages(schedule_traits(name), 4);
    for (int lead : leads(with_communication(make_schedule(name, 4, stages, 8)))) EXPECT_EQ(lead, 1) << name;
  }
}

TEST(PipelineCompletion, StagesOfOneRankExchangeNoMessages) {
  const Schedule whole = with_communication(make_schedule("ZBVZeroBubble", 2, 4, 4));
  EXPECT_EQ(count(whole, Kind::SendForward), 2 * 4);  // 0 to 1 and 2 to 3; 1 to 2 stays
  EXPECT_EQ(count(whole, Kind::ReceiveBackward), 2 * 4);
  EXPECT_EQ(count(with_communication(make_schedule("LoopedBFS", 1, 3, 4)), Kind::SendForward), 0);
}

// The reason why transfers aren't batched (docs/decisions/pipelines.md): a result is sent right after the
// action that computed it.
TEST(PipelineCompletion, SendsAreNeverAdjacent) {
  const auto sends = [](const Action& action) {
    return action.kind == Kind::SendForward || action.kind == Kind::SendBackward;
  };
  for (const auto& one : pipeline_cases(5, 12))
    for (const auto& actions : with_communication(one.make()).ranks)
      EXPECT_EQ(std::adjacent_find(actions.begin(), actions.end(),
                                   [&](const Action& a, const Action& b) { return sends(a) && sends(b); }),
                actions.end())
          << one.text();
}

TEST(PipelineCompletion, Matches1F1BByHand) {
  const Schedule whole = with_parameter_actions(with_communication(make_schedule("1F1B", 2, 2, 2)));
  EXPECT_EQ(to_csv(whole),
            "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0RECV_B1,0B0,0B1,0REDUCE_GRAD,0RESHARD\n"
            "1RECV_F0,1UNSHARD,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD\n");
}

TEST(PipelineCompletion, IsIdempotent) {
  for (const auto& one : pipeline_cases(4, 6)) {
    const Schedule sent = with_communication(one.make()), whole = with_parameter_actions(sent);
    EXPECT_EQ(with_communication(sent), sent);
    EXPECT_EQ(with_communication(whole), whole);
    EXPECT_EQ(with_parameter_actions(whole), whole);
  }
}

TEST(PipelineCompletion, CompletesMessagesAndParametersInEitherOrder) {
  for (const auto& one : pipeline_cases(4, 6)) {
    const Schedule whole = with_communication(with_parameter_actions(one.make()));
    EXPECT_TRUE(find_problems(whole, {.channel_capacity = 0}).empty()) << one.text();
  }
}

TEST(PipelineCompletion, GathersParametersForUseWithinTheLimit) {
  for (const auto& one : pipeline_cases(3, 8))
    for (int most : {1, 2, 3}) {
      const Schedule whole = with_parameter_actions(with_communication(one.make()), most);
      EXPECT_TRUE(find_problems(whole).empty()) << one.text();
      for (const auto& actions : whole.ranks) {
        std::set<int> gathered;
        for (const Action& action : actions) {
          if (action.kind == Kind::Unshard) gathered.insert(action.stage);
          if (action.kind == Kind::Reshard) gathered.erase(action.stage);
          EXPECT_LE(gathered.size(), static_cast<size_t>(most)) << one.text();
        }
      }
    }
  EXPECT_THROW(with_parameter_actions(make_schedule("GPipe", 1, 1, 1), 0), Error);
}

TEST(PipelineCompletion, ReducesEachStageOnceAfterItsLastBackward) {
  for (const auto& one : pipeline_cases(4, 6)) {
    const Schedule whole = with_parameter_actions(with_communication(one.make()));
    EXPECT_EQ(count(whole, Kind::Reduce), one.num_stages) << one.text();
  }
  // Actions that a file already has stay.
  const Schedule file = parse_schedule_csv("0F0,0B0,0REDUCE_GRAD", "a.csv");
  EXPECT_EQ(to_csv(with_parameter_actions(file)), "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD\n");
}

TEST(PipelineCompletion, RefusesSchedulesThatCannotRun) {
  EXPECT_THROW(with_communication(parse_schedule_csv("0F0,0B0\n1F0\n", "a.csv")), ConfigError);
  EXPECT_THROW(with_communication(parse_schedule_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", "a.csv")),
               ConfigError);
}

using titan::testing::pipeline_cases;

bool always(const Action&, const Action&) { return true; }

// "SEND_F0+SEND_F1": the messages of one call, by rank.
std::vector<std::string> calls_of(const std::string& csv, const MayJoin& may_join = always) {
  const Schedule schedule = parse_schedule_csv(csv, "by hand");
  const auto joined = joined_with_next(schedule, may_join);
  std::vector<std::string> calls;
  for (size_t rank = 0; rank < joined.size(); ++rank) {
    std::string text;
    for (size_t i = 0; i < joined[rank].size(); ++i) {
      if (!joined[rank][i]) continue;
      if (i == 0 || !joined[rank][i - 1])
        text += (text.empty() ? "" : " ") + to_string(schedule.ranks[rank][i]);
      text += "+" + to_string(schedule.ranks[rank][i + 1]);
    }
    calls.push_back(text);
  }
  return calls;
}

TEST(PipelineBatches, JoinMessagesAdjacentAtBothEnds) {
  EXPECT_THAT(calls_of("0F0,0F1,0F2,0SEND_F0,0SEND_F1,0SEND_F2,0RECV_B0,0B0,0RECV_B1,0B1,0RECV_B2,0B2\n"
                       "1RECV_F0,1RECV_F1,1RECV_F2,1F0,1F1,1F2,1B0,1SEND_B0,1B1,1SEND_B1,1B2,1SEND_B2\n"),
              ::testing::ElementsAre("0SEND_F0+0SEND_F1+0SEND_F2", "1RECV_F0+1RECV_F1+1RECV_F2"));
}

TEST(PipelineBatches, NeedAdjacentMessagesAtBothEnds) {
  EXPECT_THAT(calls_of("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
                       "1RECV_F0,1RECV_F1,1F0,1F1,1B0,1B1,1SEND_B0,1SEND_B1\n"),
              ::testing::ElementsAre("", ""));
}

TEST(PipelineBatches, StayWithinAChannel) {
  // Rank 1 sends both ways.
  EXPECT_THAT(
      calls_of("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
               "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1RECV_B0,1B0,1SEND_B0,1SEND_F1,1RECV_B1,1B1,1SEND_B1\n"
               "2RECV_F0,2F0,2B0,2SEND_B0,2RECV_F1,2F1,2B1,2SEND_B1\n"),
      ::testing::ElementsAre("", "", ""));
}

TEST(PipelineBatches, LeaveOutMessagesThatMayNotJoin) {
  const auto first_two = [](const Action& one, const Action&) { return one.micro_batch == 0; };
  EXPECT_THAT(calls_of("0F0,0F1,0F2,0SEND_F0,0SEND_F1,0SEND_F2,0RECV_B0,0B0,0RECV_B1,0B1,0RECV_B2,0B2\n"
                       "1RECV_F0,1RECV_F1,1RECV_F2,1F0,1F1,1F2,1B0,1SEND_B0,1B1,1SEND_B1,1B2,1SEND_B2\n",
                       first_two),
              ::testing::ElementsAre("0SEND_F0+0SEND_F1", "1RECV_F0+1RECV_F1"));
}

// Each result is sent right after the action that computed it, so no batch delays it.
TEST(PipelineBatches, GeneratedSchedulesHaveNone) {
  for (const auto& one : pipeline_cases(5, 12))
    for (const std::vector<bool>& joined : joined_with_next(with_communication(one.make()), always))
      EXPECT_THAT(joined, ::testing::Each(false)) << one.text();
}

}  // namespace
}  // namespace titan::pipeline
