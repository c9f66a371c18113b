#include "titan/train/job_config.h"

#include <gtest/gtest.h>

#include <fstream>

#include "titan/config/print.h"
#include "titan/train/torchtitan_keys.h"
#include "unit/train/toy_model.h"

namespace titan::train {
namespace {

class JobConfigTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    register_model<BigramArgs>(
        "bigram",
        {.flavours = {{"small", {}}, {"large", {.vocab_size = 64}}},
         .sizes = [](const BigramArgs& args) -> ModelSizes { return {.vocab_size = args.vocab_size}; },
         .check =
             [](const BigramArgs& args, std::vector<std::string>& problems) {
               if (args.vocab_size == 13) problems.push_back("13 is unlucky");
             },
         .build =
             [](const BigramArgs& args, const BuildOptions& options) {
               return std::make_unique<BigramModel>(args.vocab_size, options.construct);
             },
         .parallelize = [](TrainableModel&, const ParallelPlan&) {}});
  }

  // `words` after the model's.
  JobConfig load(std::vector<std::string> words, int world_size = 1) {
    std::vector<std::string> all = {"--model.name", "bigram", "--model.flavor", "small"};
    all.insert(all.end(), words.begin(), words.end());
    JobConfig config;
    auto origins = config::load(job_schema(), {"", all}, config);
    check_job(config, origins, world_size);
    return config;
  }

  std::vector<std::string> problems_of(std::vector<std::string> words, int world_size = 1) {
    try {
      load(words, world_size);
    } catch (const ConfigError& error) {
      return error.problems();
    }
    return {};
  }
};

TEST_F(JobConfigTest, ModelArgsOverrideTheFlavor) {
  EXPECT_EQ(static_cast<const BigramArgs*>(load({}).args())->vocab_size, 16);
  EXPECT_EQ(static_cast<const BigramArgs*>(load({"--model.flavor", "large"}).args())->vocab_size, 64);
  EXPECT_EQ(static_cast<const BigramArgs*>(load({"--model.args.vocab_size", "5"}).args())->vocab_size, 5);
}

TEST_F(JobConfigTest, UnknownNamesListTheKnown) {
  auto flavor = problems_of({"--model.flavor", "smal"});
  ASSERT_EQ(flavor.size(), 1u);
  EXPECT_NE(flavor[0].find("--model.flavor"), std::string::npos) << flavor[0];
  EXPECT_NE(flavor[0].find("did you mean 'small'"), std::string::npos) << flavor[0];
  auto model = problems_of({"--model.name", "bigrm"});
  ASSERT_EQ(model.size(), 1u);
  EXPECT_NE(model[0].find("did you mean 'bigram'"), std::string::npos) << model[0];
}

TEST_F(JobConfigTest, ChecksBetweenTablesComeTogether) {
  auto problems = problems_of({"--parallelism.data_parallel_shard_degree", "3", "--checkpoint.enable",
                               "--checkpoint.interval", "5", "--model.args.vocab_size", "13"},
                              4);
  EXPECT_EQ(problems.size(), 3u);
}

TEST_F(JobConfigTest, InitialWeightsNeedCheckpoints) {
  EXPECT_EQ(problems_of({"--checkpoint.initial_load_path", "w.safetensors"}).size(), 1u);
  EXPECT_TRUE(problems_of({"--checkpoint.initial_load_path", "w.safetensors", "--checkpoint.enable",
                           "--training.steps", "20"})
                  .empty());
}

TEST_F(JobConfigTest, Float64IsAllOrNothing) {
  EXPECT_FALSE(problems_of({"--training.dtype", "float64"}).empty());
  EXPECT_TRUE(problems_of({"--training.dtype", "float64", "--training.mixed_precision_param", "float64",
                           "--training.mixed_precision_reduce", "float64"})
                  .empty());
}

TEST_F(JobConfigTest, ReshardSizeDividesTheShards) {
  EXPECT_EQ(problems_of({"--parallelism.fsdp_reshard_after_forward", "3"}, 4).size(), 1u);
  EXPECT_TRUE(problems_of({"--parallelism.fsdp_reshard_after_forward", "2"}, 4).empty());
}

TEST_F(JobConfigTest, FeaturesThatDontExistAreRefused) {
  for (auto words : std::vector<std::vector<std::string>>{{"--parallelism.tensor_parallel_degree", "2"},
                                                          {"--activation_checkpoint.mode", "full"},
                                                          {"--compile.enable"},
                                                          {"--model.converters", "quantize.linear.float8"},
                                                          {"--profiling.enable_profiling"},
                                                          {"--metrics.enable_wandb"}})
    EXPECT_EQ(problems_of(words).size(), 1u) << words[0];
}

TEST_F(JobConfigTest, PrintedConfigReadsBack) {
  JobConfig config =
      load({"--training.steps", "7", "--model.args.vocab_size", "5", "--optimizer.lr", "1.5e-7"});
  std::string printed = config::print_toml(job_schema(), config);
  auto path = std::filesystem::path(testing::TempDir()) / "job_config_test.toml";
  std::ofstream(path) << printed;
  JobConfig again;
  config::load(job_schema(), {path, {}}, again);
  EXPECT_EQ(config::print_toml(job_schema(), again), printed);
}

TEST_F(JobConfigTest, EveryKeyOfTorchTitanIsDescribed) {
  EXPECT_GE(torchtitan_keys().size(), 150u);
  EXPECT_NO_THROW(config::key_table(job_schema(), torchtitan_keys()));
}

}  // namespace
}  // namespace titan::train
