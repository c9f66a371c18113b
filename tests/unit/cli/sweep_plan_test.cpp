#include "cli/sweep.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "titan/core/error.h"

namespace titan::cli::sweep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Plan plan_of(const std::string& toml) {
  const auto file = std::filesystem::path(::testing::TempDir()) / "sweep_plan.toml";
  std::ofstream(file) << toml;
  return read_plan(file);
}

std::vector<std::string> names_of(const Plan& plan) {
  std::vector<std::string> names;
  for (const Run& run : plan.runs) names.push_back(run.name);
  return names;
}

std::vector<std::string> problems_of(const std::string& toml) {
  try {
    plan_of(toml);
  } catch (const ConfigError& error) {
    return error.problems();
  }
  return {};
}

TEST(SweepPlan, RunsEveryCombinationOfAGrid) {
  const Plan plan = plan_of(
      "base = \"configs/a.toml\"\nnproc = 2\n[set]\ntraining.steps = 7\n[grid]\noptimizer.lr = [1e-3, 3e-4]\n"
      "model.args.n_layers = [2, 4]\n");
  EXPECT_THAT(names_of(plan), ElementsAre("lr=0.001,n_layers=2", "lr=0.001,n_layers=4", "lr=3e-4,n_layers=2",
                                          "lr=3e-4,n_layers=4"));
  EXPECT_EQ(plan.num_ranks, 2);
  EXPECT_EQ(plan.folder, "outputs/sweep_plan");
  EXPECT_EQ(plan.base, ::testing::TempDir() + "configs/a.toml");
  EXPECT_THAT(plan.setting_words(plan.runs[1]),
              ElementsAre("--training.steps=7", "--optimizer.lr=0.001", "--model.args.n_layers=4",
                          "--job.dump_folder=outputs/sweep_plan/lr=0.001,n_layers=4"));
}

TEST(SweepPlan, ReadsNamedRunsAndAllKindsOfValues) {
  const Plan plan = plan_of(
      "folder = \"runs\"\n[run.plain]\n[run.\"two words\"]\ncheckpoint.enable = true\n"
      "checkpoint.exclude_from_loading = [\"optimizer\", \"rng\"]\nmodel.name = \"llama3\"\n");
  EXPECT_THAT(names_of(plan), ::testing::UnorderedElementsAre("plain", "two words"));
  for (const sweep::Run& run : plan.runs)
    if (run.name == "two words")
      EXPECT_THAT(run.settings, ElementsAre(Setting{"checkpoint.enable", "true"},
                                            Setting{"checkpoint.exclude_from_loading", "optimizer,rng"},
                                            Setting{"model.name", "llama3"}));
}

TEST(SweepPlan, RunsEachNamedRunAtEachGridPoint) {
  const Plan plan = plan_of(
      "[set]\noptimizer.lr = 1.0\n[grid]\noptimizer.lr = [2.0, 3.0]\n[run.a]\noptimizer.lr = "
      "4.0\n[run.b]\ntraining.steps = 5\n");
  EXPECT_THAT(names_of(plan), ElementsAre("a,lr=2.0", "a,lr=3.0", "b,lr=2.0", "b,lr=3.0"));
  EXPECT_EQ(plan.runs[0].settings.back(), (Setting{"optimizer.lr", "2.0"}));
}

TEST(SweepPlan, NamesAxesWithTheSameEndInFull) {
  const Plan plan = plan_of(
      "[grid]\ntraining.seq_len = [8]\nvalidation.seq_len = [16]\ntraining.dataset_path = [\"a/b\", "
      "\"a_b\"]\n");
  EXPECT_THAT(names_of(plan), ElementsAre("training.seq_len=8,validation.seq_len=16,dataset_path=a_b",
                                          "training.seq_len=8,validation.seq_len=16,dataset_path=a_b#2"));
}

// --only and job arrays use the order of the file.
TEST(SweepPlan, KeepsTheOrderOfTheFile) {
  EXPECT_THAT(names_of(plan_of(
                  "[run.zebra]\n[run.ape]\ntraining.steps = 2\n[run.bear]\n[run.cat.optimizer]\nlr = 1.0\n")),
              ElementsAre("zebra", "ape", "bear", "cat"));
}

TEST(SweepPlan, MakesNamesValidAsFolders) {
  for (const char* name : {"", ".", ".."})
    EXPECT_THAT(problems_of(std::string("[run.\"") + name + "\"]\noptimizer.lr = 1.0\n"),
                ElementsAre(HasSubstr("a run's name must be valid as the name of its folder")))
        << name;
  // Names that are taken, and a cut within a multi-byte character.
  EXPECT_THAT(names_of(plan_of("[run.\"a/b#2\"]\n[run.\"a/b\"]\n[run.\"a_b\"]\n")),
              ElementsAre("a_b#2", "a_b", "a_b#3"));
  std::string longest(119, 'x');
  EXPECT_THAT(names_of(plan_of("[run.\"" + longest + "\u00e4\u00e4\"]\n")), ElementsAre(longest));
}

TEST(SweepPlan, ReportsAllProblemsOfAFile) {
  EXPECT_THAT(problems_of("[set]\ntraining.steps = 1\n"),
              ElementsAre(HasSubstr("it has neither a [grid] nor a [run.NAME]")));
  EXPECT_THAT(problems_of("gird = 1\nbase = 3\nnproc = 0\n[grid]\noptimizer.lr = 1e-3\ntraining.steps = [2, "
                          "2]\njob.dump_folder = [\"a\"]\n"),
              ElementsAre(HasSubstr("sweep_plan.toml:1:1: gird: unknown"), HasSubstr("base: must be a path"),
                          HasSubstr("nproc: must be"), HasSubstr("optimizer.lr: must be a list"),
                          HasSubstr("lists a value twice"), HasSubstr("is set by the sweep itself")));
  EXPECT_THAT(problems_of("run = 3\n[grid]\na.b = [1]\n"), ElementsAre(HasSubstr("[run.NAME]")));
}

}  // namespace
}  // namespace titan::cli::sweep
