#include "titan/parallel/pipeline_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "titan/core/error.h"
#include "unit/parallel/pipeline_cases.h"

namespace titan::pipeline {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using titan::testing::pipeline_cases;
using titan::testing::PipelineCase;

std::vector<std::filesystem::path> golden_files(bool complete) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(TITAN_SOURCE_DIR) + "/tests/data/schedules"))
    if (entry.path().extension() == ".csv" &&
        entry.path().stem().string().starts_with("complete_") == complete)
      files.push_back(entry.path());
  return files;
}

// "ZBVZeroBubble_4x8x8" or "complete_ZBVZeroBubble_4x8x8"
PipelineCase case_of(const std::filesystem::path& file) {
  std::string stem = file.stem().string();
  if (stem.starts_with("complete_")) stem = stem.substr(9);
  const size_t end = stem.find('_');
  PipelineCase result{.name = stem.substr(0, end)};
  EXPECT_EQ(std::sscanf(stem.c_str() + end, "_%dx%dx%d", &result.num_ranks, &result.num_stages,
                        &result.num_micro_batches),
            3)
      << stem;
  return result;
}

std::vector<Action> without_communication(std::vector<Action> actions) {
  std::erase_if(actions, [](const Action& action) { return is_communication(action.kind); });
  return actions;
}

template <class Call>
std::string problem_of(const Call& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no problem";
}

std::string problem_of_making(const std::string& name, int ranks, int stages, int micro_batches) {
  return problem_of([&] { make_schedule(name, ranks, stages, micro_batches); });
}

std::vector<int> order_of(const Schedule& schedule, int rank, Action::Kind kind, int stage) {
  std::vector<int> micro_batches;
  for (const Action& action : schedule.ranks[rank])
    if (action.kind == kind && action.stage == stage) micro_batches.push_back(action.micro_batch);
  return micro_batches;
}

TEST(PipelineGenerators, EqualPyTorchActionForAction) {
  const auto files = golden_files(false);
  ASSERT_GE(files.size(), 30u);
  for (const auto& file : files) {
    const Schedule theirs = read_schedule_csv(file), ours = case_of(file).make();
    EXPECT_EQ(ours.rank_of_stage, theirs.rank_of_stage) << file;
    EXPECT_EQ(ours.ranks, theirs.ranks) << file;
  }
}

TEST(PipelineGenerators, ParameterActionsEqualPyTorch) {
  const auto files = golden_files(true);
  ASSERT_GE(files.size(), 4u);
  for (const auto& file : files) {
    const Schedule theirs = read_schedule_csv(file), ours = with_parameter_actions(case_of(file).make());
    EXPECT_TRUE(find_problems(theirs).empty())
        << file << " " << to_string(find_problems(theirs).front(), theirs);
    for (int rank = 0; rank < ours.num_ranks(); ++rank)
      EXPECT_EQ(ours.ranks[rank], without_communication(theirs.ranks[rank])) << file;
  }
}

TEST(PipelineGenerators, EveryScheduleRunsAtEveryAllowedCount) {
  const auto cases = pipeline_cases();
  ASSERT_GT(cases.size(), 500u);
  for (const PipelineCase& one : cases) {
    const Schedule schedule = one.make();
    const auto problems = find_problems(schedule);
    EXPECT_TRUE(problems.empty()) << one.text() << ": " << to_string(problems.front(), schedule);
    EXPECT_EQ(schedule.num_ranks(), one.num_ranks);
  }
}

TEST(PipelineGenerators, TraitsMatchTheSchedules) {
  for (const PipelineCase& one : pipeline_cases(4, 9)) {
    const ScheduleTraits& traits = schedule_traits(one.name);
    if (traits.splits_backward) continue;
    for (const auto& actions : one.make().ranks)
      for (const Action& action : actions)
        EXPECT_TRUE(action.kind == Action::Kind::Forward || action.kind == Action::Kind::Backward)
            << one.text();
  }
  // Twice the micro-batches need the same activations, or more.
  for (const ScheduleTraits& traits : all_schedule_traits()) {
    const int stages = default_num_stages(traits, 4);
    CheckOptions limit{.max_live_activations = 16};
    EXPECT_EQ(find_problems(make_schedule(traits.name, 4, stages, 64), limit).empty(), !traits.memory_grows)
        << traits.name;
  }
}

TEST(PipelineGenerators, NamesIgnoreCase) {
  EXPECT_THAT(schedule_names(), ElementsAre("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS",
                                            "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"));
  EXPECT_EQ(make_schedule("zbvzerobubble", 2, 4, 4).name, "ZBVZeroBubble");
  EXPECT_EQ(schedule_traits("gPIPE").name, "GPipe");
  EXPECT_THAT(problem_of([] { schedule_traits("1F1"); }),
              AllOf(HasSubstr("'1F1'"), HasSubstr("did you mean '1F1B'"), HasSubstr("'DualPipeV'")));
}

