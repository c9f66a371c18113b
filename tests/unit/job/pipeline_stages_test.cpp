#include <gtest/gtest.h>
#include <fstream>

#include "job/build.h"
#include "job/dry_run.h"
#include "job/pipeline_stages.h"
#include "titan/parallel/parameters.h"
#include "unit/job/residual_family.h"
#include "unit/job/words.h"
#include "unit/train/toy_model.h"

namespace titan::train {
namespace {

class PipelineStages : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { register_residual(); }

  // Four rows in a batch, of 8 tokens.
  static JobConfig load(const Words& words, int world_size, JobFiles files = JobFiles::Ignore) {
    Words all = {"--model.name",
                 "residual",
                 "--model.flavor",
                 "small",
                 "--training.local_batch_size",
                 "4",
                 "--training.seq_len",
                 "8",
                 "--comm.backend",
                 "gloo",
                 "--training.device",
                 "cpu",
                 "--training.dtype",
                 "float64",
                 "--training.mixed_precision_param",
                 "float64",
                 "--training.mixed_precision_reduce",
                 "float64"};
    all.insert(all.end(), words.begin(), words.end());
    JobConfig config;
    const auto origins = config::load(job_schema(), {"", all}, config);
    check_job(config, origins, world_size, files);
    return config;
  }

  static Words problems_of(const Words& words, int world_size, JobFiles files = JobFiles::Ignore) {
    try {
      load(words, world_size, files);
    } catch (const ConfigError& error) {
      return error.problems();
    }
    return {};
  }

  static std::string only_problem_of(const Words& words, int world_size) {
    const Words problems = problems_of(words, world_size);
    return problems.size() == 1 ? problems[0] : str(problems.size(), " problems");
  }

