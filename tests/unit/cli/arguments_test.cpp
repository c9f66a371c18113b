// The words after a command's name.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/train.h"
#include "titan/core/error.h"
#include "unit/cli/words.h"

namespace titan::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(TrainArguments, SeparatesConfigOptionsAndSettings) {
  auto arguments = parse_train_arguments({"--nproc", "2", "a.toml", "--training.steps", "5", "--log-rank=all",
                                          "--training.global_batch_size", "-1", "--debug.deterministic"});
  EXPECT_EQ(arguments.config, "a.toml");
  EXPECT_EQ(arguments.num_ranks, 2);
  EXPECT_EQ(arguments.log_rank, "all");
  EXPECT_EQ(arguments.overrides,
            (Words{"--training.steps", "5", "--training.global_batch_size", "-1", "--debug.deterministic"}));
}

TEST(TrainArguments, KeepsValuesWithTheirSettingsWithoutAConfig) {
  auto arguments = parse_train_arguments(
      {"--training.steps", "5", "--optimizer.lr", "-1e-3", "--job.description=--x = [y]", "--log-rank", "0"});
  EXPECT_EQ(arguments.config, "");
  EXPECT_EQ(arguments.overrides,
            (Words{"--training.steps", "5", "--optimizer.lr", "-1e-3", "--job.description=--x = [y]"}));
}

TEST(TrainArguments, AcceptsFlagsAfterSettings) {
  auto arguments = parse_train_arguments({"a.toml", "--training.steps=5", "--print-config", "--nproc=3"});
  EXPECT_TRUE(arguments.print_config);
  EXPECT_EQ(arguments.num_ranks, 3);
  EXPECT_EQ(arguments.overrides, Words{"--training.steps=5"});
}

TEST(TrainArguments, UsesTheLastOfRepeatedOptions) {
  EXPECT_EQ(parse_train_arguments({"a.toml", "-n", "2", "--nproc", "3", "-n4"}).num_ranks, 4);
}

TEST(TrainArguments, AcceptsTorchTitansNameOfTheConfigFile) {
  EXPECT_EQ(parse_train_arguments({"--job.config_file", "a.toml"}).config, "a.toml");
  EXPECT_THROW(parse_train_arguments({"a.toml", "--job.config_file=b.toml"}), ConfigError);
}

TEST(TrainArguments, RefusesTorchTitansConfigsInPython) {
  for (const Words& words : {Words{"--module", "llama3", "--config", "llama3_8b"}, Words{"llama3_8b.py"}})
    EXPECT_THAT(problem_of(parse_train_arguments, words), HasSubstr("docs/from_torchtitan.md"));
}

TEST(TrainArguments, RefusesWrongWords) {
  EXPECT_THAT(problem_of(parse_train_arguments, {"a.toml", "b.toml"}),
              AllOf(HasSubstr("a.toml"), HasSubstr("b.toml")));
  EXPECT_THAT(problem_of(parse_train_arguments, {"--nprocs", "2"}),
              AllOf(HasSubstr("titan train: unknown option '--nprocs'; did you mean '--nproc'?"),
                    HasSubstr("titan train --help")));
  EXPECT_THAT(problem_of(parse_train_arguments, {"a.toml", "--training.steps", "1", "--print-confg"}),
              HasSubstr("did you mean '--print-config'?"));
  for (const char* count : {"zero", "0", "-1", "2x", "1.5", "99999999999"})
    EXPECT_THAT(problem_of(parse_train_arguments, {"--nproc", count}),
                AllOf(HasSubstr("--nproc"), HasSubstr(count), HasSubstr("1 to 65536")));
  EXPECT_THAT(problem_of(parse_train_arguments, {"a.toml", "--nproc"}),
              HasSubstr("--nproc: 1 required N missing"));
  EXPECT_THAT(problem_of(parse_train_arguments, {"-x", "a.toml"}), HasSubstr("unknown option '-x'"));
}

TEST(TrainArguments, RefusesAnAmbiguousValueThatBeginsWithADash) {
  EXPECT_EQ(parse_train_arguments({"a.toml", "--job.description", "-x"}).overrides,
            (Words{"--job.description", "-x"}));
  for (const char* value : {"-n", "-n5", "-hello"}) {
    EXPECT_THAT(problem_of(parse_train_arguments, {"a.toml", "--job.description", value}),
                HasSubstr(str("Write --job.description=", value)));
    const std::string written = str("--job.description=", value);
    EXPECT_EQ(parse_train_arguments({"a.toml", written}).overrides, Words{written});
  }
  EXPECT_NE(help_of(parse_train_arguments, {"a.toml", "--debug.deterministic", "-h"}), "");
  EXPECT_EQ(parse_train_arguments({"a.toml", "--debug.deterministic", "--nproc", "2"}).num_ranks, 2);
}

TEST(TrainArguments, ListsEveryOptionInTheHelp) {
  const std::string help = help_of(parse_train_arguments, {"a.toml", "--training.steps", "1", "--help"});
  for (const char* word :
       {"usage: titan train [CONFIG] [options] [--section.key value ...]", "-h,--help", "-n,--nproc N",
        "--log-rank RANKS", "--print-config", "CONFIG is a TOML or JSON file"})
    EXPECT_THAT(help, HasSubstr(word));
  EXPECT_EQ(help_of(parse_train_arguments, {"a.toml"}), "");
}

