// Writing, reading and refusing folders in Hugging Face's form.

#include "titan/checkpoint/hugging_face.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "checkpoint_files.h"
#include "core/file.h"
#include "titan/core/error.h"
#include "unit/checkpoint/temp_folder.h"

namespace titan {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::TempFolder;

// Two heads of four rows, and a vector.
HfModel toy() {
  return {.config = {{"architectures.0", "Toy"}, {"size", int64_t{6}}, {"rope.base", 1e4}, {"eos", {}}},
          .tensors = {{"a.wq", "x.q", {8, 6}, 4}, {"b", "x.b", {10}, 0}},
          .ignored = {"x.table"}};
}

std::vector<std::pair<std::string, at::Tensor>> toy_weights() {
  return {{"a.wq", at::randn({8, 6})}, {"b", at::randn({10})}};
}

std::string problems_of(const fs::path& folder, const HfModel& model = toy()) {
  try {
    const HfFolder files(folder);
    auto problems = tensor_differences(files, model);
    if (problems.empty()) return "";
    throw ConfigError(std::move(problems));
  } catch (const Error& error) {
    return error.what();
  }
}

void write(const fs::path& path, const std::string& text) { write_file_atomic(path, text); }

// A sound folder of two shards.
class Sharded : public ::testing::Test {
 protected:
  void SetUp() override {
    save_safetensors(folder / "ours.safetensors", weights);
    convert_to_hf(folder / "ours.safetensors", hf, toy(),
                  {.dtype = {}, .folder = {.shard_bytes = 200, .assets = {}}});
  }
  void set_index(const std::string& map) {
    write(hf / "model.safetensors.index.json", "{\"weight_map\": {" + map + "}}");
  }

