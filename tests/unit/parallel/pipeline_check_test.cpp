#include "titan/parallel/pipeline_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "titan/core/error.h"

namespace titan::pipeline {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using Kind = Action::Kind;

std::string first_problem(const Schedule& schedule, const CheckOptions& options = {}) {
  const auto problems = find_problems(schedule, options);
  return problems.empty() ? "no problem" : to_string(problems.front(), schedule);
}

std::string first_problem(const std::string& csv, const CheckOptions& options = {}) {
  return first_problem(parse_schedule_csv(csv, "a.csv"), options);
}

TEST(PipelineCheck, AcceptsSchedulesThatRun) {
  EXPECT_EQ(first_problem("0F0,0B0"), "no problem");
  EXPECT_EQ(first_problem("0F0,0I0,0W0"), "no problem");
  EXPECT_EQ(first_problem("0F0,0F1,0I1,0B0,0W1\n1F0,1F1,1B1,1I0,1W0"), "no problem");
  EXPECT_EQ(first_problem("0F0,1F0", {.purpose = Purpose::Evaluation}), "no problem");
}

TEST(PipelineCheck, RefusesMissingActions) {
  EXPECT_EQ(first_problem("0F0,0B0\n1B0"), "rank 1: 1F0 is missing");
  EXPECT_EQ(first_problem("0F0,0B0,0F1\n1F0,1B0,1F1,1B1"), "rank 0: 0B1 (or 0I1 and 0W1) is missing");
  EXPECT_EQ(first_problem("0F0,0I0"), "rank 0, action 1 (0I0): 0W0 is missing");
  EXPECT_EQ(first_problem("0F0,0W0"), "rank 0, action 1 (0W0): 0I0 is missing");
  EXPECT_EQ(first_problem("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0"),
            "rank 1, action 0 (1F0): 1RECV_F0 is missing");
  EXPECT_EQ(first_problem("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0"),
            "rank 0: 0SEND_F0 is missing, for 1RECV_F0 on rank 1");
}

TEST(PipelineCheck, RefusesDuplicateActions) {
  EXPECT_EQ(first_problem("0F0,0F0,0B0"), "rank 0, action 1 (0F0): duplicates action 0");
  EXPECT_THAT(first_problem("0F0,0B0,0I0,0W0"),
              AllOf(HasSubstr("rank 0, action 1 (0B0)"), HasSubstr("whole or split"),
                    HasSubstr("0I0 is there, too, as action 3")));
}

TEST(PipelineCheck, RefusesActionsInTheWrongPlace) {
  Schedule schedule = make_schedule("1F1B", 2, 2, 2);
  schedule.ranks[0][0].stage = 1;
  EXPECT_EQ(first_problem(schedule), "rank 0, action 0 (1F0): stage 1 is on rank 1");
  schedule.ranks[0][0].stage = 2;
  EXPECT_EQ(first_problem(schedule), "rank 0, action 0 (2F0): there is no stage 2; the stages are 0 to 1");
  schedule.ranks[0][0] = {Kind::Forward, 0, 2};
  EXPECT_EQ(first_problem(schedule), "rank 0, action 0 (0F2): there is no micro-batch 2; they are 0 to 1");
  schedule.ranks[0][0] = {static_cast<Kind>(77), 0, 0};
  EXPECT_THAT(first_problem(schedule), HasSubstr("has an unknown kind"));
}

TEST(PipelineCheck, RefusesWrongShapes) {
  const Schedule good = make_schedule("1F1B", 2, 2, 2);
  Schedule schedule = good;
  schedule.rank_of_stage = {0};
  EXPECT_EQ(first_problem(schedule), "the map of stages to ranks has 1 entries for 2 stages");
  schedule.rank_of_stage = {0, 2};
  EXPECT_EQ(first_problem(schedule), "stage 1 is on rank 2; the ranks are 0 to 1");
  schedule.rank_of_stage = {0, 0};
  EXPECT_EQ(first_problem(schedule), "rank 1: owns no stage");
  schedule = good;
  schedule.num_micro_batches = 1 << 30;
  EXPECT_THAT(first_problem(schedule), HasSubstr("only 8 actions for 1073741824 micro-batches of 2 stages"));
  schedule.num_micro_batches = 0;
  EXPECT_THAT(first_problem(schedule), HasSubstr("1 or more stages and micro-batches"));
  schedule.ranks.clear();
  EXPECT_EQ(first_problem(schedule), "the schedule has no ranks");
  EXPECT_THROW(find_problems(good, {.channel_capacity = -1}), Error);
}

TEST(PipelineCheck, RefusesUselessMessages) {
  EXPECT_THAT(first_problem("0F0,0SEND_F0,1F0,1B0,0B0"), HasSubstr("stages 0 and 1 are both on rank 0"));
  EXPECT_THAT(first_problem("0RECV_F0,0F0,0B0"), HasSubstr("the first stage has no neighbor"));
  EXPECT_THAT(first_problem("0F0,0B0\n1F0,1SEND_F0,1B0"),
              HasSubstr("the last stage has no neighbor to exchange activations"));
}

TEST(PipelineCheck, ChecksTheOrderOnOneRank) {
  EXPECT_EQ(first_problem("0B0,0F0"), "rank 0, action 0 (0B0): needs 0F0, which is action 1");
  EXPECT_EQ(first_problem("0F0,0W0,0I0"), "rank 0, action 1 (0W0): needs 0I0, which is action 2");
  EXPECT_EQ(first_problem("1F0,0F0,1B0,0B0"), "rank 0, action 0 (1F0): needs 0F0, which is action 1");
  EXPECT_EQ(first_problem("0F0,1F0,0I0,1B0,0W0"), "rank 0, action 2 (0I0): needs 1B0, which is action 3");
  EXPECT_EQ(first_problem("0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0"),
            "rank 0, action 0 (0SEND_F0): needs 0F0, which is action 1");
  EXPECT_EQ(first_problem("0F0,0SEND_F0,0B0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0"),
            "rank 0, action 2 (0B0): needs 0RECV_B0, which is action 3");
}

TEST(PipelineCheck, RequiresReceivesInTheOrderOfSends) {
  EXPECT_EQ(
      first_problem("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
                    "1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1"),
      "rank 1, action 0 (1RECV_F1): message 0 from rank 0 is 0SEND_F0; receives must be in the order of "
      "the sends");
}

TEST(PipelineCheck, NamesDeadlocks) {
  EXPECT_EQ(first_problem("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1"),
            "rank 0, action 1 (0B0): deadlock, ranks wait for each other: rank 0 at action 1 (0B0) waits for "
            "1B0 (or its I) "
            "of rank 1; rank 1 at action 0 (1F1) waits for 0F1 of rank 0");
  const std::string late =
      "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1\n"
      "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1";
  EXPECT_EQ(first_problem(late, {.channel_capacity = 1}), "no problem");
  EXPECT_THAT(first_problem(late, {.channel_capacity = 0}),
              AllOf(HasSubstr("rank 0 at action 3 (0SEND_F1) waits until rank 1 posts 1RECV_F1"),
                    HasSubstr("rank 1 at action 3 (1SEND_B0) waits until rank 0 posts 0RECV_B0")));
}

// Virtual GPUs whose hosts wait for NCCL's connections (VIRTUAL_GPU_NCCL=strict) hung in just these five schedules, as long as links weren't
// connected before: docs/virtual_gpu.md.
TEST(PipelineCheck, FindsHangsAtTheFirstContact) {
  std::vector<std::string> hang;
  for (const ScheduleTraits& traits : all_schedule_traits()) {
    const int num_stages = default_num_stages(traits, 2);
    const int least = traits.micro_batch_rule == MicroBatchRule::AtLeastStages ? num_stages : 1;
    const Schedule schedule = with_communication(make_schedule(traits.name, 2, num_stages, least));
    EXPECT_EQ(first_problem(schedule), "no problem") << traits.name;
    if (first_problem(schedule, {.connects_at_first_message = true}) != "no problem")
      hang.emplace_back(traits.name);
  }
  EXPECT_THAT(hang, UnorderedElementsAre("GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
                                         "ZBVZeroBubble"));
  EXPECT_THAT(first_problem("0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
                            {.connects_at_first_message = true}),
              AllOf(HasSubstr("rank 0 at action 0 (0RECV_B0) connects to rank 1, which hasn't come to the "
                              "first message of this direction"),
                    HasSubstr("rank 1 at action 0 (1RECV_F0) connects to rank 0")));
}

TEST(PipelineCheck, ChecksParameterActions) {
  EXPECT_EQ(first_problem("0UNSHARD,0F0,0B0,0RESHARD"), "no problem");
  EXPECT_EQ(first_problem("0F0,0UNSHARD,0B0,0RESHARD"),
            "rank 0, action 0 (0F0): stage 0's parameters aren't gathered");
  EXPECT_EQ(first_problem("0UNSHARD,0F0,0RESHARD,0B0"),
            "rank 0, action 3 (0B0): stage 0's parameters aren't gathered");
  EXPECT_EQ(first_problem("0UNSHARD,0UNSHARD,0F0,0B0,0RESHARD"),
            "rank 0, action 1 (0UNSHARD): stage 0 is gathered already");
  EXPECT_EQ(first_problem("0UNSHARD,0F0,0B0,0RESHARD,0RESHARD"),
            "rank 0, action 4 (0RESHARD): stage 0 isn't gathered");
  EXPECT_EQ(first_problem("0UNSHARD,0F0,0B0"), "rank 0: stage 0 is left gathered at the end");
  EXPECT_EQ(
      first_problem("0F0,0REDUCE_GRAD,0B0"),
      "rank 0, action 1 (0REDUCE_GRAD): gradients must be reduced after the stage's last backward, which "
      "is action 2");
  EXPECT_EQ(first_problem("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD"),
            "rank 0, action 3 (0REDUCE_GRAD): stage 0 is reduced already");
  EXPECT_EQ(first_problem("0F0,1F0,1B0,0B0,0REDUCE_GRAD"), "rank 0: 1REDUCE_GRAD is missing");
}

TEST(PipelineCheck, ChecksEvaluations) {
  const CheckOptions evaluation{.purpose = Purpose::Evaluation};
  EXPECT_EQ(first_problem("0F0,0B0", evaluation), "rank 0, action 1 (0B0): an evaluation has forwards only");
  EXPECT_EQ(first_problem("0F0,0REDUCE_GRAD", evaluation),
            "rank 0, action 1 (0REDUCE_GRAD): an evaluation has forwards only");
  EXPECT_EQ(first_problem("0F0,0F1\n1F1,1F0", evaluation), "no problem");
}

TEST(PipelineCheck, LimitsLiveActivations) {
  EXPECT_EQ(first_problem(make_schedule("GPipe", 2, 2, 4), {.max_live_activations = 4}), "no problem");
  EXPECT_EQ(first_problem(make_schedule("GPipe", 2, 2, 4), {.max_live_activations = 3}),
            "rank 0, action 3 (0F3): makes 4 live activations; at most 3 are allowed");
  EXPECT_EQ(first_problem("0F0,0I0,0F1,0W0,0B1", {.max_live_activations = 1}),
            "rank 0, action 2 (0F1): makes 2 live activations; at most 1 are allowed");
}

TEST(PipelineCheck, ErrorsNameTheSchedule) {
  Schedule schedule = make_schedule("1F1B", 2, 2, 2);
  schedule.ranks[1].pop_back();
  try {
    check_schedule(schedule);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "pipeline schedule 1F1B: rank 1: 1B1 (or 1I1 and 1W1) is missing");
  }
  for (auto& actions : schedule.ranks) actions.clear();
  schedule.ranks[0].assign(100, {Kind::SendForward, 0, 0});
  EXPECT_EQ(find_problems(schedule).size(), 20u);
}

// With half a million actions, a quadratic algorithm would take hours.
TEST(PipelineCheck, TakesLinearTime) {
  const auto start = std::chrono::steady_clock::now();
  const Schedule schedule =
      with_parameter_actions(with_communication(make_schedule("InterleavedZeroBubble", 64, 128, 1024)));
  EXPECT_TRUE(find_problems(schedule, {.channel_capacity = 0}).empty());
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 60);
}

}  // namespace
}  // namespace titan::pipeline
