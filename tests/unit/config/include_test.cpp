#include <gtest/gtest.h>

#include "sample_job.h"

namespace titan::config::sample {
namespace {

TEST(Include, LaterWinsAndPathsAreRelativeToTheIncludingFile) {
  ConfigFolder folder;
  folder.write("shared/base.toml", "include = [\"deep.json\"]\n[training]\nsteps = 1\nseq_len = 2\n");
  folder.write("shared/deep.json",
               R"({"training": {"steps": 7, "max_norm": 3.0}, "optimizer": {"groups": ["all"]}})");
  folder.write("b.toml", "[training]\nseq_len = 4\n[optimizer]\ngroups = [\"norm\"]\n");
  folder.write("a.toml", "include = [\"shared/base.toml\", \"b.toml\"]\n[training]\nglobal_batch_size = 8\n");
  Result result = load_sample({"a.toml", {"--training.max_norm", "9"}});
  ASSERT_EQ(result.problems, Problems{});
  EXPECT_EQ(result.job.training.steps, 1);
  EXPECT_EQ(result.job.training.seq_len, 4);
  EXPECT_EQ(result.job.training.global_batch_size, 8);
  EXPECT_EQ(result.job.training.max_norm, 9);
  EXPECT_EQ(result.job.optimizer.groups, StringList{"norm"}) << "lists are replaced whole";
  EXPECT_EQ(result.origins.origin_of("training.steps"), "shared/base.toml:3:1");
  EXPECT_EQ(result.origins.origin_of("training.seq_len"), "b.toml:2:1");
}

TEST(Include, CycleErrorPrintsTheChain) {
  ConfigFolder folder;
  folder.write("a.toml", "include = [\"sub/b.toml\"]\n");
  folder.write("sub/b.toml", "[training]\nsteps = 1\n");
  folder.write("sub/b.toml", "include = [\"../c.toml\"]\n");
  folder.write("c.toml", "include = [\"./sub/../a.toml\"]\n");
  EXPECT_EQ(load_sample({"a.toml", {}}).problems,
            Problems{"c.toml:1:1: include = [\"./sub/../a.toml\"]: circular include: "
                     "a.toml -> sub/b.toml -> c.toml -> a.toml"});
}

TEST(Include, WrongFileTypeErrorNamesTheIncludingFile) {
  ConfigFolder folder;
  folder.write("a.toml", "include = [\"base.yaml\"]\n");
  EXPECT_EQ(
      load_sample({"a.toml", {}}).problems,
      Problems{"a.toml:1:1: include = [\"base.yaml\"]: base.yaml: a config file ends in .toml or .json"});
}

TEST(Include, AcceptsTheSameFileTwice) {
  ConfigFolder folder;
  folder.write("base.toml", "[training]\nsteps = 3\n");
  folder.write("b.toml", "include = [\"base.toml\"]\n");
  folder.write("a.toml", "include = [\"b.toml\", \"base.toml\"]\n");
  EXPECT_EQ(load_sample({"a.toml", {}}).job.training.steps, 3);
}

TEST(Include, LimitsExponentialIncludes) {
  ConfigFolder folder;
  for (int i = 0; i < 30; ++i) {
    std::string next = "\"" + std::to_string(i + 1) + ".toml\"";
    folder.write(std::to_string(i) + ".toml", "include = [" + next + ", " + next + "]\n");
  }
  folder.write("30.toml", "");
  Problems problems = load_sample({"0.toml", {}}).problems;
  ASSERT_FALSE(problems.empty());
  EXPECT_NE(problems.front().find("more than 1000 included files"), std::string::npos) << problems.front();
  EXPECT_LT(problems.size(), 100u);
}

TEST(Include, ReportsProblemsOfAllFilesTogether) {
  ConfigFolder folder;
  folder.write("bad.toml", "[training\n");
  folder.write("base.toml", "[training]\nmax_norm = 0\nsteps = 0\n");
  folder.write("a.toml",
               "include = [\"none.toml\", \"bad.toml\", \"base.toml\"]\n[training]\nsteps = 5\nseq = 1\n");
  EXPECT_EQ(
      load_sample({"a.toml", {}}).problems,
      (Problems{"a.toml:1:1: include = [\"none.toml\", \"bad.toml\", \"base.toml\"]: cannot read none.toml: "
                "No such file or directory (ENOENT)",
                "bad.toml:1:10: not TOML: Error while parsing table header: expected ']', saw '\\n'",
                "base.toml:2:1: training.max_norm = 0: must be above 0",
                "a.toml:4:1: training.seq = 1: unknown key; did you mean 'training.seq_len'?"}));
}

TEST(Include, MustBeAListOfNames) {
  EXPECT_EQ(load_text("include = \"base.toml\"\n").problems,
            Problems{"a.toml:1:1: include = \"base.toml\": must be a list of file names"});
  EXPECT_EQ(load_text("include = [1]\n").problems,
            Problems{"a.toml:1:1: include = [1]: must be a list of file names"});
}

}  // namespace
}  // namespace titan::config::sample
