#include "cli/checkpoint/commands.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "titan/core/error.h"
#include "unit/cli/words.h"

namespace titan::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(CheckpointArguments, ConvertTakesWordsInAnyOrder) {
  const auto arguments =
      parse_convert_arguments({"--dtype", "bfloat16", "a", "--shard-gb=0.5", "b", "--config", "run.toml"});
  EXPECT_EQ(arguments.from, "a");
  EXPECT_EQ(arguments.to, "b");
  EXPECT_EQ(arguments.config, "run.toml");
  EXPECT_EQ(arguments.dtype, "bfloat16");
  EXPECT_EQ(arguments.shard_gb, 0.5);
}

TEST(CheckpointArguments, ConvertRefusesWrongWords) {
  EXPECT_THAT(problem_of(parse_convert_arguments, {"a"}), HasSubstr("TO is required"));
  EXPECT_THAT(problem_of(parse_convert_arguments, {"a", "b", "--dtype", "int8"}), HasSubstr("int8"));
  EXPECT_THAT(problem_of(parse_convert_arguments, {"a", "b", "--shard-gb", "0"}), HasSubstr("--shard-gb"));
}

TEST(CheckpointArguments, AreParsedForEachCommand) {
  const auto ls = parse_ls_arguments({"--json", "runs/a"});
  EXPECT_EQ(ls.folder, "runs/a");
  EXPECT_TRUE(ls.json);
  const auto info = parse_info_arguments({"step-1", "--stats", "--tensors", "^model\\."});
  EXPECT_EQ(info.folder, "step-1");
  EXPECT_EQ(info.tensors, "^model\\.");
  EXPECT_TRUE(info.stats);
  EXPECT_FALSE(info.json);
  EXPECT_EQ(parse_verify_arguments({"step-1", "--threads=3"}).num_threads, 3);
  const auto diff = parse_diff_arguments({"a", "--tensors=w", "b"});
  EXPECT_EQ(diff.a, "a");
  EXPECT_EQ(diff.b, "b");
  EXPECT_EQ(diff.tensors, "w");
  const auto prune = parse_prune_arguments({"a", "--keep", "2", "--dry-run", "--force"});
  EXPECT_EQ(prune.keep, 2);
  EXPECT_TRUE(prune.dry_run);
  EXPECT_TRUE(prune.force);
}

TEST(CheckpointArguments, NameWhatIsMissingOrWrong) {
  EXPECT_THAT(problem_of(parse_ls_arguments, {}),
              AllOf(HasSubstr("FOLDER is required"), HasSubstr("titan checkpoint ls --help")));
  EXPECT_THAT(problem_of(parse_verify_arguments, {"a", "--threads", "0"}), HasSubstr("--threads"));
  EXPECT_THAT(problem_of(parse_diff_arguments, {"a"}), HasSubstr("B is required"));
  EXPECT_THAT(problem_of(parse_prune_arguments, {"a"}), HasSubstr("--keep is required"));
  EXPECT_THAT(problem_of(parse_prune_arguments, {"a", "--keep", "0"}), HasSubstr("--keep"));
  EXPECT_THAT(problem_of(parse_info_arguments, {"a", "b"}), HasSubstr("titan checkpoint info --help"));
}

TEST(CheckpointArguments, ListTheCommands) {
  EXPECT_THAT(problem_of(checkpoint_command, {}),
              HasSubstr("needs a command: ls, info, verify, diff, prune, convert"));
  EXPECT_THAT(problem_of(checkpoint_command, {"verfy", "a"}),
              HasSubstr("unknown command 'verfy'; did you mean 'verify'?"));
}

TEST(CheckpointArguments, FilterTensorsByARegularExpression) {
  EXPECT_TRUE(tensor_filter("")("model.w"));
  EXPECT_TRUE(tensor_filter("layers\\.[01]\\.")("model.layers.1.w"));
  EXPECT_FALSE(tensor_filter("layers\\.[01]\\.")("model.layers.10.w"));
  EXPECT_THROW(tensor_filter("layers("), ConfigError);
}

}  // namespace
}  // namespace titan::cli
