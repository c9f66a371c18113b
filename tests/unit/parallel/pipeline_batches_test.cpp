#include "titan/parallel/pipeline_batches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "titan/parallel/pipeline_completion.h"
#include "titan/parallel/pipeline_csv.h"
#include "unit/parallel/pipeline_cases.h"

namespace titan::pipeline {
namespace {

using titan::testing::pipeline_cases;

bool always(const Action&, const Action&) { return true; }

// "SEND_F0+SEND_F1": what goes in one call, by rank.
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

TEST(PipelineBatches, WhereBothEndsStandTogether) {
  EXPECT_THAT(calls_of("0F0,0F1,0F2,0SEND_F0,0SEND_F1,0SEND_F2,0RECV_B0,0B0,0RECV_B1,0B1,0RECV_B2,0B2\n"
                       "1RECV_F0,1RECV_F1,1RECV_F2,1F0,1F1,1F2,1B0,1SEND_B0,1B1,1SEND_B1,1B2,1SEND_B2\n"),
              ::testing::ElementsAre("0SEND_F0+0SEND_F1+0SEND_F2", "1RECV_F0+1RECV_F1+1RECV_F2"));
}

TEST(PipelineBatches, NotWhereOneEndAloneStandsTogether) {
  EXPECT_THAT(calls_of("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
                       "1RECV_F0,1RECV_F1,1F0,1F1,1B0,1B1,1SEND_B0,1SEND_B1\n"),
              ::testing::ElementsAre("", ""));
}

TEST(PipelineBatches, NotAcrossChannels) {
  // Rank 1 sends both ways.
  EXPECT_THAT(
      calls_of("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
               "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1RECV_B0,1B0,1SEND_B0,1SEND_F1,1RECV_B1,1B1,1SEND_B1\n"
               "2RECV_F0,2F0,2B0,2SEND_B0,2RECV_F1,2F1,2B1,2SEND_B1\n"),
      ::testing::ElementsAre("", "", ""));
}

TEST(PipelineBatches, NotWhatMayNotBeJoined) {
  const auto first_two = [](const Action& one, const Action&) { return one.micro_batch == 0; };
  EXPECT_THAT(calls_of("0F0,0F1,0F2,0SEND_F0,0SEND_F1,0SEND_F2,0RECV_B0,0B0,0RECV_B1,0B1,0RECV_B2,0B2\n"
                       "1RECV_F0,1RECV_F1,1RECV_F2,1F0,1F1,1F2,1B0,1SEND_B0,1B1,1SEND_B1,1B2,1SEND_B2\n",
                       first_two),
              ::testing::ElementsAre("0SEND_F0+0SEND_F1", "1RECV_F0+1RECV_F1"));
}

// Each result is sent behind the action that made it, which no batch holds up.
TEST(PipelineBatches, GeneratedSchedulesHaveNone) {
  for (const auto& one : pipeline_cases(5, 12))
    for (const std::vector<bool>& joined : joined_with_next(with_communication(one.make()), always))
      EXPECT_THAT(joined, ::testing::Each(false)) << one.text();
}

}  // namespace
}  // namespace titan::pipeline