TEST(PipelineGenerators, RefusesWrongCountsAndNamesValidOnes) {
  EXPECT_THAT(problem_of_making("GPipe", 4, 8, 8), HasSubstr("one stage per rank, 4 in total"));
  EXPECT_THAT(problem_of_making("1F1B", 4, 4, 3),
              AllOf(HasSubstr("at least 4 micro-batches"), HasSubstr("not 3")));
  EXPECT_THAT(problem_of_making("Interleaved1F1B", 4, 4, 8), HasSubstr("a multiple of 4, at least 8"));
  EXPECT_THAT(problem_of_making("LoopedBFS", 4, 10, 8), HasSubstr("a multiple of 4, at least 8"));
  EXPECT_THAT(problem_of_making("Interleaved1F1B", 2, 4, 5),
              AllOf(HasSubstr("2 rounds"), HasSubstr("4 or 6 would do")));
  EXPECT_THAT(problem_of_making("InterleavedZeroBubble", 4, 8, 9), HasSubstr("8 or 10 would do"));
  EXPECT_THAT(problem_of_making("ZBVZeroBubble", 4, 12, 8),
              HasSubstr("exactly two stages per rank, 8 in total"));
  EXPECT_THAT(problem_of_making("DualPipeV", 4, 8, 7), HasSubstr("at least 8 micro-batches"));
  EXPECT_THAT(problem_of_making("GPipe", 0, 0, 8), HasSubstr("1 or more pipeline ranks"));
  EXPECT_THAT(problem_of_making("GPipe", 4, 4, 0), HasSubstr("1 or more micro-batches"));
}

TEST(PipelineGenerators, MapStagesToRanks) {
  EXPECT_THAT(loop_stage_map(3, 7), ElementsAre(0, 1, 2, 0, 1, 2, 0));
  EXPECT_THAT(v_stage_map(3, 9), ElementsAre(0, 1, 2, 2, 1, 0, 0, 1, 2));
  EXPECT_EQ(stage_map(schedule_traits("DualPipeV"), 2, 4), v_stage_map(2, 4));
  EXPECT_EQ(stage_map(schedule_traits("LoopedBFS"), 2, 4), loop_stage_map(2, 4));
}

TEST(PipelineGenerators, ForwardOnlyRunsOnAnyMap) {
  const std::vector<std::vector<int>> maps = {
      {0}, loop_stage_map(4, 4), loop_stage_map(3, 12), v_stage_map(4, 8), {1, 0, 0, 2, 1, 1}, {2, 1, 0}};
  for (const std::vector<int>& map : maps)
    for (int micro_batches : {1, 2, 7}) {
      const Schedule schedule = make_forward_only_schedule(map, micro_batches);
      EXPECT_FALSE(has_backward(schedule));
      EXPECT_EQ(schedule.rank_of_stage, map);
      EXPECT_TRUE(find_problems(schedule, {.purpose = Purpose::Evaluation}).empty());
      EXPECT_TRUE(find_problems(with_parameter_actions(with_communication(schedule)),
                                {.purpose = Purpose::Evaluation, .channel_capacity = 0})
                      .empty());
      EXPECT_EQ(order_of(schedule, map[0], Action::Kind::Forward, 0).size(),
                static_cast<size_t>(micro_batches));
    }
  EXPECT_THROW(make_forward_only_schedule({0, 2}, 1), Error);
  EXPECT_THROW(make_forward_only_schedule({}, 1), Error);
  EXPECT_THROW(make_forward_only_schedule({0}, 0), Error);
}

TEST(PipelineGenerators, RepeatedSchedulesRunWithoutMoreActivations) {
  for (const ScheduleTraits& traits : all_schedule_traits()) {
    const Schedule once = make_schedule(traits.name, 2, default_num_stages(traits, 2), 4);
    const Schedule thrice = repeat(once, 3);
    EXPECT_EQ(thrice.num_micro_batches, 12);
    EXPECT_TRUE(find_problems(thrice, {.max_live_activations = 8}).empty()) << traits.name;
    // Whether completed or repeated first, the schedule runs and reduces once.
    const Schedule complete = repeat(with_parameter_actions(with_communication(once)), 3);
    EXPECT_TRUE(find_problems(complete, {.channel_capacity = 0}).empty()) << traits.name;
    EXPECT_EQ(
        std::count(complete.ranks[0].begin(), complete.ranks[0].end(), Action{Action::Kind::Reduce, 0, -1}),
        1);
  }
  EXPECT_EQ(repeat(make_schedule("1F1B", 2, 2, 2), 1), make_schedule("1F1B", 2, 2, 2));
  EXPECT_THROW(repeat(Schedule{}, 0), Error);
  EXPECT_THROW(repeat(make_schedule("1F1B", 2, 2, 4), 1 << 30), Error);
}

}  // namespace
}  // namespace titan::pipeline
