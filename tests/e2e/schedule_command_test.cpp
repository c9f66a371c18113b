// titan schedule as a user runs it.

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "e2e/training.h"

namespace titan::testing {
namespace {

CommandResult schedule(const Words& words) {
  const bool draws = std::find(words.begin(), words.end(), "--svg") != words.end();
  return run(Words{titan_program(), "schedule"} + words + (draws ? Words{} : Words{"--no-svg"}));
}

TEST(ScheduleCommand, PrintsTimelineAndFigures) {
  const CommandResult result = schedule({"--pp", "4", "--microbatches", "8", "--schedule", "zbvzerobubble"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("ZBVZeroBubble: 4 ranks, 8 stages, 8 micro-batches"),
                                HasSubstr("rank 3"), HasSubstr("7I0"), HasSubstr("makespan 51, bubble 5.9 %"),
                                HasSubstr("critical path: 0F0"), Not(HasSubstr("\033"))));
}

TEST(ScheduleCommand, AcceptsCostsPerStage) {
  const CommandResult result = schedule({"--pp", "2", "--microbatches", "2", "--forward", "1,2", "--input=2",
                                         "--weight", "0.5", "--communication", "0.25", "--loss", "1"});
  EXPECT_EQ(result.status, 0) << result.err;
  // 0F0 1, message 0.25, 1F0 1B0 1F1 1B1 of 3 and 2.5 each, message, 0B1 2.5.
  EXPECT_THAT(result.out, HasSubstr("makespan 15"));
}

TEST(ScheduleCommand, WritesAndReadsFiles) {
  const auto folder = fresh_folder("schedule");
  const std::string csv = folder / "a.csv", again = folder / "b.csv", svg = folder / "a.svg";
  const Words words = {"--schedule", "Interleaved1F1B", "--pp", "2", "--microbatches", "4"};
  const CommandResult first = schedule(words + Words{"--csv", csv, "--svg", svg, "--complete"});
  ASSERT_EQ(first.status, 0) << first.err;
  EXPECT_THAT(text_of(csv), AllOf(HasSubstr("0UNSHARD"), HasSubstr("2RECV_F3"), HasSubstr("3REDUCE_GRAD")));
  EXPECT_THAT(text_of(svg), AllOf(HasSubstr("<svg"), HasSubstr("2 ranks, 4 stages, 4 micro-batches")));
  const CommandResult second = schedule({"--from-csv", csv, "--csv", again});
  EXPECT_EQ(second.status, 0) << second.err;
  EXPECT_EQ(text_of(again), text_of(csv));
  EXPECT_EQ(second.out.substr(second.out.find('\n')), first.out.substr(first.out.find('\n')));
}

// In the current folder, if that is writable.
TEST(ScheduleCommand, DrawsTheTimelineByDefault) {
  const auto folder = fresh_folder("schedule");
  const auto there = [&](const std::string& before) {
    return run({"/bin/sh", "-c",
                "cd " + folder.string() + " && " + before + titan_program() +
                    " schedule --pp 4 --microbatches 8 --schedule ZBVZeroBubble"});
  };
  const CommandResult drawn = there("");
  EXPECT_EQ(drawn.status, 0) << drawn.err;
  EXPECT_THAT(drawn.err, HasSubstr("wrote the timeline to schedule.svg"));
  EXPECT_TRUE(text_of(folder / "schedule.svg") ==
              text_of(source_file("docs/images/pipeline/ZBVZeroBubble.svg")));
  const CommandResult taken = there("rm schedule.svg && mkdir schedule.svg && ");
  EXPECT_EQ(taken.status, 0) << taken.err;
  EXPECT_THAT(taken.err, HasSubstr("cannot draw the timeline: "));
  EXPECT_THAT(taken.out, HasSubstr("bubble 5.9 %"));
  const CommandResult large = run({titan_program(), "schedule", "--microbatches", "8192"});
  EXPECT_EQ(large.status, 0) << large.err;
  EXPECT_THAT(large.err, HasSubstr("use --svg FILE to draw it anyway"));
}

TEST(ScheduleCommand, SimulatesForwardOnlyAndRepeatedSchedules) {
  const CommandResult forward = schedule({"--pp", "2", "--microbatches", "3", "--forward-only"});
  EXPECT_THAT(forward.out, AllOf(HasSubstr("1F2"), Not(HasSubstr("B0")), HasSubstr("makespan 4")));
  const CommandResult twice =
      schedule({"--schedule", "GPipe", "--pp", "2", "--microbatches", "3", "--times", "2"});
  EXPECT_THAT(twice.out, AllOf(HasSubstr("6 micro-batches"), HasSubstr("1B5")));
}

TEST(ScheduleCommand, ListsAllSchedules) {
  const CommandResult result = schedule({"--list"});
  EXPECT_EQ(result.status, 0) << result.err;
  for (const char* name : {"GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
                           "ZBVZeroBubble", "DualPipeV"})
    EXPECT_THAT(result.out, HasSubstr(std::string("| ") + name + " |"));
  EXPECT_THAT(schedule({"--list", "--microbatches", "3"}).out, HasSubstr("| no | no | - | - |"));
}

TEST(ScheduleCommand, HelpNamesEveryOption) {
  const CommandResult result = schedule({"--help"});
  EXPECT_EQ(result.status, 0);
  for (const char* option : {"--schedule NAME", "--pp N", "--microbatches N", "--stages N", "--times N",
                             "--forward-only", "--complete", "--first-contact", "--list", "--forward T",
                             "--input T", "--weight T", "--communication T", "--loss T", "--from-csv FILE",
                             "--csv FILE", "--svg FILE", "--no-svg", "--max-live N"})
    EXPECT_THAT(result.out, HasSubstr(option));
}

TEST(ScheduleCommand, ExplainsWrongInput) {
  const auto wrong = [](const Words& words) {
    const CommandResult result = schedule(words);
    EXPECT_EQ(result.status, 2) << result.out;
    return result.err;
  };
  EXPECT_THAT(wrong({"--schedule", "1f1"}),
              AllOf(HasSubstr("unknown pipeline schedule '1f1'"), HasSubstr("'1F1B'")));
  EXPECT_THAT(wrong({"--pp", "4", "--microbatches", "3"}), HasSubstr("at least 4 micro-batches, not 3"));
  EXPECT_THAT(wrong({"--pp", "0"}), HasSubstr("--pp"));
  EXPECT_THAT(wrong({"--schedule", "GPipe", "--max-live", "7"}), HasSubstr("at most 7 are allowed"));
  EXPECT_THAT(wrong({"--schedule", "GPipe", "--pp", "2", "--microbatches", "1", "--first-contact"}),
              HasSubstr("(0RECV_B0) connects to rank 1"));
  EXPECT_EQ(schedule({"--pp", "2", "--first-contact"}).status, 0);
  EXPECT_THAT(wrong({"--forward-only", "--max-live", "7"}), HasSubstr("excludes"));
  EXPECT_THAT(wrong({"--svg", "a.svg", "--no-svg"}), HasSubstr("excludes"));
  EXPECT_THAT(wrong({"--microbatches", "8", "--times", "1000000"}), HasSubstr("at most 4194304 forwards"));
  EXPECT_THAT(wrong({"--forward", "-1"}), HasSubstr("'forward' of 0 or more"));
  EXPECT_THAT(wrong({"--nonsense"}), HasSubstr("titan schedule --help"));
  const auto path = fresh_folder("schedule") / "broken.csv";
  std::ofstream(path) << "0F0,0B0\n1F0,1X0\n";
  EXPECT_THAT(wrong({"--from-csv", path.string()}), HasSubstr("broken.csv:2:5: '1X0' is no action"));
  std::ofstream(path) << "0F0,0B0\n1F0\n";
  EXPECT_THAT(wrong({"--from-csv", path.string()}), HasSubstr("rank 1: 1B0 (or 1I0 and 1W0) is missing"));
  EXPECT_THAT(wrong({"--from-csv", path.string(), "--pp", "2"}), HasSubstr("excludes"));
}

TEST(ScheduleCommand, DocumentsAreUpToDate) {
  EXPECT_THAT(text_of(source_file("docs/pipeline_schedules.md")), HasSubstr(schedule({"--list"}).out))
      << "run scripts/update_docs.sh";
  const auto drawn = fresh_folder("schedule") / "drawn.svg";
  for (const char* name : {"GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
                           "ZBVZeroBubble", "DualPipeV"}) {
    ASSERT_EQ(schedule({"--schedule", name, "--pp", "4", "--microbatches", "8", "--svg", drawn}).status, 0)
        << name;
    EXPECT_TRUE(text_of(drawn) == text_of(source_file("docs/images/pipeline/" + std::string(name) + ".svg")))
        << name << ": run scripts/update_docs.sh";
  }
}

}  // namespace
}  // namespace titan::testing
