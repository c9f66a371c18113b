#include "titan/parallel/pipeline_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "titan/core/error.h"
#include "unit/parallel/pipeline_cases.h"

namespace titan::pipeline {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Kind = Action::Kind;

std::string problem_of(const std::string& text) {
  try {
    parse_schedule_csv(text, "a.csv");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no problem";
}

TEST(PipelineCsv, ReadsEveryCell) {
  const Schedule schedule = parse_schedule_csv(
      "0UNSHARD,0F0,0SEND_F0,,0RECV_B0, 0I0 ,0W0,0RESHARD,0REDUCE_GRAD\r\n"
      "1RECV_F0,1F0,1B0,1SEND_B0\r\n\r\n",
      "folder/mine.csv");
  EXPECT_EQ(schedule.name, "mine");
  EXPECT_EQ(schedule.num_stages, 2);
  EXPECT_EQ(schedule.num_micro_batches, 1);
  EXPECT_THAT(schedule.rank_of_stage, ElementsAre(0, 1));
  EXPECT_THAT(schedule.ranks[0],
              ElementsAre(Action{Kind::Unshard, 0, -1}, Action{Kind::Forward, 0, 0},
                          Action{Kind::SendForward, 0, 0}, Action{Kind::ReceiveBackward, 0, 0},
                          Action{Kind::BackwardInput, 0, 0}, Action{Kind::BackwardWeight, 0, 0},
                          Action{Kind::Reshard, 0, -1}, Action{Kind::Reduce, 0, -1}));
  EXPECT_THAT(schedule.ranks[1], ElementsAre(Action{Kind::ReceiveForward, 1, 0}, Action{Kind::Forward, 1, 0},
                                             Action{Kind::Backward, 1, 0}, Action{Kind::SendBackward, 1, 0}));
}

TEST(PipelineCsv, ReadsOverlappedPairsForwardFirst) {
  const Schedule schedule = parse_schedule_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1", "a.csv");
  EXPECT_THAT(schedule.ranks[0], ElementsAre(Action{Kind::Forward, 0, 0}, Action{Kind::Forward, 0, 1},
                                             Action{Kind::Backward, 0, 0}, Action{Kind::Backward, 0, 1}));
}

TEST(PipelineCsv, EveryScheduleRoundTrips) {
  for (const auto& one : titan::testing::pipeline_cases(3, 6))
    for (Schedule schedule : {one.make(), with_parameter_actions(with_communication(one.make()))}) {
      Schedule read = parse_schedule_csv(to_csv(schedule), "a.csv");
      read.name = schedule.name;
      EXPECT_EQ(read, schedule) << one.text();
    }
}

TEST(PipelineCsv, ErrorsNameLineAndColumn) {
  EXPECT_THAT(problem_of("0F0,0B0\n1F0, 1X0\n"), StartsWith("a.csv:2:6: '1X0' is no action"));
  for (const char* cell : {"F0",
                           "0F",
                           "0",
                           "0F0x",
                           "0F-1",
                           "-1F0",
                           "0f0",
                           "0UNSHARD0",
                           "0SEND_F",
                           "99999999999F0",
                           "(0F0;0B0)",
                           "(0F0)OVERLAP_F_B",
                           "(0B0;0F0)OVERLAP_F_B",
                           "(0F0;0I0)OVERLAP_F_B",
                           ")OVERLAP_F_B",
                           "(OVERLAP_F_B",
                           "0 F0",
                           "0F0;0B0",
                           "\"0F0\"",
                           "(((",
                           "0REDUCE_GRADS"})
    EXPECT_THAT(problem_of(std::string("0F0,") + cell), StartsWith("a.csv:1:5: '")) << cell;
  EXPECT_THAT(problem_of("0F0,0B0\n1F0,0F1\n"),
              StartsWith("a.csv:2:5: '0F1' is on rank 1, but stage 0 is on rank 0 (line 1)"));
  EXPECT_THAT(problem_of("0F0\n\n1F0\n"), StartsWith("a.csv:2:1: rank 1 has no actions"));
  EXPECT_THAT(problem_of("0F0\n2F0\n"), HasSubstr("stage 1 has no action"));
  EXPECT_THAT(problem_of("2000000F0"), HasSubstr("go up to 1048575"));
  EXPECT_THAT(problem_of("0F0,x,y"), ::testing::AllOf(HasSubstr("a.csv:1:5"), HasSubstr("a.csv:1:7")));
  for (const char* empty : {"", "\n\n", "  \r\n"})
    EXPECT_THAT(problem_of(empty), StartsWith("a.csv:1:1: no actions"));
}

// Damaged texts are either refused, or read as a schedule that can be checked.
TEST(PipelineCsv, ReadsOrRefusesDamagedTexts) {
  constexpr std::string_view kPieces = "0123456789FBIW,;()\r\n _SENDRCVUHAGOLP\"-x";
  const std::string text =
      to_csv(with_parameter_actions(with_communication(make_schedule("ZBVZeroBubble", 2, 4, 3))));
  std::mt19937 random(11);
  const auto below = [&](size_t end) { return std::uniform_int_distribution<size_t>(0, end - 1)(random); };
  int num_read = 0, num_refused = 0;
  for (int i = 0; i < 5000; ++i) {
    std::string damaged = text;
    for (size_t times = below(3) + 1; times > 0; --times) {
      const size_t at = below(damaged.size());
      if (below(3) == 0)
        damaged.erase(at, 1 + below(8));
      else
        damaged.insert(at, 1, kPieces[below(kPieces.size())]);
    }
    try {
      find_problems(parse_schedule_csv(damaged, "a.csv"));
      ++num_read;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("a.csv:"));
      ++num_refused;
    }
  }
  EXPECT_GT(num_read, 50);
  EXPECT_GT(num_refused, 1000);
}

TEST(PipelineCsv, RefusesAMissingFile) { EXPECT_THROW(read_schedule_csv("/nowhere/a.csv"), Error); }

}  // namespace
}  // namespace titan::pipeline