  static Words lists_of(const StagePlan& plan) {
    Words lists;
    for (const auto& modules : plan.modules) lists.push_back(pipeline::short_list(modules));
    return lists;
  }
};

const Words kTwo = {"--parallelism.pipeline_parallel_degree", "2"};

TEST_F(PipelineStages, OneHoldsAllWithoutAPipeline) {
  const StagePlan plan = plan_stages(load({}, 1));
  EXPECT_EQ(plan.num_stages(), 1);
  EXPECT_EQ(plan.stages_of(0), std::vector{0});
}

TEST_F(PipelineStages, FollowTheSettings) {
  const StagePlan plan = plan_stages(load(kTwo, 2));
  EXPECT_EQ(lists_of(plan), (Words{"embedding, blocks.0..2", "blocks.3..4, norm, head"}));
  EXPECT_EQ(plan.rank_of_stage, (std::vector{0, 1}));

  const StagePlan looped =
      plan_stages(load(kTwo + Words{"--parallelism.pipeline_parallel_schedule", "interleaved1f1b",
                                    "--parallelism.pipeline_parallel_layers_per_stage", "2"},
                       2));
  EXPECT_EQ(lists_of(looped), (Words{"embedding, blocks.0", "blocks.1..2", "blocks.3..4", "norm, head"}));
  EXPECT_EQ(looped.rank_of_stage, (std::vector{0, 1, 0, 1}));
  EXPECT_EQ(looped.stages_of(1), (std::vector{1, 3}));

  const StagePlan bent =
      plan_stages(load(kTwo + Words{"--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble"}, 2));
  EXPECT_EQ(bent.rank_of_stage, (std::vector{0, 1, 1, 0}));

  const StagePlan listed =
      plan_stages(load(kTwo + Words{"--parallelism.module_fqns_per_model_part",
                                    "embedding,blocks.0,blocks.1,blocks.2,blocks.3,blocks.4;norm,head"},
                       2));
  EXPECT_EQ(lists_of(listed), (Words{"embedding, blocks.0..4", "norm, head"}));

  const StagePlan as_in_toml = plan_stages(load(
      kTwo +
          Words{
              "--parallelism.module_fqns_per_model_part",
              R"([["embedding", "blocks.0", "blocks.1", "blocks.2"], ["blocks.3", "blocks.4", "norm", "head"]])"},
      2));
  EXPECT_EQ(lists_of(as_in_toml), (Words{"embedding, blocks.0..2", "blocks.3..4, norm, head"}));
}

TEST_F(PipelineStages, FollowAScheduleInAFile) {
  const auto file = std::filesystem::path(::testing::TempDir()) / "pipeline_stages_test.csv";
  std::ofstream(file) << "0F0,3F0,3B0,0B0,0F1,3F1,3B1,0B1\n1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1\n";
  const Words words = kTwo + Words{"--parallelism.pipeline_parallel_schedule",        "PipelineScheduleMulti",
                                   "--parallelism.pipeline_parallel_schedule_csv",    file.string(),
                                   "--parallelism.pipeline_parallel_microbatch_size", "2"};
  EXPECT_EQ(plan_stages(load(words, 2)).rank_of_stage, (std::vector{0, 1, 1, 0}));
  EXPECT_NE(only_problem_of(words + Words{"--parallelism.pipeline_parallel_degree", "4"}, 4)
                .find("is a schedule for 2 ranks, but pipeline_parallel_degree is 4"),
            std::string::npos);
  EXPECT_NE(only_problem_of(words + Words{"--parallelism.pipeline_parallel_schedule_csv", "/nowhere.csv"}, 2)
                .find("/nowhere.csv"),
            std::string::npos);
  EXPECT_NE(only_problem_of(words + Words{"--training.local_batch_size", "8"}, 2)
                .find("is a schedule for 2 micro-batches"),
            std::string::npos);
  std::ofstream(file) << "0F0,3F0,3B0,0B0,0F1,3F1,3B1,0B1\n1F0,2F0,2B0,1B0,1F1,2F1,2B1\n";
  EXPECT_NE(only_problem_of(words, 2).find("rank 1: 1B1 (or 1I1 and 1W1) is missing"), std::string::npos);
}

TEST_F(PipelineStages, NameTheParametersTheyShare) {
  const StagePlan plan = plan_stages(load(kTwo + Words{"--model.args.tied"}, 2));
  ASSERT_EQ(plan.shared.size(), 1u);
  EXPECT_EQ(plan.shared[0].name, "embedding.weight");
  EXPECT_EQ(plan.shared[0].stages, (std::vector{0, 1}));
  EXPECT_TRUE(plan_stages(load(kTwo, 2)).shared.empty());
}

TEST_F(PipelineStages, RefuseSettingsThatDontFit) {
  const auto expect = [&](const Words& words, const std::string& key, const std::string& what,
                          int world_size = 2) {
    const std::string problem = only_problem_of(kTwo + words, world_size);
    EXPECT_NE(problem.find(key), std::string::npos) << problem;
    EXPECT_NE(problem.find(what), std::string::npos) << problem;
  };
  expect({"--parallelism.pipeline_parallel_degree", "8"}, "pipeline_parallel_degree",
         "8 stages are more than the 5 layers", 8);
  expect({"--parallelism.pipeline_parallel_microbatch_size", "3"}, "pipeline_parallel_microbatch_size",
         "doesn't divide training.local_batch_size = 4");
  expect({"--training.local_batch_size", "1"}, "pipeline_parallel_microbatch_size",
         "needs at least 2 micro-batches, not 1; a batch of training.local_batch_size = 1 rows has 1, and a "
         "step has 1 such batch(es)");
  const Words gpipe = {"--parallelism.pipeline_parallel_schedule", "GPipe",
                       "--parallelism.pipeline_parallel_max_live_activations"};
  expect(gpipe + Words{"3"}, "pipeline_parallel_max_live_activations",
         "rank 0, action 3 (0F3): makes 4 live activations; at most 3 are allowed");
  EXPECT_NO_THROW(load(kTwo + gpipe + Words{"4"}, 2));
  EXPECT_NO_THROW(load(kTwo + Words{gpipe[2], "2"}, 2)) << "1F1B holds no more";
  expect({"--parallelism.fsdp_reshard_after_forward", "always"}, "fsdp_reshard_after_forward",
         "the schedule gathers and frees");
  expect({"--parallelism.module_fqns_per_model_part", ""}, "module_fqns_per_model_part", "0 stages");
  expect({"--parallelism.pipeline_parallel_schedule", "pipelineschedulesingle"}, "pipeline_parallel_schedule",
         "pipeline_parallel_schedule_csv is empty");
  expect({"--parallelism.pipeline_parallel_schedule", "PipelineScheduleMulti"}, "pipeline_parallel_schedule",
         "pipeline_parallel_schedule_csv is empty");
  expect({"--parallelism.module_fqns_per_model_part", "embedding;blocks.0,norm,head"},
         "module_fqns_per_model_part", "no stage has blocks.1..4");
  expect({"--parallelism.module_fqns_per_model_part", "embedding;blocks.0;norm,head"},
         "module_fqns_per_model_part", "3");
  expect({"--parallelism.pipeline_parallel_layers_per_stage", "3"}, "pipeline_parallel_layers_per_stage",
         "3");
  expect({}, "pipeline_parallel_degree", "x pp 2 = 2 ranks, but the job has 3", 3);
}

TEST_F(PipelineStages, NeedAModelThatNamesItsLayers) {
  if (!model_specs().contains("whole bigram"))
    register_model<BigramArgs>("whole bigram", {.flavors = {{"small", {}}},
                                                .sizes = [](const BigramArgs&) -> ModelSizes { return {}; },
                                                .build =
                                                    [](const BigramArgs& args, const BuildOptions& options) {
                                                      return std::make_unique<BigramModel>(args.vocab_size,
                                                                                           options.construct);
                                                    },
                                                .parallelize = [](TrainableModel&, const ParallelPlan&) {}});
  const std::string problem = only_problem_of(kTwo + Words{"--model.name", "whole bigram"}, 2);
  EXPECT_NE(problem.find("can't be cut into stages"), std::string::npos) << problem;
  BigramModel model(4);
  EXPECT_THROW(model.hidden(at::zeros({1, 2}, at::kLong)), Error);
}

// The stages of each rank, built here one after the other: together they are the model.
TEST_F(PipelineStages, AreBuiltWhereTheyBelong) {
  const JobConfig config = load(kTwo + Words{"--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble"}, 2);
  const StagePlan plan = plan_stages(config);
  std::vector<std::vector<std::string>> names(4);
  for (const int rank : {0, 1}) {
    const dist::World world = dist::init({.backend = "fake", .fake_rank = rank, .fake_world_size = 2});
    const Meshes meshes = build_job_meshes(config, world);
    const auto models = build_stages(config, plan, meshes, at::kCPU);
    const auto stages = plan.stages_of(rank);
    ASSERT_EQ(models.size(), stages.size());
    for (size_t i = 0; i < models.size(); ++i)
      for (const Parameter& parameter : parameters(models[i]->root()))
        names[static_cast<size_t>(stages[i])].push_back(parameter.name);
  }
  Words all;
  for (const auto& each : names) all.insert(all.end(), each.begin(), each.end());
  ResidualModel whole({}, deferred(at::kMeta));
  Words expected;
  for (const Parameter& parameter : parameters(whole.root())) expected.push_back(parameter.name);
  EXPECT_EQ(all, expected);
}

TEST_F(PipelineStages, KnowTheTensorsBetweenThem) {
  const JobConfig config = load(kTwo + Words{"--parallelism.pipeline_parallel_layers_per_stage", "4"}, 2);
  const dist::World world = dist::init({.backend = "fake", .fake_rank = 1, .fake_world_size = 2});
  const auto boundaries = stage_boundaries(config, plan_stages(config), world, 1, 8);
  ASSERT_EQ(boundaries.size(), 2u);
  EXPECT_EQ(boundaries[0], (TensorType{{1, 8}, at::kLong}));
  EXPECT_EQ(boundaries[1], (TensorType{{1, 8, 12}, at::kDouble}));
}

TEST_F(PipelineStages, FirstRankOfTheLastStageHasTheMetrics) {
  const ParallelDims dims{.dp_shard = 2, .tp = 2, .pp = 2};
  EXPECT_EQ(metrics_rank(dims, plan_stages(load(kTwo, 2))), 4);
  const StagePlan bent =
      plan_stages(load(kTwo + Words{"--parallelism.pipeline_parallel_schedule", "DualPipeV"}, 2));
  EXPECT_EQ(metrics_rank(dims, bent), 0);
}

// 1F1B runs the micro-batches of all accumulated batches; a file schedules one batch.
TEST_F(PipelineStages, CountMicroBatchesOfAWholeStep) {
  const Words one_row = kTwo + Words{"--training.local_batch_size", "1"};
  EXPECT_EQ(problems_of(one_row, 2).size(), 1u);
  EXPECT_EQ(problems_of(one_row + Words{"--training.global_batch_size", "2"}, 2), Words{});
  EXPECT_EQ(problems_of(kTwo + Words{"--parallelism.pipeline_parallel_microbatch_size", "2"}, 2), Words{});
  EXPECT_EQ(
      problems_of(kTwo + Words{"--parallelism.pipeline_parallel_microbatch_size", "2", "--validation.enable",
                               "--validation.seq_len", "8", "--validation.local_batch_size", "3"},
                  2)
          .size(),
      1u);
}

}  // namespace
}  // namespace titan::train
