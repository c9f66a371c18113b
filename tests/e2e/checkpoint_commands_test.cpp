// titan checkpoint ls, info, verify, diff and prune as a user runs them. One process writes the checkpoints
// on behalf of all ranks.

#include <gtest/gtest.h>

#include <fstream>

#include <nlohmann/json.hpp>

#include "checkpoint_files.h"
#include "e2e/training.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/checkpoint/safetensors.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/dist/world.h"
#include "titan/tensor/dtensor.h"

namespace titan::testing {
namespace {

using nlohmann::json;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::StartsWith;

CommandResult titan_checkpoint(const Words& words) {
  return run(Words{titan_program(), "checkpoint"} + words);
}

std::string succeeds(const Words& words) {
  const CommandResult result = titan_checkpoint(words);
  EXPECT_EQ(result.status, 0) << result.out << result.err;
  EXPECT_EQ(result.err, "");  // no terminal, so no progress
  return result.out;
}

std::string fails(int status, const Words& words) {
  const CommandResult result = titan_checkpoint(words);
  EXPECT_EQ(result.status, status) << result.out << result.err;
  return status == 2 ? result.err : result.out;
}

// A run's folder with steps 10 and 20, a model alone as step 30, a damaged step 40, and the leftovers of a
// kill.
struct SavedRun {
  explicit SavedRun(const std::string& name) : folder(fresh_folder(name)), steps(folder / "checkpoint") {
    for (int64_t step : {10, 20, 40}) save_checkpoint(steps, small_checkpoint(step));
    fs::create_directory(steps / "step-30");
    std::ofstream(steps / "step-30/model.safetensors") << "weights";
    fs::remove(steps / "step-40" / checkpoint::file_name(2));
    fs::remove(steps / "step-40" / checkpoint::file_name(3));
    fs::create_directory(steps / ".step-50.abc.tmp");
    std::ofstream(folder / "config.toml") << "";
  }
  fs::path folder, steps;
};

std::string line_with(const std::string& text, const std::string& begin) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (line.find(begin) < line.find_first_not_of(' ') + 1) return line;
  return "";
}

TEST(CheckpointCommands, LsListsARunFolderAndItsCheckpoints) {
  const SavedRun saved("ls");
  const std::string text = succeeds({"ls", saved.folder.string()});
  EXPECT_EQ(succeeds({"ls", saved.steps.string()}), text);
  EXPECT_EQ(succeeds({"ls", saved.steps.string() + "/"}), text);
  EXPECT_THAT(text, StartsWith(saved.steps.string() + "\nstep"));
  EXPECT_THAT(
      line_with(text, "10 "),
      MatchesRegex(" *10 +1\\.2[0-9]* MB +5 +6  20[0-9-]+ [0-9:]+  titan test, torch test  complete"));
  EXPECT_THAT(line_with(text, "30 "), MatchesRegex(" *30 +7 bytes +1 +-  20[0-9-]+ [0-9:]+  - +model only"));
  EXPECT_THAT(line_with(text, "40 "),
              HasSubstr("damaged: " + (saved.steps / "step-40/rank_00002.safetensors").string() +
                        " is missing (and 1 more)"));
  EXPECT_THAT(text, HasSubstr("\n.step-50.abc.tmp: being written, or left by a killed run\n"));
}

TEST(CheckpointCommands, LsPrintsJson) {
  const SavedRun saved("ls_json");
  const json all = json::parse(succeeds({"ls", "--json", saved.folder.string()}));
  EXPECT_EQ(all["folder"], saved.steps.string());
  ASSERT_EQ(all["steps"].size(), 4u);
  EXPECT_EQ(all["steps"][0]["step"], 10);
  EXPECT_EQ(all["steps"][0]["state"], "complete");
  EXPECT_EQ(all["steps"][0]["tensors"], 6);
  EXPECT_EQ(all["steps"][2]["state"], "model only");
  EXPECT_EQ(all["steps"][3]["state"], "damaged");
  EXPECT_EQ(all["steps"][3]["problems"].size(), 2u);
  EXPECT_EQ(all["leftovers"], json::array({(saved.steps / ".step-50.abc.tmp").string()}));
}

TEST(CheckpointCommands, InfoDescribesACheckpoint) {
  const SavedRun saved("info");
  const std::string text = succeeds({"info", (saved.steps / "step-20").string()});
  EXPECT_THAT(line_with(text, "run"), HasSubstr("0123456789abcdef0123456789abcdef"));
  EXPECT_THAT(line_with(text, "step"), HasSubstr("20"));
  EXPECT_THAT(line_with(text, "tokens seen"), HasSubstr("81920"));
  EXPECT_THAT(line_with(text, "library"), HasSubstr("titan test, torch test"));
  EXPECT_THAT(line_with(text, "ranks"), HasSubstr("4 of 1 thread"));
  EXPECT_THAT(line_with(text, "mesh"), HasSubstr("dp_shard 2, tp 2"));
  EXPECT_THAT(line_with(text, "texts"),
              AllOf(HasSubstr("train_state ("), HasSubstr("dataloader ("), HasSubstr("config (")));
  EXPECT_THAT(line_with(text, "model.embedding"),
              MatchesRegex("model.embedding +float32 +\\[300, 1000\\] +dim 0 by dp_shard 2, dim 1 by tp 2"));
  EXPECT_THAT(line_with(text, "model.norm"),
              MatchesRegex("model.norm +float32 +\\[7\\] +dim 0 by dp_shard 2; 2 copies"));
  EXPECT_THAT(line_with(text, "model.scale"), MatchesRegex("model.scale +float32 +\\[\\] +whole; 4 copies"));
  EXPECT_THAT(line_with(text, "optimizer.step"), MatchesRegex("optimizer.step +int64 .*"));
}

// Printing a JSON tree uses the stack at each level.
TEST(CheckpointCommands, InfoHandlesDeeplyNestedJson) {
  CheckpointToSave save{.world_size = 1, .tensors = {{"a", at::ones({2}), {}}}};
  save.texts["train_state"] =
      R"({"tokens": )" + std::string(1'000'000, '[') + std::string(1'000'000, ']') + "}";
  const std::string step = save_checkpoint(fresh_folder("deep"), save);
  const std::string text = succeeds({"info", step});
  EXPECT_THAT(line_with(text, "texts"), HasSubstr("train_state ("));
  EXPECT_THAT(line_with(text, "tokens seen"), HasSubstr("not recorded"));
}

TEST(CheckpointCommands, InfoPrintsTensorStatistics) {
  const fs::path folder = fresh_folder("stats");
  const float inf = std::numeric_limits<float>::infinity();
  CheckpointToSave save{
      .world_size = 2,
      .tensors = {{"a", at::tensor({1.f, 2.f, 3.f, 6.f, inf, -inf}).reshape({2, 3}), {{cut("tp", 2, 1, 1)}}},
                  {"large", at::arange(5'000'000, at::kFloat).remainder(7), {{cut("tp", 2, 1, 0)}}},
                  {"none", at::empty({0}), {}},
                  {"stage", at::full({2}, -3, at::kBFloat16), {{only_on("pp", 2, 1, 1)}}}}};
  const std::string step = save_checkpoint(folder, save);
  const std::string text = succeeds({"info", "--stats", step});
  EXPECT_THAT(line_with(text, "tensor "),
              MatchesRegex("tensor +dtype +shape +mean +std +min +max +norm +not finite +layout"));
  EXPECT_THAT(line_with(text, "a "),
              MatchesRegex("a +float32 +\\[2, 3\\] +3 +1.87083 +1 +6 +7.07107 +2 +dim 1 by tp 2"));
  // 0 ... 6 repeated: mean 3 and variance 4, except for the 714286th round, which is cut short.
  EXPECT_THAT(line_with(text, "large"), MatchesRegex("large .* +3 +2 +0 +6 +8062.26 +0 +dim 0 by tp 2"));
  EXPECT_THAT(line_with(text, "none"),
              MatchesRegex("none +float32 +\\[0\\] +-?nan +-?nan +-?nan +-?nan +0 +0 +whole; 2 copies"));
  EXPECT_THAT(line_with(text, "stage"),
              MatchesRegex("stage +bfloat16 +\\[2\\] +-3 +0 +-3 +-3 +4.24264 +0 +whole; only on pp 1"));
  EXPECT_THAT(line_with(text, "finite"), HasSubstr("not all"));
  const json all = json::parse(succeeds({"info", "--stats", "--json", "--tensors", "^a$|stage", step}));
  ASSERT_EQ(all["tensors"].size(), 2u);
  EXPECT_EQ(all["tensors"][0]["stats"]["mean"], 3);
  EXPECT_EQ(all["tensors"][0]["stats"]["not_finite"], 2);
  EXPECT_EQ(all["tensors"][1]["shape"], json::array({2}));
  EXPECT_THAT(fails(2, {"info", step, "--tensors", "nothing"}),
              HasSubstr("no tensor's name matches 'nothing'"));
  EXPECT_THAT(fails(2, {"info", step, "--tensors", "("}), HasSubstr("is not a regular expression"));
}

TEST(CheckpointCommands, VerifyReportsAllDamage) {
  const SavedRun saved("verify");
  const fs::path step = saved.steps / "step-20";
  EXPECT_THAT(succeeds({"verify", step.string()}),
              AllOf(StartsWith(step.string() + " is intact: 6 tensors in 4 files, 1.2 MB read in "),
                    HasSubstr("GB/s")));
  const fs::path file = step / checkpoint::file_name(1);
  std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
  bytes.seekp(-1, std::ios::end);
  bytes.put('\x7f');
  bytes.close();
  fs::resize_file(step / checkpoint::file_name(3), 100);
  const std::string text = fails(1, {"verify", step.string(), "--threads", "2"});
  EXPECT_THAT(
      text,
      MatchesRegex(file.string() + ": tensor '[a-z.]+', block 0: the bytes don't match their checksum\n" +
                   (step / checkpoint::file_name(3)).string() + ": .*parts of .* tensors: .*\n" +
                   step.string() + " is damaged in 2 places: .*\n"));
  EXPECT_THAT(fails(1, {"verify", (saved.steps / "step-40").string()}),
              AllOf(HasSubstr("rank_00002.safetensors: is missing"),
                    HasSubstr("rank_00003.safetensors: is missing")));
}

TEST(CheckpointCommands, DiffComparesDifferentMeshes) {
  const fs::path folder = fresh_folder("diff");
  const CheckpointToSave a = small_checkpoint(5);
  CheckpointToSave b = a;
  b.run_id = "fedcba9876543210fedcba9876543210";
  b.world_size = 3;
  for (WholeTensor& tensor : b.tensors) {
    tensor.data = tensor.data.clone();
    tensor.layout =
        tensor.data.dim() > 0 ? checkpoint::TensorLayout{{cut("fsdp", 3, 1, 0)}} : checkpoint::TensorLayout{};
  }
  b.config = "[training]\nsteps = 20\n\n[job]\ndump_folder = \"elsewhere\"\n";
  const std::string in_a = save_checkpoint(folder / "a", a), same = save_checkpoint(folder / "same", b);
  EXPECT_THAT(succeeds({"diff", in_a, same}), HasSubstr("\n0 of 6 tensors differ\n"));

  const auto change = [&](const std::string& name) -> WholeTensor& {
    return *std::find_if(b.tensors.begin(), b.tensors.end(), [&](const auto& t) { return t.name == name; });
  };
  change("model.embedding").data[200][999] += 0.5;
  change("model.norm").data = change("model.norm").data.to(at::kDouble);
  change("model.output").data = at::zeros({5, 7}).to(at::kBFloat16);
  change("model.unused").name = "model.used";
  b.config = "[training]\nsteps = 40\nseed = 1\n";
  b.texts["train_state"] = R"({"step": 5, "tokens": 1})";
  b.texts.erase("dataloader");
  const std::string other = save_checkpoint(folder / "other", b);
  const std::string text = fails(1, {"diff", in_a, other});
  EXPECT_THAT(text, StartsWith("A  " + in_a +
                               ": step 5 of run 0123456789abcdef0123456789abcdef, 4 ranks, titan test"));
  EXPECT_THAT(line_with(text, "model.embedding"),
              MatchesRegex("  model.embedding: 1 of 300000 elements, first \\[200, 999\\]; max abs 0.5, "
                           "relative norm 0.0009[0-9]+"));
  EXPECT_EQ(line_with(text, "model.norm"), "  model.norm: float32 | float64, equal values");
  EXPECT_EQ(line_with(text, "model.output"), "  model.output: shape [5, 6] | [5, 7]");
  EXPECT_EQ(line_with(text, "model.unused"), "  model.unused: only in A");
  EXPECT_EQ(line_with(text, "model.used"), "  model.used: only in B");
  EXPECT_THAT(text, Not(HasSubstr("model.scale")));
  EXPECT_THAT(text,
              HasSubstr("settings that differ\n  training.seed: unset | 1\n  training.steps: 20 | 40\n"));
  EXPECT_THAT(text, HasSubstr("dataloader\n  only in A\n"));
  EXPECT_THAT(text, HasSubstr("train_state: values differ\n  /tokens: 20480 | 1\n"));
  EXPECT_THAT(text, HasSubstr("\n5 of 7 tensors differ\n"));
  EXPECT_THAT(fails(1, {"diff", in_a, other, "--tensors", "scale"}), HasSubstr("0 of 1 tensor differ"));
  EXPECT_THAT(fails(2, {"diff", in_a, other, "--tensors", "scales"}), HasSubstr("no tensor's name matches"));
}

// Converts a whole state with every kind of tensor, and a model alone.
TEST(CheckpointCommands, ConvertExtractsTheModelFromAState) {
  const SavedRun saved("convert");
  const fs::path step = saved.steps / "step-20", to = saved.folder / "model.safetensors";
  EXPECT_EQ(succeeds({"convert", step.string(), to.string()}), to.string() + "\n");
  const CheckpointToSave expected = small_checkpoint(20);
  const SafetensorsFile model(to);
  EXPECT_THAT(model.names(),
              ::testing::UnorderedElementsAre("embedding", "norm", "output", "scale", "unused"));
  for (const std::string& name : model.names()) {
    const at::Tensor& data = data_of(expected, "model." + name);
    EXPECT_EQ(model.info(name).dtype, data.scalar_type()) << name;
    EXPECT_TRUE(at::equal(model.tensor(name), data)) << name;
  }
  const fs::path in_bf16 = saved.folder / "bf16.safetensors";
  succeeds({"convert", step.string(), in_bf16.string(), "--dtype", "bfloat16"});
  EXPECT_TRUE(at::equal(SafetensorsFile(in_bf16).tensor("embedding"),
                        data_of(expected, "model.embedding").to(at::kBFloat16)));

  const std::string new_folder = (saved.folder / "hf").string(), new_file = new_folder + ".safetensors";
  EXPECT_THAT(fails(2, {"convert", step.string(), new_folder}),
              HasSubstr("manifest.json doesn't say which model it is; add --config"));
  // A second time: nothing is replaced.
  const auto written = fs::last_write_time(to);
  EXPECT_THAT(fails(2, {"convert", step.string(), to.string()}),
              HasSubstr(to.string() + " exists already; remove it or choose another name"));
  EXPECT_EQ(fs::last_write_time(to), written);
  // Damages rank 1's half, which is read after rank 0's.
  const fs::path file = step / checkpoint::file_name(1);
  std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
  bytes.seekp(-20'000, std::ios::end);
  bytes.put('\x7f');
  bytes.close();
  const CommandResult damaged = titan_checkpoint({"convert", step.string(), new_file});
  EXPECT_EQ(damaged.status, 1);
  EXPECT_THAT(damaged.err, AllOf(HasSubstr(file.string()), HasSubstr("'model.embedding' is damaged")));
  EXPECT_FALSE(fs::exists(new_file));
}

// The weights of a file in several files, as several ranks write them.
void save_in_several_files(const fs::path& step, const SafetensorsFile& weights, const std::string& config) {
  const dist::World world = dist::init({.backend = "gloo", .device = "cpu"});
  const DeviceMesh mesh = DeviceMesh::create(world, {{"dp", 1}});
  std::vector<Parameter> parameters;
  for (const std::string& name : weights.names()) {
    parameters.emplace_back().name = name;
    parameters.back().data = distribute(weights.tensor(name), mesh, {Placement::replicate()});
  }
  fs::create_directories(step.parent_path());
  ModelSaveOptions options;
  options.folder = {.shard_bytes = 100'000, .config = config, .step = 9};
  save_model(parameters, world, step, options);
}

void expect_same_weights(const fs::path& file, const SafetensorsFile& expected) {
  const SafetensorsFile weights(file);
  EXPECT_THAT(weights.names(), ::testing::UnorderedElementsAreArray(expected.names()));
  for (const std::string& name : expected.names())
    EXPECT_TRUE(at::equal(weights.tensor(name), expected.tensor(name))) << name;
}

TEST(CheckpointCommands, HandlesAModelAloneOfSeveralFiles) {
  const fs::path folder = fresh_folder("alone"), step = folder / "checkpoint/step-9";
  const std::string mini = source_file("tests/data/parity/mini");
  const SafetensorsFile weights(mini + "/titan.safetensors");
  const auto losses_from = [&](const std::string& name, const fs::path& path) {
    return losses(train(folder / name, {mini + "/replay.toml", "--training.dataset_path", mini,
                                        "--training.steps", "1", "--lr_scheduler.warmup_steps", "1",
                                        "--checkpoint.initial_load_path", path.string()}));
  };
  const auto expected = losses_from("one_file", weights.path());
  save_in_several_files(step, weights,
                        checkpoint::read_model_manifest(folder / "one_file/checkpoint/step-1").config);
  ASSERT_TRUE(fs::exists(step / "model.safetensors.index.json"));
  EXPECT_THAT(succeeds({"ls", step.parent_path().string()}), HasSubstr("model only"));
  EXPECT_THAT(fails(2, {"info", step.string()}), HasSubstr("holds only a model; `titan checkpoint info`"));
  EXPECT_THAT(succeeds({"verify", step.string()}), HasSubstr("is intact"));
  EXPECT_EQ(losses_from("several_files", step), expected);

  const std::string joined = folder / "joined.safetensors", hf = folder / "hf", back = hf + ".safetensors";
  succeeds({"convert", step.string(), joined});
  expect_same_weights(joined, weights);
  succeeds({"convert", step.string(), hf});  // the manifest has the run's settings
  succeeds({"convert", hf, back});
  expect_same_weights(back, weights);

  // People who change weights remove the manifest.
  const fs::path unlisted = folder / "unlisted";
  fs::copy(step, unlisted);
  fs::remove(unlisted / "model_manifest.json");
  EXPECT_EQ(losses_from("without_manifest", unlisted), expected);

  const fs::path last = [&] {
    fs::path found;
    for (const auto& entry : fs::directory_iterator(step))
      if (entry.path().extension() == ".safetensors") found = std::max(found, entry.path());
    return found;
  }();
  fs::resize_file(last, 50);
  EXPECT_THAT(fails(1, {"verify", step.string()}), HasSubstr(last.filename().string() + ": has 50 bytes"));
  EXPECT_THAT(succeeds({"ls", step.parent_path().string()}), HasSubstr("damaged: "));
}

TEST(CheckpointCommands, PruneKeepsTheRequestedSteps) {
  const SavedRun saved("prune");
  const auto left = [&] {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(saved.steps))
      names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  };
  const std::vector<std::string> before = left();
  const std::string dry = succeeds({"prune", saved.folder.string(), "--keep", "1", "--dry-run"});
  EXPECT_EQ(dry, str("would remove ", (saved.steps / ".step-50.abc.tmp").string(),
                     ", unless a run writes here\nwould remove ", (saved.steps / "step-10").string(),
                     "\n3 steps of 4 would stay\n"));
  EXPECT_EQ(left(), before);
  {
    const checkpoint::FolderLock lock(saved.steps);
    const CommandResult refused = titan_checkpoint({"prune", saved.folder.string(), "--keep", "1"});
    EXPECT_EQ(refused.status, 1);
    EXPECT_THAT(refused.err,
                HasSubstr(str(saved.steps.string(), " is being written to by process ", getpid())));
  }
  const CommandResult pruned = titan_checkpoint({"prune", saved.folder.string(), "--keep", "1"});
  EXPECT_EQ(pruned.out, str("removed ", (saved.steps / "step-10").string(), "\n3 steps of 4 stay\n"));
  // The damaged step is the newest, so the good one before it is kept; the model is never removed.
  EXPECT_THAT(left(), ::testing::ElementsAre(".lock", "step-20", "step-30", "step-40"));
}

TEST(CheckpointCommands, ExplainsAWrongFolder) {
  const SavedRun saved("wrong");
  const std::string steps = saved.steps.string(), newest = steps + "/step-40";
  for (const char* command : {"info", "verify"}) {
    EXPECT_THAT(fails(2, {command, steps + "/step-50"}),
                HasSubstr("there is no folder " + steps + "/step-50 in " + steps +
                          "; the newest step in it is " + newest));
    EXPECT_THAT(fails(2, {command, steps + "/step-30"}), HasSubstr("holds only a model"));
    EXPECT_THAT(fails(2, {command, steps + "/step-20/manifest.json"}), HasSubstr("is a file, not a folder"));
  }
  EXPECT_THAT(fails(2, {"ls", steps + "/step-20"}),
              HasSubstr("is one step; give the folder that holds it: " + steps));
  const fs::path empty = fresh_folder("empty");
  EXPECT_THAT(fails(2, {"ls", empty.string()}), HasSubstr("there are no checkpoints in " + empty.string()));
  EXPECT_THAT(fails(2, {"verify", empty.string()}),
              HasSubstr("is not a checkpoint: it has no manifest.json"));
  EXPECT_THAT(fails(2, {"prune", empty.string() + "/none", "--keep", "1"}), HasSubstr("there is no folder"));
  EXPECT_THAT(fails(2, {"show"}), HasSubstr("unknown command 'show'"));
  std::ofstream(empty / ".lock") << "";
  EXPECT_EQ(succeeds({"ls", empty.string()}), "no steps in " + empty.string() + "\n");
}

// The newest step with a state, or for convert, which reads models too, of any kind.
TEST(CheckpointCommands, TakeTheNewestStepOfARunAndSayWhich) {
  const SavedRun saved("newest");
  std::ofstream(saved.folder / "config.json") << "{}";  // as job.save_config_file = "config.json" does
  const auto taking = [](const std::string& command, const fs::path& step) {
    return str("titan checkpoint ", command, ": taking the newest step, ", step.string(), "\n");
  };
  for (const fs::path& run_folder : {saved.folder, saved.steps, saved.steps / ""}) {
    const CommandResult damaged = titan_checkpoint({"verify", run_folder.string()});
    EXPECT_EQ(damaged.status, 1);
    EXPECT_EQ(damaged.err, taking("verify", saved.steps / "step-40"));
    EXPECT_THAT(damaged.out, HasSubstr("is damaged in 2 places"));
  }
  fs::remove_all(saved.steps / "step-40");
  const CommandResult verified = titan_checkpoint({"verify", saved.folder.string()});
  EXPECT_EQ(verified.status, 0);
  EXPECT_EQ(verified.err, taking("verify", saved.steps / "step-20"));  // step 30 holds only a model
  const CommandResult info = titan_checkpoint({"info", saved.folder.string(), "--json"});
  EXPECT_EQ(info.err, taking("info", saved.steps / "step-20"));
  EXPECT_EQ(json::parse(info.out)["step"], 20);
  const fs::path to = fresh_folder("converted") / "model.safetensors";
  EXPECT_THAT(titan_checkpoint({"convert", saved.folder.string(), to.string()}).err,
              HasSubstr(taking("convert", saved.steps / "step-30")));
  fs::remove_all(saved.steps / "step-30");
  const CommandResult converted = titan_checkpoint({"convert", saved.folder.string(), to.string()});
  EXPECT_EQ(converted.out, to.string() + "\n");
  EXPECT_EQ(converted.err, taking("convert", saved.steps / "step-20"));
  EXPECT_EQ(SafetensorsFile(to).names().size(), 5u);
  EXPECT_THAT(fails(2, {"diff", saved.folder.string(), saved.folder.string()}),
              HasSubstr("is a run's folder, not a step's; the newest step in it is "));
  fs::remove_all(saved.steps / "step-10");
  fs::remove_all(saved.steps / "step-20");
  fs::create_directory(saved.steps / "step-60");
  std::ofstream(saved.steps / "step-60/model.safetensors") << "weights";
  EXPECT_THAT(fails(2, {"verify", saved.folder.string()}), HasSubstr("hold only models"));
}

TEST(CheckpointCommands, HelpNamesEveryOption) {
  EXPECT_THAT(succeeds({"--help"}), AllOf(HasSubstr("verify FOLDER [--threads N]"),
                                          HasSubstr("convert FROM TO"), HasSubstr("a step's model")));
  const std::map<std::string, Words> options = {{"ls", {"FOLDER", "--json"}},
                                                {"info", {"FOLDER", "--stats", "--tensors REGEX", "--json"}},
                                                {"verify", {"FOLDER", "--threads N"}},
                                                {"diff", {"A B", "--tensors REGEX"}},
                                                {"prune", {"FOLDER", "--keep K", "--dry-run", "--force"}},
                                                {"convert", {"FROM TO", "--config FILE", "--dtype DTYPE"}}};
  for (const auto& [command, words] : options) {
    const std::string help = succeeds({command, "--help"});
    EXPECT_THAT(help, StartsWith("usage: titan checkpoint " + command));
    for (const std::string& word : words) EXPECT_THAT(help, HasSubstr(word));
  }
}

}  // namespace
}  // namespace titan::testing
