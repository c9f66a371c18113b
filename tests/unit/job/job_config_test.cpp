#include <gtest/gtest.h>
#include <algorithm>
#include <fstream>

#include "job/job_config.h"
#include "titan/config/load.h"
#include "unit/job/words.h"
#include "unit/train/toy_model.h"

namespace titan::train {
namespace {

class JobConfigTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    register_model<BigramArgs>(
        "bigram",
        {.flavors = {{"small", {}}, {"large", {.vocab_size = 64}}},
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
  JobConfig load(std::vector<std::string> words, int world_size = 1, JobFiles files = JobFiles::Ignore) {
    std::vector<std::string> all = {"--model.name", "bigram", "--model.flavor", "small"};
    all.insert(all.end(), words.begin(), words.end());
    JobConfig config;
    auto origins = config::load(job_schema(), {"", all}, config);
    check_job(config, origins, world_size, files);
    return config;
  }

  std::vector<std::string> problems_of(std::vector<std::string> words, int world_size = 1,
                                       JobFiles files = JobFiles::Ignore) {
    try {
      load(words, world_size, files);
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

TEST_F(JobConfigTest, SuggestsAbbreviatedKeys) {
  for (const char* key : {"--optimizer.learning_rate", "--training.learning_rate"}) {
    const auto problems = problems_of({key, "1"});
    ASSERT_EQ(problems.size(), 1u);
    EXPECT_NE(problems[0].find("did you mean 'optimizer.lr'?"), std::string::npos) << problems[0];
  }
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

TEST_F(JobConfigTest, ZeroIsNoDegreeAndAutoIsPrintedAsAuto) {
  for (const std::string key : {"tensor", "context", "pipeline"}) {
    const std::string name = "parallelism." + key + "_parallel_degree";
    EXPECT_EQ(problems_of({"--" + name, "0"}), Words{"--" + name + " = 0: must be from 1 to 65536, or \"auto\""});
    JobConfig config;
    config::load(job_schema(),
                 {"", {"--model.name", "bigram", "--model.flavor", "small", "--" + name, "auto"}}, config);
    EXPECT_TRUE(config.parallelism.has_auto_degree());
    EXPECT_NE(config::print_toml(job_schema(), config).find(key + "_parallel_degree = \"auto\"\n"),
              std::string::npos);
    EXPECT_NE(config::print_json(job_schema(), config).find(key + "_parallel_degree\": \"auto\""),
              std::string::npos);
  }
}

TEST_F(JobConfigTest, SaysWhatToUseInsteadOfTorchTitansNames) {
  const auto refusal = [&](const std::string& key, const std::string& value) {
    const auto problems = problems_of({"--model.name", "bigram", key, value}, 1, JobFiles::Check);
    return std::string(ConfigError(problems).what());
  };
  for (const char* key : {"--training.dataset", "--validation.dataset"}) {
    const Words enabled = {"--validation.enable", key, "c4_test"};
    EXPECT_NE(std::string(ConfigError(problems_of(enabled, 1, JobFiles::Check)).what())
                  .find("use \"jsonl\" with dataset_path = TorchTitan's tests/assets/c4_test/data.json"),
              std::string::npos);
  }
  EXPECT_NE(refusal("--training.dataset", "c4").find("allenai/c4"), std::string::npos);
  EXPECT_NE(refusal("--model.name", "llama4").find("docs/adding_a_model.md"), std::string::npos);
  EXPECT_NE(refusal("--model.name", "llama3_ft").find("--max-restarts"), std::string::npos);
  EXPECT_NE(refusal("--model.flavor", "small_flex").find("use \"small\""), std::string::npos);
  EXPECT_NE(refusal("--model.flavor", "x_flex").find("unknown flavor"), std::string::npos);
}

TEST_F(JobConfigTest, RefusesAutoWithoutAConfigOfHuggingFace) {
  const auto refusal = [&](const Words& words) {
    return std::string(ConfigError(problems_of(Words{"--model.name", "auto"} + words)).what());
  };
  EXPECT_NE(refusal({"--model.hf_assets_path", "nowhere"}).find("there is no nowhere/config.json"),
            std::string::npos);
}

TEST_F(JobConfigTest, RefusesAnUnknownMetricsSink) {
  const auto problems = problems_of({"--metrics.sinks", "jsonl,consol"});
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_NE(problems[0].find("metrics.sinks"), std::string::npos) << problems[0];
  EXPECT_NE(problems[0].find("known: console, jsonl, tensorboard; did you mean 'console'?"),
            std::string::npos)
      << problems[0];
}

TEST_F(JobConfigTest, ReadsTheChosenLossAndItsArguments) {
  EXPECT_EQ(load({}).loss.name, "cross_entropy");
  const JobConfig config = load({"--loss.name", "z_loss", "--loss.args.z_weight", "0.01"});
  EXPECT_EQ(config.loss_args.fields.at(0).get(config.loss_args.settings.get()), config::Value(0.01));
  const auto unknown = problems_of({"--loss.name", "zloss"});
  ASSERT_EQ(unknown.size(), 1u);
  EXPECT_NE(unknown[0].find("known: cross_entropy, label_smoothing, z_loss"), std::string::npos)
      << unknown[0];
  EXPECT_EQ(problems_of({"--loss.name", "label_smoothing", "--loss.args.epsilon", "2"}).size(), 1u);
  EXPECT_EQ(problems_of({"--loss.args.epsilon", "0.1"}).size(), 1u) << "the cross-entropy has no arguments";
}

TEST_F(JobConfigTest, ReportsProblemsOfAllTablesTogether) {
  auto problems = problems_of({"--parallelism.data_parallel_shard_degree", "3", "--checkpoint.enable",
                               "--checkpoint.create_seed_checkpoint", "--model.args.vocab_size", "13"},
                              4);
  EXPECT_EQ(problems.size(), 3u);
}

TEST_F(JobConfigTest, InitialWeightsNeedCheckpoints) {
  EXPECT_EQ(problems_of({"--checkpoint.initial_load_path", "w.safetensors"}).size(), 1u);
  EXPECT_TRUE(problems_of({"--checkpoint.initial_load_path", "w.safetensors", "--checkpoint.enable",
                           "--training.steps", "20"})
                  .empty());
}

TEST_F(JobConfigTest, HuggingFaceFoldersNeedAForm) {
  for (const std::string key : {"initial_load_in_hf", "last_save_in_hf"}) {
    const auto problems =
        problems_of({"--checkpoint.enable", "--training.steps", "20", "--checkpoint." + key});
    ASSERT_EQ(problems.size(), 1u) << key;
    EXPECT_NE(problems[0].find("model.name = bigram has no form in transformers"), std::string::npos)
        << problems[0];
    const auto without_checkpoints = problems_of({"--checkpoint." + key});
    ASSERT_EQ(without_checkpoints.size(), 1u) << key;
    EXPECT_NE(without_checkpoints[0].find("needs checkpoint.enable = true"), std::string::npos)
        << without_checkpoints[0];
  }
}

TEST_F(JobConfigTest, RefusesConflictingCheckpointSettings) {
  const auto problem_of = [&](const std::vector<std::string>& words, int world_size = 1) {
    std::vector<std::string> all = {"--checkpoint.enable"};
    all.insert(all.end(), words.begin(), words.end());
    const auto problems = problems_of(all, world_size);
    return problems.empty() ? "none" : ConfigError(problems).what();
  };
  using std::string;
  const std::vector<std::pair<std::vector<string>, string>> cases = {
      {{"--checkpoint.keep_latest_k", "1"}, "0 (all) or at least 2"},
      {{"--checkpoint.load_step", "-2"}, "at least -1"},
      {{"--checkpoint.exclude_from_loading", "model"}, "can't be excluded"},
      {{"--checkpoint.exclude_from_loading", "optimizer,rng"}, "exclude lr_scheduler as well"},
      {{"--checkpoint.no_last_save_model_only", "--checkpoint.export_dtype", "bfloat16"},
       "applies to the model alone"},
      {{"--checkpoint.create_seed_checkpoint", "--checkpoint.load_only"}, "which load_only forbids"},
      {{"--checkpoint.async_mode", "pinned"}, "async_with_pinned_mem"},
      {{"--checkpoint.on_failure", "ignore"}, "continue"},
  };
  for (const auto& [words, told] : cases)
    EXPECT_NE(string(problem_of(words)).find(told), string::npos) << problem_of(words);
  EXPECT_NE(string(problem_of({"--checkpoint.create_seed_checkpoint"}, 2)).find("exactly one rank"),
            string::npos);
  EXPECT_EQ(string(problem_of({"--checkpoint.exclude_from_loading", "optimizer,lr_scheduler,my_object"})),
            "none");
  EXPECT_EQ(problems_of({"--checkpoint.load_step", "3"}).size(), 1u);  // nothing is loaded
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

TEST_F(JobConfigTest, RotationNeedsRingAttention) {
  const std::vector<std::string> words = {"--parallelism.context_parallel_degree", "2",
                                          "--parallelism.context_parallel_rotate_method", "alltoall"};
  EXPECT_TRUE(problems_of(words, 2).empty());
  std::vector<std::string> gathered = words;
  gathered.insert(gathered.end(), {"--parallelism.context_parallel_attention", "allgather_kv"});
  const auto problems = problems_of(gathered, 2);
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_NE(problems[0].find("is for ring attention; context_parallel_attention = \"allgather_kv\" supports"),
            std::string::npos)
      << problems[0];
}

struct DuplexSettings {
  int64_t degree = 1;
};

void describe(config::Table<DuplexSettings>& table) {
  table.field("degree", &DuplexSettings::degree, "ranks", config::at_least(1));
}

void register_duplex() {
  if (parallelisms().contains("duplex")) return;
  register_parallelism<DuplexSettings>(
      "duplex", {.axis = "duplex",
                 .apply = [](const nn::AnyRef&, const DeviceMesh&, const DuplexSettings&) {},
                 .is_applied = [](const nn::AnyRef&) { return false; }});
}

TEST_F(JobConfigTest, RegisteredParallelismsReadTheirTable) {
  register_duplex();
  const JobConfig config =
      load({"--parallelism.args.duplex.degree", "2", "--parallelism.context_parallel_degree", "2"}, 4);
  const auto axes = row_axes(chosen_parallelisms(config.parallelism));
  ASSERT_EQ(axes.size(), 2u);
  EXPECT_EQ(axes[0].name, "cp");
  EXPECT_EQ(axes[1].name, "duplex");
  EXPECT_EQ(axes[1].degree, 2);
  EXPECT_NE(config::print_toml(job_schema(), config).find("[parallelism.args.duplex]\ndegree = 2\n"),
            std::string::npos);
  EXPECT_EQ(problems_of({"--parallelism.args.duplex.degree", "3", "--training.seq_len", "8"}, 3).size(), 1u);
  EXPECT_EQ(row_axes(chosen_parallelisms(load({}).parallelism)).size(), 1u);
}

TEST_F(JobConfigTest, SettingADegreeInACopyKeepsTheOriginal) {
  register_duplex();
  const JobConfig config = load({"--parallelism.args.duplex.degree", "2"}, 2);
  ParallelismSettings changed = config.parallelism;
  changed.set_degree("duplex", 4);
  changed.set_degree("context", 8);
  const auto degree_of = [](const ParallelismSettings& settings) {
    return ParallelDims{.rows = row_axes(chosen_parallelisms(settings))}.row_degree();
  };
  EXPECT_EQ(degree_of(changed), 32);
  EXPECT_EQ(degree_of(config.parallelism), 2);
  ParallelismSettings made_in_code;
  made_in_code.set_degree("duplex", 4);
  EXPECT_EQ(degree_of(made_in_code), 4);
}

TEST_F(JobConfigTest, ReportsFileProblemsWithTheOthers) {
  auto problems = problems_of(
      {"--training.dataset", "c4", "--model.hf_assets_path", "no/such/folder", "--validation.enable",
       "--validation.dataset", "text", "--validation.seq_len", "8", "--training.seq_len", "8",
       "--checkpoint.enable", "--training.steps", "5", "--checkpoint.initial_load_path", "/no/weights",
       "--parallelism.data_parallel_shard_degree", "3"},
      4, JobFiles::Check);
  const std::string all = ConfigError(problems).what();
  EXPECT_EQ(problems.size(), 5u) << all;
  const std::string folder = (std::filesystem::current_path() / "no/such/folder").string();
  EXPECT_NE(all.find("--training.dataset = c4: unknown data set; known: cpp_headers, jsonl"),
            std::string::npos)
      << all;
  EXPECT_NE(all.find("there is no " + folder + " (relative to the working directory"), std::string::npos)
      << all;
  EXPECT_NE(all.find("needs validation.dataset_path"), std::string::npos) << all;
  EXPECT_NE(all.find("no safetensors file at /no/weights"), std::string::npos) << all;
}

TEST_F(JobConfigTest, DataPathsMustExist) {
  const std::vector<std::string> text = {"--model.hf_assets_path", "bytes", "--model.args.vocab_size", "258",
                                         "--training.dataset",     "text",  "--training.dataset_path"};
  auto problem_of = [&](const std::string& path) {
    auto words = text;
    words.push_back(path);
    return ConfigError(problems_of(words, 1, JobFiles::Check)).problems();
  };
  EXPECT_TRUE(problem_of(TITAN_SOURCE_DIR "/docs").empty());
  EXPECT_TRUE(problem_of(TITAN_SOURCE_DIR "/docs/*.md").empty());
  ASSERT_EQ(problem_of("/no/such/folder").size(), 1u);
  EXPECT_NE(problem_of("/no/such/folder")[0].find("nothing at /no/such/folder"), std::string::npos);
  ASSERT_EQ(problem_of(TITAN_SOURCE_DIR "/docs/*.nothing").size(), 1u);
}

TEST_F(JobConfigTest, DataFilesMustBeWhatTheDataSetReads) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "data_files";
  std::filesystem::create_directories(folder / "texts");
  const auto write = [&](const char* name, const std::string& contents) {
    std::ofstream(folder / name, std::ios::binary) << contents;
    return (folder / name).string();
  };
  const auto problem_of = [&](const std::string& kind, const std::string& path) {
    const auto problems = problems_of({"--model.hf_assets_path", "bytes", "--model.args.vocab_size", "258",
                                       "--training.dataset", kind, "--training.dataset_path", path},
                                      1, JobFiles::Check);
    return problems.size() == 1 ? problems[0] : str(problems.size(), " problems");
  };
  const std::string lines = "{\"text\": \"one\"}\n{\"text\": \"two\"}\n", noise(500, '\1');
  for (const auto& [kind, path, what] : std::vector<std::array<std::string, 3>>{
           {"text", write("a.parquet", ""), "is a Parquet file"},
           {"jsonl", write("a.jsonl", noise), "is binary, not text"},
           {"text", write("lines.txt", lines), "is JSON Lines"},
           {"Text", write("empty.txt", ""), "is empty"},
           {"jsonl", write("texts/a.txt", "text").substr(0, folder.string().size() + 6), "no files"}}) {
    const std::string problem = problem_of(kind, path);
    EXPECT_NE(problem.find("training.dataset_path"), std::string::npos) << problem;
    EXPECT_NE(problem.find(what), std::string::npos) << problem;
  }
  EXPECT_EQ(problem_of("jsonl", (folder / "lines.txt").string()), "0 problems");
  std::filesystem::remove_all(folder);
}

TEST_F(JobConfigTest, TokenizerMustFitTheModel) {
  auto problems = problems_of({"--model.hf_assets_path", "bytes"}, 1, JobFiles::Check);
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_NE(problems[0].find("--model.hf_assets_path = bytes: the tokenizer has 258 tokens"),
            std::string::npos)
      << problems[0];
}

// The recording: 20 steps of 4 sequences of 64 tokens; two ranks.
TEST_F(JobConfigTest, RecordedBatchesMustFitTheJob) {
  const std::string folder = TITAN_SOURCE_DIR "/tests/data/parity/mini";
  auto check = [&](const char* steps, const char* batch, const char* seq_len, const std::string& path) {
    return problems_of({"--training.dataset", "tokens", "--training.dataset_path", path, "--training.steps",
                        steps, "--training.local_batch_size", batch, "--training.seq_len", seq_len},
                       2, JobFiles::Check);
  };
  EXPECT_TRUE(check("20", "2", "64", folder).empty());
  EXPECT_EQ(check("1000", "1000", "1000", folder).size(), 3u);
  auto missing = check("20", "2", "64", "/no/recording");
  ASSERT_EQ(missing.size(), 1u);
  EXPECT_NE(missing[0].find("there is nothing at /no/recording"), std::string::npos) << missing[0];
}

TEST_F(JobConfigTest, StoredTokenIdsAreCheckedBeforeTheStart) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "stored_ids";
  std::filesystem::create_directories(folder);
  const auto check = [&](const std::string& contents) {
    std::ofstream(folder / "ids.bin", std::ios::binary) << contents;
    return problems_of({"--training.dataset", "tokens", "--training.dataset_path", folder.string()}, 1,
                       JobFiles::Check);
  };
  std::string ids;
  for (int i = 0; i < 500; ++i) ids += std::string("\7\0", 2);
  EXPECT_TRUE(check(ids).empty());
  const auto odd = check(ids + "x"), outside = check(std::string(1000, '\x7f'));
  ASSERT_EQ(odd.size(), 1u);
  EXPECT_NE(odd[0].find("ids.bin has 1001 bytes, not a whole number of uint16"), std::string::npos) << odd[0];
  ASSERT_EQ(outside.size(), 1u);
  EXPECT_NE(outside[0].find("ids.bin: token 0 of 500"), std::string::npos) << outside[0];
  std::filesystem::remove_all(folder);
}

TEST_F(JobConfigTest, RefusesFeaturesThatDontExist) {
  for (auto words : std::vector<std::vector<std::string>>{
           {"--activation_checkpoint.debug"},
           {"--compile.enable", "--compile.backend", "eager", "--training.device", "cuda"},
           {"--model.converters", "quantize.grouped_mm.mx"},
           {"--metrics.enable_wandb"}})
    EXPECT_EQ(problems_of(words).size(), 1u) << words[0];
}

TEST_F(JobConfigTest, BuffersAreRegisteredOnlyOnGpusOverNccl) {
  const auto problems = [&](std::vector<std::string> words, int ranks = 2) {
    words.insert(words.begin(), "--comm.register_buffers");
    const auto found = problems_of(words, ranks);
    return std::count_if(found.begin(), found.end(), [](const std::string& problem) {
      return problem.find("comm.register_buffers") != std::string::npos;
    });
  };
  const std::string on_gpu = "--training.device=cuda";
  EXPECT_EQ(problems({on_gpu}), 0);
  EXPECT_EQ(problems({on_gpu, "--comm.backend=gloo"}, 1), 0);
  EXPECT_EQ(problems({"--training.device=cpu"}), 1);
  for (const char* other : {"--comm.backend=gloo", "--comm.mode=fake_backend",
                            "--training.enable_cpu_offload", "--compile.enable"})
    EXPECT_EQ(problems({on_gpu, other}), 1) << other;
}

TEST_F(JobConfigTest, StepsAreRecordedOnlyWhereNothingWaitsForTheHost) {
  const auto problems = [&](std::vector<std::string> words, int ranks = 2) {
    words.insert(words.begin(), {"--compile.enable", "--training.device", "cuda"});
    return problems_of(words, ranks);
  };
  EXPECT_TRUE(problems({}).empty());
  EXPECT_EQ(problems_of({"--compile.enable", "--training.device", "cpu"}).size(), 1u);
  const auto staged = problems({"--parallelism.pipeline_parallel_degree", "2"});
  EXPECT_TRUE(std::none_of(staged.begin(), staged.end(), [](const std::string& problem) {
    return problem.find("compile.enable") != std::string::npos;
  })) << ConfigError(staged).what();
  EXPECT_EQ(problems({"--optimizer.implementation", "foreach"}).size(), 1u);
  EXPECT_EQ(problems({"--comm.backend", "gloo"}).size(), 1u);
  EXPECT_TRUE(problems({"--comm.backend", "gloo"}, 1).empty());
  for (const char* other : {"--training.enable_cpu_offload", "--debug.nan_trace", "--debug.check_collectives",
                            "--debug.detect_anomaly", "--metrics.report_roofline"})
    EXPECT_EQ(problems({other}).size(), 1u) << other;
}

TEST_F(JobConfigTest, OptimizerStatesInBfloat16NeedTheFusedStep) {
  const std::vector<std::string> bf16 = {"--optimizer.state_dtype", "bfloat16"},
                                 rounding = {"--optimizer.stochastic_rounding"},
                                 doubles = {"--training.dtype",
                                            "float64",
                                            "--training.mixed_precision_param",
                                            "float64",
                                            "--training.mixed_precision_reduce",
                                            "float64"};
  const auto problems = [&](std::vector<std::vector<std::string>> parts) {
    std::vector<std::string> words;
    for (const auto& part : parts) words.insert(words.end(), part.begin(), part.end());
    return problems_of(words);
  };
  EXPECT_TRUE(problems({bf16}).empty());
  EXPECT_TRUE(problems({bf16, rounding}).empty());
  EXPECT_TRUE(problems({rounding, {"--training.dtype", "bfloat16"}}).empty());
  EXPECT_TRUE(problems({{"--training.dtype", "bfloat16", "--optimizer.state_dtype", "float32"}}).empty());
  for (const auto& refused : {problems({bf16, {"--optimizer.implementation", "foreach"}}),
                              problems({rounding}), problems({bf16, doubles})}) {
    ASSERT_EQ(refused.size(), 1u) << ConfigError(refused).what();
    EXPECT_NE(refused[0].find("optimizer.st"), std::string::npos) << refused[0];
  }
}

TEST_F(JobConfigTest, DegreesMustMultiplyToTheRanks) {
  const std::vector<std::string> words = {"--parallelism.tensor_parallel_degree", "2"};
  const auto problems = problems_of(words, 1);
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_NE(problems[0].find("= 2 ranks, but the job has 1;"), std::string::npos) << problems[0];
  // The key is that of a degree that doesn't fit, which data_parallel_shard_degree = -1 always does.
  EXPECT_TRUE(problems[0].starts_with("--parallelism.tensor_parallel_degree = 2")) << problems[0];
  const auto of_pipeline = problems_of({"--parallelism.pipeline_parallel_degree", "2"}, 1);
  ASSERT_FALSE(of_pipeline.empty());
  EXPECT_NE(of_pipeline[0].find("start 2 ranks (on one machine: titan train --nproc 2)"), std::string::npos)
      << of_pipeline[0];
  EXPECT_TRUE(problems_of(words, 2).empty());
}

TEST_F(JobConfigTest, ChecksFloat8BeforeStarting) {
  const std::vector<std::string> on = {"--training.device", "cpu", "--model.converters",
                                       "quantize.linear.float8"};
  const auto problems = [&](std::vector<std::string> words) {
    words.insert(words.begin(), on.begin(), on.end());
    return problems_of(words);
  };
  const std::string emulate = "--quantize.linear.float8.emulate";
  EXPECT_TRUE(problems({emulate}).empty());
  EXPECT_EQ(problems({}).size(), 1u);  // a CPU has no Float8 units
  EXPECT_EQ(problems({emulate, "--quantize.linear.float8.recipe_name", "rowise"}).size(), 1u);
  EXPECT_EQ(problems({emulate, "--quantize.linear.float8.recipe_name", "rowwise_with_gw_hp",
                      "--quantize.linear.float8.filter_fqns", "auto_filter_small_kn"})
                .size(),
            1u);
  const std::string gather = "--quantize.linear.float8.enable_fsdp_float8_all_gather";
  EXPECT_TRUE(problems({emulate, gather}).empty());
  EXPECT_EQ(problems({emulate, gather, "--quantize.linear.float8.recipe_name", "rowwise"}).size(), 1u);
  EXPECT_EQ(problems({emulate, "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"}).size(),
            1u);
  const std::string of_weights = "--quantize.linear.float8.scaling_type_weight";
  EXPECT_TRUE(problems({emulate, of_weights, "delayed"}).empty());
  EXPECT_EQ(problems({emulate, gather, of_weights, "delayed"}).size(), 1u);
  EXPECT_EQ(
      problems({emulate, of_weights, "delayed", "--quantize.linear.float8.recipe_name", "rowwise"}).size(),
      1u);
  EXPECT_EQ(problems({emulate, "--quantize.linear.float8.recipe_name", "mxfp8_cublas"}).size(), 1u);
  const auto mixed = problems_of({"--training.device", "cpu", emulate, "--model.converters",
                                  "quantize.linear.float8,quantize.linear.mx"});
  ASSERT_EQ(mixed.size(), 2u);
  EXPECT_NE(mixed[0].find("Float8 and MX don't mix"), std::string::npos) << mixed[0];
}

TEST_F(JobConfigTest, ChecksMxfp8BeforeStarting) {
  const auto problems = [&](std::vector<std::string> words) {
    const std::vector<std::string> on = {"--training.device", "cpu", "--model.converters",
                                         "quantize.linear.mx"};
    words.insert(words.begin(), on.begin(), on.end());
    return problems_of(words);
  };
  const std::string recipe = "--quantize.linear.mx.recipe_name", emulate = "--quantize.linear.mx.emulate";
  EXPECT_TRUE(problems({emulate}).empty());
  EXPECT_TRUE(problems({recipe, "mxfp8_emulated"}).empty());
  const auto refused = problems({recipe, "mxfp8_cublas_rceil"});  // a CPU has no such units
  ASSERT_EQ(refused.size(), 1u);
  for (const char* word : {"quantize.linear.mx.emulate", "no units for MXFP8"})
    EXPECT_NE(refused[0].find(word), std::string::npos) << refused[0];
  EXPECT_EQ(problems({emulate, recipe, "mxfp4"}).size(), 1u);
  EXPECT_EQ(problems({emulate, recipe, "rowwise"}).size(), 1u);
}

TEST_F(JobConfigTest, PrintedConfigReadsBack) {
  JobConfig config =
      load({"--training.steps", "7", "--model.args.vocab_size", "5", "--optimizer.lr", "1.5e-7"});
  std::string printed = config::print_toml(job_schema(), config);
  auto path = std::filesystem::path(::testing::TempDir()) / "job_config_test.toml";
  std::ofstream(path) << printed;
  JobConfig again;
  config::load(job_schema(), {path, {}}, again);
  EXPECT_EQ(config::print_toml(job_schema(), again), printed);
}

TEST_F(JobConfigTest, DescribesEveryTorchTitanKey) {
  EXPECT_GE(torchtitan_keys().size(), 150u);
  EXPECT_NO_THROW(config::key_table(job_schema(), torchtitan_keys()));
}

// Registers `model`, and not `lost`.
class ForgetfulModel : public BigramModel {
 public:
  explicit ForgetfulModel(const nn::Construct& construct) : BigramModel(16, construct), lost(16, construct) {}
  Bigram lost;
};

TEST_F(JobConfigTest, AStartIsRefusedForAModuleThatIsntRegistered) {
  register_model<BigramArgs>(
      "forgetful",
      {.flavors = {{"small", {}}},
       .sizes = [](const BigramArgs& args) -> ModelSizes { return {.vocab_size = args.vocab_size}; },
       .build =
           [](const BigramArgs&, const BuildOptions& options) {
             return std::make_unique<ForgetfulModel>(options.construct);
           },
       .parallelize = [](TrainableModel& model,
                         const ParallelPlan& plan) { fully_shard(model.root(), plan.fsdp); }});
  JobConfig config;
  const auto origins =
      config::load(job_schema(), {"", {"--model.name", "forgetful", "--model.flavor", "small"}}, config);
  const StartReport report = check_start(config, origins, 2, /*all_here=*/false);
  const std::string problems = ConfigError(report.problems).what();
  EXPECT_NE(problems.find("model.name = forgetful: the model doesn't register a module"), std::string::npos);
  EXPECT_NE(problems.find("BigramImpl with table [16, 16], constructed after the root module"),
            std::string::npos)
      << problems;
}

}  // namespace
}  // namespace titan::train