  TempFolder folder;
  fs::path hf = folder / "hf";
  std::vector<std::pair<std::string, at::Tensor>> weights = toy_weights();
  const std::string first = "model-00001-of-00002.safetensors", second = "model-00002-of-00002.safetensors";
};

TEST_F(Sharded, RoundTripsTheWeights) {
  EXPECT_EQ(problems_of(hf), "");
  const HfFolder files(hf);
  EXPECT_EQ(files.files().size(), 2u);
  EXPECT_EQ(files.file_of("x.q").path().filename(), first);
  EXPECT_EQ(files.file_of("x.b").metadata().at("format"), "pt");
  EXPECT_TRUE(at::equal(files.file_of("x.q").tensor("x.q"),
                        reorder_rows(weights[0].second, 4, RowOrder::HuggingFace)));
  convert_from_hf(hf, folder / "back.safetensors", toy());
  for (const auto& [name, values] : weights)
    EXPECT_TRUE(at::equal(SafetensorsFile(folder / "back.safetensors").tensor(name), values));
}

TEST_F(Sharded, RoundTripsTheConfig) {
  HfConfig expected = toy().config;
  expected["torch_dtype"] = "float32";
  EXPECT_EQ(read_hf_config(hf), expected);
  HfConfig other = toy().config;
  other["size"] = int64_t{7};
  other["eos"] = int64_t{2};
  other["max_position_embeddings"] = int64_t{8};
  EXPECT_THAT(differing_keys(other, toy().config), ElementsAre("eos", "size"));
  EXPECT_EQ(value_text(other, "size"), "7");
  EXPECT_EQ(value_text(other, "rope"), "unset");
}

TEST_F(Sharded, KeepsAnExistingFolder) {
  write(hf / "note", "mine");
  convert_to_hf(folder / "ours.safetensors", hf, toy(), {.dtype = at::kBFloat16});
  EXPECT_EQ(read_file(folder / "hf.old/note"), "mine");
  EXPECT_EQ(std::get<std::string>(read_hf_config(hf).at("torch_dtype")), "bfloat16");
  EXPECT_FALSE(fs::exists(hf / "model.safetensors.index.json"));
  EXPECT_TRUE(at::equal(HfFolder(hf).file_of("x.b").tensor("x.b"), weights[1].second.to(at::kBFloat16)));
}

TEST_F(Sharded, LeavesNothingAfterAFailure) {
  const HfTensor tensor = toy().tensors[1];
  const auto fail = [](size_t, const AppendTensor&) { throw Error("disk gone"); };
  EXPECT_THROW(write_hf_folder(folder / "new", toy(), {{&tensor, at::kFloat}}, {}, fail), Error);
  const auto too_few = [](size_t, const AppendTensor& append) { append(at::zeros({9})); };
  EXPECT_THROW(write_hf_folder(folder / "new", toy(), {{&tensor, at::kFloat}}, {}, too_few), Error);
  for (const auto& entry : fs::directory_iterator(folder.path()))
    EXPECT_TRUE(entry.path().filename() == "hf" || entry.path().filename() == "ours.safetensors") << entry;
}

TEST_F(Sharded, WritesInPlaceOnRequest) {
  const HfTensor tensor = toy().tensors[1];
  fs::create_directory(folder / "there");
  const auto zeros = [&](size_t, const AppendTensor& append) { append(at::zeros(tensor.shape)); };
  write_hf_folder(folder / "there", toy(), {{&tensor, at::kFloat}}, {.in_place = true}, zeros);
  EXPECT_TRUE(fs::exists(folder / "there/config.json"));
  EXPECT_TRUE(fs::exists(folder / "there/model.safetensors"));
  EXPECT_FALSE(fs::exists(folder / "there.old"));
}

TEST_F(Sharded, RefusesFilesOutsideTheFolder) {
  fs::remove(hf / "model_manifest.json");
  fs::copy_file(hf / second, folder / "out.safetensors");
  for (const std::string name : {"../out.safetensors", "/etc/passwd", "sub/x.safetensors", "..",
                                 ".hidden.safetensors", "a\\u0000.safetensors"}) {
    set_index("\"x.q\": \"" + first + "\", \"x.b\": \"" + name + "\"");
    EXPECT_THAT(problems_of(hf), HasSubstr("allowed: the name of a .safetensors file in the folder")) << name;
  }
  fs::create_symlink(folder / "out.safetensors", hf / "link.safetensors");
  set_index("\"x.q\": \"" + first + "\", \"x.b\": \"link.safetensors\"");
  EXPECT_THAT(problems_of(hf), HasSubstr("outside the folder"));
  fs::remove(hf / "link.safetensors");
  fs::create_symlink(second, hf / "link.safetensors");
  EXPECT_EQ(problems_of(hf), "");
}

TEST_F(Sharded, RefusesAnIndexThatContradictsTheShards) {
  fs::remove(hf / "model_manifest.json");
  const std::string q = "\"x.q\": \"" + first + "\"", b = "\"x.b\": \"" + second + "\"";
  set_index(q + ", \"x.b\": \"" + first + "\"");
  EXPECT_THAT(problems_of(hf), HasSubstr("'x.b' is missing, although the index lists it"));
  set_index(q + ", \"x.b\": \"gone.safetensors\"");
  EXPECT_THAT(problems_of(hf), HasSubstr("gone.safetensors"));
  fs::copy_file(hf / second, hf / "third.safetensors");
  set_index(q + ", " + b + ", \"x.c\": \"third.safetensors\"");
  EXPECT_THAT(problems_of(hf), HasSubstr("'x.b' is in another file too"));
  set_index(q + ", " + q + ", " + b);
  EXPECT_THAT(problems_of(hf), HasSubstr("duplicate key 'x.q'"));
  set_index(q);
  EXPECT_THAT(problems_of(hf), HasSubstr("'x.b' is missing"));
  set_index("");
  EXPECT_THAT(problems_of(hf), HasSubstr("names no tensors"));
  set_index("\"x.q\": {\"file\": 1}, \"x.b\": 3");
  EXPECT_THAT(problems_of(hf), HasSubstr("allowed: the name"));
  fs::copy_file(hf / second, hf / "model.safetensors");
  EXPECT_THAT(problems_of(hf), HasSubstr("remove one of them"));
}

TEST_F(Sharded, IsComparedWithItsManifest) {
  const auto damages = [&] {
    std::string text;
    for (const checkpoint::Damage& damage : checkpoint::verify_step(hf).damages)
      text += to_string(damage) + "\n";
    return text;
  };
  EXPECT_EQ(damages(), "");
  EXPECT_EQ(checkpoint::verify_step(hf).num_tensors, 2);
  const std::string sound = read_file(hf / second), index = read_file(hf / "model.safetensors.index.json");

  std::string flipped = sound;
  flipped.back() ^= 1;  // in the last number
  write(hf / second, flipped);
  EXPECT_THAT(damages(), HasSubstr(second + ": tensor 'x.b', block 0: the bytes don't match their checksum"));
  EXPECT_EQ(problems_of(hf), "");  // found when the tensor is read
  EXPECT_THROW(convert_from_hf(hf, folder / "no.safetensors", toy()), ConfigError);
  EXPECT_FALSE(fs::exists(folder / "no.safetensors"));

  flipped = sound;
  flipped[sound.find("xxh3:") + 5] ^= 1;  // still a checksum
  write(hf / second, flipped);
  EXPECT_THAT(problems_of(hf), AllOf(HasSubstr("its header has digest"), HasSubstr("remove ")));
  EXPECT_THAT(damages(), HasSubstr("its header has digest"));
  write(hf / second, sound);

  write(hf / "model.safetensors.index.json", index + " ");
  EXPECT_THAT(problems_of(hf), HasSubstr("model.safetensors.index.json: has digest"));
  EXPECT_THAT(damages(), HasSubstr("model.safetensors.index.json: has digest"));
  write(hf / "model.safetensors.index.json", index);

  // A person may add to the text files; that isn't damage to the weights.
  write(hf / "config.json", read_file(hf / "config.json") + " ");
  EXPECT_EQ(problems_of(hf), "");
  EXPECT_THAT(damages(), HasSubstr("config.json: has digest"));

  write(hf / "model_manifest.json", "{}");
  EXPECT_THAT(problems_of(hf), HasSubstr("not a checkpoint's manifest"));
  fs::remove(hf / "model_manifest.json");
  EXPECT_EQ(problems_of(hf), "");
}

TEST_F(Sharded, ListsAllDifferentTensorsTogether) {
  HfModel model = toy();
  model.tensors[0].shape = {4, 6};
  model.tensors[1].hf_name = "x.other";
  const std::string problems = problems_of(hf, model);
  EXPECT_THAT(problems, HasSubstr("'x.q' has shape [8, 6], the model's has [4, 6]"));
  EXPECT_THAT(problems, HasSubstr("'x.other' is missing"));
  EXPECT_THAT(problems, HasSubstr("'x.b' isn't part of the model"));
  EXPECT_THROW(convert_from_hf(hf, folder / "no.safetensors", model), ConfigError);
  EXPECT_FALSE(fs::exists(folder / "no.safetensors"));
}

TEST_F(Sharded, IgnoresOldTables) {
  fs::remove(hf / "model_manifest.json");
  save_safetensors(hf / second, {{"x.b", at::zeros({10})}, {"x.table", at::zeros({3})}}, {});
  set_index("\"x.q\": \"" + first + "\", \"x.b\": \"" + second + "\", \"x.table\": \"" + second + "\"");
  EXPECT_EQ(problems_of(hf), "");
}

TEST_F(Sharded, RefusesDamagedConfigs) {
  const auto problem_of = [&](const std::string& text) -> std::string {
    write(hf / "config.json", text);
    try {
      read_hf_config(hf);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(problem_of("{\"a\": 1, \"a\": 2}"), HasSubstr("duplicate key 'a'"));
  EXPECT_THAT(problem_of("{\"a.b\": 1, \"a\": {\"b\": 2}}"), HasSubstr("'a.b' occurs twice"));
  EXPECT_THAT(problem_of("[1]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(problem_of(""), HasSubstr("not valid JSON"));
  EXPECT_THAT(problem_of("{\"a\": 18446744073709551615}"), HasSubstr("no 64-bit integer"));
  EXPECT_THAT(problem_of("{\"a\": " + std::string(100, '[') + std::string(100, ']') + "}"),
              HasSubstr("nested deeper than 64"));
  EXPECT_THAT(problem_of("{\"a\": \"" + std::string(2 << 20, 'x') + "\"}"), HasSubstr("at most 1048576"));
  EXPECT_THAT(problem_of(std::string("{}\0", 3)), HasSubstr("NUL"));
  // Every element of a list is kept with its path.
  std::string ones = "1";
  for (int i = 0; i < 50'000; ++i) ones += ",1";
  EXPECT_THAT(problem_of("{\"" + std::string(50'000, 'k') + "\": [" + ones + "]}"),
              HasSubstr("too many values for a file of this size"));
  EXPECT_EQ(problem_of("{\"a\": {\"b\": [1, {\"c\": null}]}}"), "");
  fs::remove(hf / "config.json");
  EXPECT_THROW(read_hf_config(hf), ConfigError);
}

// The same weights, cut by rows, by columns within a head, and whole.
TEST(HfConvert, WritesTheSameFileAndFolderFromAnyMesh) {
  TempFolder folder;
  const auto weights = toy_weights();
  save_safetensors(folder / "ours.safetensors", weights);
  convert_to_hf(folder / "ours.safetensors", folder / "hf", toy());
  using testing::cut;
  const std::vector<checkpoint::TensorLayout> layouts[] = {
      {{{cut("dp", 3, 1, 0)}}, {{cut("dp", 3, 1, 0)}}},
      {{{cut("tp", 2, 1, 1), cut("dp", 2, 2, 0)}}, {{cut("dp", 2, 2, 0)}}},
      {{}, {}}};
  for (const auto& layout : layouts) {
    testing::CheckpointToSave save{.world_size = 12, .tensors = {}};
    for (size_t i = 0; i < weights.size(); ++i)
      save.tensors.push_back({"model." + weights[i].first, weights[i].second, layout[i]});
    save.tensors.push_back({"optimizer.b.step", at::zeros({}, at::kLong)});
    const fs::path step = folder / "step";
    testing::write_checkpoint_files(step, save);
    convert_state(checkpoint::SavedState(step), folder / "file.safetensors");
    EXPECT_EQ(read_file(folder / "file.safetensors"), read_file(folder / "ours.safetensors"));
    convert_state_to_hf(checkpoint::SavedState(step), folder / "of_state", toy());
    EXPECT_EQ(read_file(folder / "of_state/model.safetensors"), read_file(folder / "hf/model.safetensors"));
    HfModel other = toy();
    other.tensors[1].name = "c";
    EXPECT_THROW(convert_state_to_hf(checkpoint::SavedState(step), folder / "no", other), ConfigError);
    for (const char* name : {"step", "of_state", "file.safetensors"}) fs::remove_all(folder / name);
  }
}

TEST(HfConvert, MemoryDoesNotGrowWithTheTensor) {
  TempFolder folder;
  const int64_t rows = 60'000, columns = 1024;  // 245 MB
  const HfModel model{.config = {}, .tensors = {{"w", "w", {rows, columns}, 20}}};
  {
    const std::vector<SafetensorsEntry> entries = {{"w", at::kFloat, {rows, columns}}};
    write_safetensors_in_parts(
        folder / "w.safetensors", entries, {}, [&](size_t, const AppendTensor& append) {
          for (int64_t row = 0; row < rows; row += 1000)
            append(at::arange(row, row + 1000, at::kFloat).unsqueeze(1).expand({1000, columns}));
        });
  }
  // Resets the kernel's record of this process's peak memory.
  std::ofstream("/proc/self/clear_refs") << 5;
  const auto peak_kb = [] {
    std::ifstream status("/proc/self/status");
    int64_t kb = 0;
    for (std::string word; status >> word;)
      if (word == "VmHWM:") status >> kb;
    return kb;
  };
  const auto before = peak_kb();
  convert_to_hf(folder / "w.safetensors", folder / "hf", model);
  convert_from_hf(folder / "hf", folder / "back.safetensors", model);
  // Each piece takes the mapped source, and its rows as read and in their new order: 16 MiB
  // each, in memory that all pieces share.
  EXPECT_LT(peak_kb() - before, 80 << 10);
  const SafetensorsFile back(folder / "back.safetensors");
  for (const int64_t row : {int64_t{0}, int64_t{8191}, int64_t{33'333}, rows - 1})
    EXPECT_EQ(back.read_slice("w", Box{{row, 7}, {1, 1}}).item<float>(), static_cast<float>(row));
}

}  // namespace
}  // namespace titan
