#include "cli/train_arguments.h"

#include <gtest/gtest.h>

#include "titan/core/error.h"

namespace titan::cli {
namespace {

using Words = std::vector<std::string>;

TEST(TrainArguments, ConfigOptionsAndSettings) {
  auto arguments = parse_train_arguments({"--nproc", "2", "a.toml", "--training.steps", "5", "--log-rank=all",
                                          "--training.global_batch_size", "-1", "--debug.deterministic"});
  EXPECT_EQ(arguments.config, "a.toml");
  EXPECT_EQ(arguments.num_ranks, 2);
  EXPECT_EQ(arguments.log_rank, "all");
  EXPECT_EQ(arguments.overrides,
            (Words{"--training.steps", "5", "--training.global_batch_size", "-1", "--debug.deterministic"}));
}

TEST(TrainArguments, FlagsMayComeLast) {
  auto arguments = parse_train_arguments({"a.toml", "--training.steps=5", "--print-config", "--nproc=3"});
  EXPECT_TRUE(arguments.print_config);
  EXPECT_EQ(arguments.num_ranks, 3);
  EXPECT_EQ(arguments.overrides, Words{"--training.steps=5"});
}

TEST(TrainArguments, ConfigFileByItsTorchTitanName) {
  EXPECT_EQ(parse_train_arguments({"--job.config_file", "a.toml"}).config, "a.toml");
  EXPECT_THROW(parse_train_arguments({"a.toml", "--job.config_file=b.toml"}), ConfigError);
}

TEST(TrainArguments, WrongWords) {
  EXPECT_THROW(parse_train_arguments({"a.toml", "b.toml"}), ConfigError);
  EXPECT_THROW(parse_train_arguments({"--nprocs", "2"}), ConfigError);
  EXPECT_THROW(parse_train_arguments({"--nproc", "zero"}), ConfigError);
  EXPECT_THROW(parse_train_arguments({"--nproc", "0"}), ConfigError);
  EXPECT_THROW(parse_train_arguments({"--nproc"}), ConfigError);
}

}  // namespace
}  // namespace titan::cli