TEST(LaunchArguments, LeavesTheProgramsWordsAlone) {
  const Words program = {"prog", "-n", "3", "--log-rank", "--", "--help", "-1", ""};
  for (const Words& before : {Words{"-n", "2", "--log-rank", "all", "--"}, Words{"-n", "2", "--log-rank=all"},
                              Words{"--nproc=2", "--log-rank", "all"}}) {
    Words words = before;
    words.insert(words.end(), program.begin(), program.end());
    const LaunchOptions options = parse_launch_arguments(words);
    EXPECT_EQ(options.num_ranks, 2);
    EXPECT_EQ(options.log_rank, "all");
    EXPECT_EQ(options.command, program);
  }
  EXPECT_EQ(parse_launch_arguments({"-n", "1", "--", "--prog", "--"}).command, (Words{"--prog", "--"}));
}

TEST(LaunchArguments, ReadsFinalCodes) {
  const auto codes = [](const Words& words) {
    return parse_launch_arguments(Words{"-n", "2"} + words + Words{"--", "prog"}).restarts.final_codes;
  };
  EXPECT_EQ(codes({}), (std::set<int>{2, 3}));
  EXPECT_EQ(codes({"--final-codes", "1,64,255"}), (std::set<int>{1, 64, 255}));
  EXPECT_EQ(codes({"--final-codes=none"}), std::set<int>());
  for (const char* wrong : {"0", "256", "-1", "2;3", "two", "2,,3", "2,x"})
    EXPECT_THAT(
        problem_of(parse_launch_arguments, {"-n", "2", std::string("--final-codes=") + wrong, "prog"}),
        AllOf(HasSubstr(wrong), HasSubstr("1 to 255")))
        << wrong;
}

TEST(LaunchArguments, RefusesWrongWords) {
  EXPECT_THAT(problem_of(parse_launch_arguments, {"-n", "2"}), HasSubstr("the program to start is missing"));
  EXPECT_THAT(problem_of(parse_launch_arguments, {"-n", "2", "--"}),
              HasSubstr("the program to start is missing"));
  EXPECT_THAT(problem_of(parse_launch_arguments, {"prog"}), HasSubstr("--nproc is required"));
  EXPECT_THAT(problem_of(parse_launch_arguments, {"-n", "two", "prog"}), HasSubstr("two"));
  EXPECT_THAT(problem_of(parse_launch_arguments, {"-n", "2", "--log-ranks", "all", "prog"}),
              HasSubstr("unknown option '--log-ranks'; did you mean '--log-rank'?"));
}

TEST(LaunchArguments, PrintsHelp) {
  const std::string help = help_of(parse_launch_arguments, {"-h"});
  for (const char* word : {"usage: titan launch -n N", "-n,--nproc N", "--log-rank RANKS", "exit code"})
    EXPECT_THAT(help, HasSubstr(word));
}

TEST(PlanArguments, RefusesWhatACalibrationDoesNotUse) {
  const Words calibrate = {"--calibrate", "a.toml"};
  EXPECT_EQ(problem_of(parse_plan_arguments, calibrate + Words{"--world", "2", "--device", "h100"}),
            "no problem");
  for (const Words& more : {Words{"--output", "b.toml"},
                            {"--svg", "a.svg"},
                            {"--timeline", "a.json"},
                            {"--max-tp", "2"},
                            {"--seconds", "3"},
                            {"--for-run", "7"},
                            {"--kernels", "eager"},
                            {"--search"},
                            {"--json"},
                            {"config.toml"},
                            {"--training.steps=5"}})
    EXPECT_THAT(problem_of(parse_plan_arguments, calibrate + more), HasSubstr("--calibrate plans nothing"))
        << more[0];
}

TEST(PlanArguments, ARunsOwnOptionIsNotForUsers) {
  const Words words = {"a.toml", "--world", "2", "--for-run", "7"};
  EXPECT_EQ(parse_plan_arguments(words).for_run, 7);
  EXPECT_THAT(problem_of(parse_plan_arguments, words + Words{"--search"}), HasSubstr("--for-run"));
  const std::string help = help_of(parse_plan_arguments, {"--help"});
  EXPECT_THAT(help, AllOf(HasSubstr("--search"), Not(HasSubstr("--for-run"))));
}

TEST(CompareArguments, NeedsTwoRuns) {
  EXPECT_THAT(problem_of(compare_command, {"no_run", "b", "c"}), HasSubstr("no_run holds no run"));
  EXPECT_THAT(problem_of(compare_command, {"a"}), HasSubstr("at least two runs"));
  EXPECT_THAT(problem_of(compare_command, {"a", "--all", "b"}), HasSubstr("unknown option '--all'"));
  EXPECT_THAT(help_of(compare_command, {"--help"}), HasSubstr("usage: titan compare RUN RUN ..."));
}

TEST(DocsArguments, TakesOnePage) {
  ::testing::internal::CaptureStdout();
  docs_command({"config"});
  EXPECT_THAT(::testing::internal::GetCapturedStdout(), HasSubstr("# Settings"));
  EXPECT_THAT(problem_of(docs_command, {"confg"}), AllOf(HasSubstr("confg"), HasSubstr("torchtitan-keys")));
  EXPECT_THAT(problem_of(docs_command, {}), HasSubstr("PAGE is required"));
  EXPECT_THAT(help_of(docs_command, {"-h"}), HasSubstr("usage: titan docs"));
}

}  // namespace
}  // namespace titan::cli
