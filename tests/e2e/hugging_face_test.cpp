// Runs that read and write Hugging Face folders on several layouts, and `titan checkpoint convert`.

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "e2e/training.h"

namespace titan::testing {
namespace {

const std::string kMini = source_file("tests/data/parity/mini");
const std::string kConfig = kMini + "/replay.toml";

Words replay_from_weights(const std::string& steps) {
  return {kConfig, "--training.dataset_path",     kMini, "--training.steps",
          steps,   "--lr_scheduler.warmup_steps", "1"};
}

CommandResult convert(const fs::path& from, const fs::path& to, const Words& words = {}) {
  return run(Words{titan_program(), "checkpoint", "convert", from.string(), to.string()} + words);
}

void expect_converted(const fs::path& from, const fs::path& to, const Words& words = {}) {
  const CommandResult result = convert(from, to, words);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.out, to.string() + "\n");
  EXPECT_EQ(result.err, "");  // no terminal, so no progress
}

std::string bytes_of_file(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  EXPECT_TRUE(stream) << file;
  return {std::istreambuf_iterator<char>(stream), {}};
}

// The recorded weights as a folder of several shards.
fs::path recorded_folder(const fs::path& below) {
  const fs::path folder = below / "hf";
  expect_converted(kMini + "/titan.safetensors", folder, {"--config", kConfig, "--shard-gb", "0.0001"});
  EXPECT_TRUE(fs::exists(folder / "model.safetensors.index.json"));
  return folder;
}

struct WeightLayout {
  const char* name;
  Words words;
};

void PrintTo(const WeightLayout& layout, std::ostream* out) { *out << layout.name; }

class HuggingFaceLayouts : public ::testing::TestWithParam<WeightLayout> {};

TEST_P(HuggingFaceLayouts, ReadsAndWritesFolders) {
  const fs::path folder = fresh_folder("runs"), weights = recorded_folder(folder);
  const fs::path ours = folder / "ours", theirs = folder / "theirs", step = "checkpoint/step-2";
  const Words in_file = {"--checkpoint.initial_load_path", kMini + "/titan.safetensors"};
  const Words in_folder = {"--checkpoint.initial_load_path", weights.string(),
                           "--checkpoint.initial_load_in_hf", "--checkpoint.last_save_in_hf"};
  const auto expected = losses(train(ours, replay_from_weights("2") + in_file + GetParam().words));
  EXPECT_EQ(losses(train(theirs, replay_from_weights("2") + in_folder + GetParam().words)), expected);
  // Both runs end with the same weights.
  expect_converted(theirs / step, folder / "theirs.safetensors");
  expect_converted(ours / step / "model.safetensors", folder / "through", {"--config", kConfig});
  expect_converted(folder / "through", folder / "ours.safetensors", {"--config", kConfig});
  EXPECT_EQ(bytes_of_file(folder / "theirs.safetensors"), bytes_of_file(folder / "ours.safetensors"));
}

INSTANTIATE_TEST_SUITE_P(
    All, HuggingFaceLayouts,
    ::testing::Values(WeightLayout{"One", {}},
                      WeightLayout{"Fsdp2", {"--nproc", "2", "--training.local_batch_size", "2"}},
                      WeightLayout{"Tp2", {"--nproc", "2", "--parallelism.tensor_parallel_degree", "2"}},
                      WeightLayout{"Pp2", {"--nproc", "2", "--parallelism.pipeline_parallel_degree", "2"}}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(HuggingFace, SupportsATiedMatrixOnTwoStages) {
  const fs::path folder = fresh_folder("run");
  const Words tied =
      replay_from_weights("2") + Words{"--model.args.tie_embeddings", "--checkpoint.initial_load_path",
                                       "none", "--checkpoint.last_save_in_hf"};
  const Words stages = {"--nproc", "2", "--parallelism.pipeline_parallel_degree", "2"};
  train(folder / "first", tied + stages);
  const fs::path weights = folder / "first/checkpoint/step-2";
  EXPECT_THAT(bytes_of_file(weights / "config.json"), HasSubstr("\"tie_word_embeddings\": true"));
  EXPECT_THAT(bytes_of_file(weights / "model.safetensors").substr(0, 8192), Not(HasSubstr("lm_head")));
  const Words again =
      tied + Words{"--checkpoint.initial_load_path", weights.string(), "--checkpoint.initial_load_in_hf"};
  const auto one = losses(train(folder / "one", again)), two = losses(train(folder / "two", again + stages));
  ASSERT_EQ(one.size(), 2u);
  for (size_t step = 0; step < one.size(); ++step) EXPECT_NEAR(two[step], one[step], 5e-6);
}

TEST(HuggingFace, CopiesTheTokenizer) {
  const fs::path folder = fresh_folder("run"), weights = recorded_folder(folder), assets = folder / "assets";
  fs::copy(weights, assets);
  std::ofstream(assets / "tokenizer.json") << "{}";
  std::ofstream(assets / "chat_template.jinja") << "a template";
  std::ofstream(assets / "notes.txt") << "not part of a tokenizer";
  // Without initial_load_path the assets' folder is used.
  train(folder / "out", replay_from_weights("1") +
                            Words{"--checkpoint.initial_load_path", "none", "--checkpoint.initial_load_in_hf",
                                  "--checkpoint.last_save_in_hf", "--model.hf_assets_path", assets.string(),
                                  "--checkpoint.export_dtype", "bfloat16"});
  const fs::path step = folder / "out/checkpoint/step-1";
  EXPECT_EQ(bytes_of_file(step / "tokenizer.json"), "{}");
  EXPECT_EQ(bytes_of_file(step / "chat_template.jinja"), "a template");
  EXPECT_FALSE(fs::exists(step / "notes.txt"));
  EXPECT_THAT(bytes_of_file(step / "config.json"), HasSubstr("\"torch_dtype\": \"bfloat16\""));
}

nlohmann::json read_json(const fs::path& file) { return nlohmann::json::parse(bytes_of_file(file)); }

TEST(HuggingFace, AutoTakesTheModelFromTheFolder) {
  const fs::path folder = fresh_folder("run"), weights = recorded_folder(folder);
  const Words words = {"--model.name",
                       "auto",
                       "--model.hf_assets_path",
                       weights.string(),
                       "--training.dataset",
                       "tokens",
                       "--training.dataset_path",
                       kMini,
                       "--training.seq_len",
                       "64",
                       "--training.local_batch_size",
                       "4",
                       "--training.steps",
                       "2",
                       "--training.mixed_precision_param",
                       "float32",
                       "--lr_scheduler.warmup_steps",
                       "1",
                       "--lr_scheduler.decay_ratio",
                       "0.8",
                       "--metrics.log_freq",
                       "1",
                       "--checkpoint.enable",
                       "--checkpoint.initial_load_in_hf"};
  EXPECT_EQ(losses(train(folder / "auto", words)),
            losses(train(folder / "named", replay_from_weights("2") + Words{"--checkpoint.initial_load_path",
                                                                            kMini + "/titan.safetensors"})));
  // The run doesn't need the folder's config any more.
  EXPECT_THAT(bytes_of_file(folder / "auto/config.toml"),
              AllOf(HasSubstr("name = \"llama3\""), HasSubstr("dim = 64")));
  const CommandResult flavor = try_train(words + Words{"--model.flavor", "8B"});
  EXPECT_EQ(flavor.status, 2);
  EXPECT_THAT(flavor.err, HasSubstr("isn't read with model.name = \"auto\""));
  nlohmann::json config = read_json(weights / "config.json");
  config["architectures"] = nlohmann::json::array({"GPT2LMHeadModel"});
  std::ofstream(weights / "config.json") << config;
  const CommandResult unknown = try_train(words);
  EXPECT_EQ(unknown.status, 2);
  EXPECT_THAT(unknown.err, HasSubstr("\"GPT2LMHeadModel\", of no registered model; known: "
                                     "\"LlamaForCausalLM\" (llama3)"));
}

TEST(HuggingFace, ExportKeepsTheValuesOfTheConfigItCameFrom) {
  const fs::path folder = fresh_folder("run"), weights = recorded_folder(folder);
  nlohmann::json source = read_json(weights / "config.json");
  const nlohmann::json kept = {{"bos_token_id", 1},
                               {"eos_token_id", {2, 3}},
                               {"max_position_embeddings", 77},
                               {"id2label", {{"0", "zero"}}},
                               {"empty", nlohmann::json::object()}};
  source.update(kept);
  source["dtype"] = "bfloat16";
  const auto exported = [&](const std::string& name, const Words& words) {
    std::ofstream(weights / "config.json") << source;
    train(folder / name, replay_from_weights("1") +
                             Words{"--checkpoint.initial_load_path", "none", "--checkpoint.last_save_in_hf",
                                   "--model.hf_assets_path", weights.string()} +
                             words);
    return read_json(folder / name / "checkpoint/step-1/config.json");
  };
  const nlohmann::json config = exported("same", {"--checkpoint.initial_load_in_hf"});
  for (const auto& [key, value] : kept.items()) EXPECT_EQ(config.at(key), value) << key;
  EXPECT_EQ(config.at("torch_dtype"), "float32");
  EXPECT_FALSE(config.contains("dtype"));
  // Another model's values don't belong into this one's config.
  source["hidden_size"] = 128;
  const nlohmann::json other = exported("other", {});
  EXPECT_EQ(other.at("hidden_size"), 64);
  EXPECT_TRUE(other.at("bos_token_id").is_null());
  EXPECT_FALSE(other.contains("id2label"));
}

TEST(HuggingFace, ReportsAllDifferencesBeforeTheStart) {
  const fs::path folder = fresh_folder("run"), weights = recorded_folder(folder);
  const CommandResult result =
      try_train(replay_from_weights("1") + Words{"--checkpoint.initial_load_path", weights.string(),
                                                 "--checkpoint.initial_load_in_hf", "--model.args.n_heads",
                                                 "2", "--model.args.rope_scaling.scaling_factor", "32",
                                                 "--model.args.tie_embeddings"});
  EXPECT_EQ(result.status, 2);
  const std::string file = " in " + (weights / "config.json").string();
  for (const char* expected :
       {"model.args.n_heads = 2 in the config, num_attention_heads 4",
        "model.args.rope_scaling.scaling_factor = 32.0 in the config, rope_scaling.factor 8.0",
        "model.args.tie_embeddings = true in the config, tie_word_embeddings false"})
    EXPECT_THAT(result.err, HasSubstr(expected + file));
  EXPECT_THAT(result.err, AllOf(HasSubstr("3 problems"), Not(HasSubstr("head_dim"))));
}

TEST(HuggingFace, NamesTheSettingThatAFolderNeeds) {
  const fs::path weights = recorded_folder(fresh_folder("run"));
  const Words words = replay_from_weights("1") + Words{"--checkpoint.initial_load_path", weights.string()};
  const auto expect_refused = [&] {
    const CommandResult result = try_train(words);
    EXPECT_EQ(result.status, 2);
    EXPECT_THAT(result.err, AllOf(HasSubstr("has Hugging Face's names; set checkpoint.initial_load_in_hf"),
                                  Not(HasSubstr("is missing"))));
  };
  expect_refused();
  fs::remove(weights / "model_manifest.json");
  expect_refused();
}

// A run's model after the last step, extracted from the whole state of that step.
void expect_state_converts(const std::string& name, const Words& layout, const std::string& dtype) {
  SCOPED_TRACE(name);
  const fs::path folder = fresh_folder(name);
  const Words words = replay_from_weights("2") + layout +
                      Words{"--checkpoint.initial_load_path", kMini + "/titan.safetensors"};
  train(folder / "alone", words + Words{"--checkpoint.export_dtype", dtype});
  train(folder / "whole", words + Words{"--checkpoint.no_last_save_model_only"});
  const fs::path step = folder / "whole/checkpoint/step-2";
  ASSERT_TRUE(fs::exists(step / "manifest.json"));
  const Words in_dtype = {"--dtype", dtype};
  expect_converted(step, folder / "model.safetensors", in_dtype);
  const std::string expected = bytes_of_file(folder / "alone/checkpoint/step-2/model.safetensors");
  ASSERT_GT(expected.size(), 100'000u);
  EXPECT_TRUE(bytes_of_file(folder / "model.safetensors") == expected);
  // The saved config describes the model, so --config isn't needed.
  expect_converted(step, folder / "hf", in_dtype);
  expect_converted(folder / "hf", folder / "back.safetensors", {"--config", kConfig});
  EXPECT_TRUE(bytes_of_file(folder / "back.safetensors") == expected);
  // The same from a model that a run saved alone, given the name of its folder.
  expect_converted(folder / "alone/checkpoint/step-2", folder / "hf_of_alone", {"--config", kConfig});
  EXPECT_TRUE(bytes_of_file(folder / "hf_of_alone/model.safetensors") ==
              bytes_of_file(folder / "hf/model.safetensors"));
}

TEST(Convert, ExtractsTheModelFromAStateOfAnyMesh) {
  expect_state_converts(
      "fsdp_tp",
      {"--nproc", "4", "--training.local_batch_size", "2", "--parallelism.tensor_parallel_degree", "2"},
      "float32");
  expect_state_converts("pp", {"--nproc", "2", "--parallelism.pipeline_parallel_degree", "2"}, "bfloat16");
}

TEST(Convert, ExplainsWhatItCannotDo) {
  const fs::path folder = fresh_folder("run"), weights = recorded_folder(folder);
  const std::string file = kMini + "/titan.safetensors";
  const auto problem = [&](const CommandResult& result) {
    EXPECT_EQ(result.status, 2) << result.err;
    return result.err;
  };
  EXPECT_THAT(problem(convert(file, folder / "new")), HasSubstr("add --config"));
  EXPECT_THAT(problem(convert(file, folder / "new.safetensors")), HasSubstr("is one file already"));
  EXPECT_THAT(problem(convert(folder / "gone", folder / "new")), HasSubstr("there is nothing at"));
  EXPECT_THAT(problem(convert(file, weights, {"--config", kConfig})), HasSubstr("exists already"));
  EXPECT_THAT(problem(convert(file, folder / "new", {"--config", source_file("configs/llama3_8b.toml")})),
              HasSubstr("'layers.31.attention.wq.weight' is missing"));
  EXPECT_THAT(problem(convert(weights, folder / "new.safetensors",
                              {"--config", source_file("configs/llama3_8b.toml")})),
              HasSubstr("model.args.dim = 4096 in the config, hidden_size 64 in "));
  EXPECT_THAT(problem(convert(weights, folder / "new")),
              HasSubstr("hf is a Hugging Face folder already; give TO a name that ends in .safetensors"));
  // Without config.json, Hugging Face's names would pass for titan's.
  const std::string no_config = "hf has Hugging Face's names but no config.json";
  fs::remove(weights / "config.json");
  EXPECT_THAT(problem(convert(weights, folder / "new.safetensors")), HasSubstr(no_config));
  fs::remove(weights / "model_manifest.json");
  EXPECT_THAT(problem(convert(weights, folder / "new.safetensors")), HasSubstr(no_config));
  EXPECT_FALSE(fs::exists(folder / "new.safetensors"));
  EXPECT_THAT(problem(run({titan_program(), "checkpoint", "transform"})), HasSubstr("convert"));
  EXPECT_FALSE(fs::exists(folder / "new"));
  const CommandResult help = run({titan_program(), "checkpoint", "--help"});
  EXPECT_EQ(help.status, 0);
  EXPECT_THAT(help.out, HasSubstr("convert FROM TO"));
}

}  // namespace
}  // namespace titan::testing
