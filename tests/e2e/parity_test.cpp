// TorchTitan's own losses from its weights and batches (tests/data/parity/README.md), and one rank's losses
// on every layout.

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>

#include "e2e/training.h"

namespace titan::testing {
namespace {

Words replay(const std::string& fixture) {
  std::string folder = source_file("tests/data/parity/" + fixture);
  return {folder + "/replay.toml", "--training.dataset_path", folder, "--checkpoint.initial_load_path",
          folder + "/titan.safetensors"};
}

std::vector<Logged> recorded(const std::string& fixture) {
  auto json =
      nlohmann::json::parse(std::ifstream(source_file("tests/data/parity/" + fixture + "/fixture.json")));
  std::vector<Logged> steps;
  for (const auto& step : json.at("steps"))
    steps.push_back({step.at("step"), step.at("loss"), step.at("grad_norm"), step.at("lr")});
  return steps;
}

void expect_near_torchtitan(const std::vector<Logged>& found, const std::vector<Logged>& expected,
                            double loss_tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(found[i].loss, expected[i].loss, loss_tolerance) << "step " << i + 1;
    EXPECT_NEAR(found[i].grad_norm, expected[i].grad_norm, 1e-4 * expected[i].grad_norm) << "step " << i + 1;
    EXPECT_NEAR(found[i].lr, expected[i].lr, 1e-12) << "step " << i + 1;
  }
}

class Parity : public ::testing::TestWithParam<const char*> {};

TEST_P(Parity, OneRankMatchesTorchTitan) {
  expect_near_torchtitan(train(fresh_folder("run"), replay(GetParam())), recorded(GetParam()), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Fixtures, Parity, ::testing::Values("mini", "mini8"),
                         [](const auto& info) { return std::string(info.param); });

struct ParityLayout {
  const char* name;
  Words words;
  const char* fixture = "mini";
};

void PrintTo(const ParityLayout& layout, std::ostream* out) { *out << layout.name; }

Words pipeline(const std::string& ranks, const std::string& schedule) {
  return {"--nproc",
          ranks,
          "--parallelism.pipeline_parallel_degree",
          ranks,
          "--parallelism.pipeline_parallel_schedule",
          schedule};
}

const Words kTwoByTwo = {
    "--nproc", "4", "--parallelism.tensor_parallel_degree", "2", "--training.local_batch_size", "2"};

const Words kPipelineAndData = {
    "--nproc", "4", "--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "2"};

class Layouts : public ::testing::TestWithParam<ParityLayout> {};

TEST_P(Layouts, MatchOneRank) {
  const std::string fixture = GetParam().fixture;
  auto one = train(fresh_folder("one"), replay(fixture));
  auto other = train(fresh_folder("other"), replay(fixture) + GetParam().words);
  expect_near_torchtitan(other, one, 5e-6);
  expect_near_torchtitan(other, recorded(fixture), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(
    All, Layouts,
    ::testing::Values(
        ParityLayout{"Fsdp2", {"--nproc", "2", "--training.local_batch_size", "2"}},
        // Four rows over three ranks: two of them have a padding row.
        ParityLayout{"Fsdp3", {"--nproc", "3", "--training.local_batch_size", "2"}},
        ParityLayout{"Fsdp4", {"--nproc", "4", "--training.local_batch_size", "1"}},
        ParityLayout{"Fsdp2ReshardNever",
                     {"--nproc", "2", "--training.local_batch_size", "2",
                      "--parallelism.fsdp_reshard_after_forward", "never"}},
        ParityLayout{"Fsdp4ReshardTo2",
                     {"--nproc", "4", "--training.local_batch_size", "1",
                      "--parallelism.fsdp_reshard_after_forward", "2"}},
        ParityLayout{"Hsdp2x2",
                     {"--nproc", "4", "--training.local_batch_size", "1",
                      "--parallelism.data_parallel_replicate_degree", "2"}},
        ParityLayout{"Ddp2",
                     {"--nproc", "2", "--training.local_batch_size", "2",
                      "--parallelism.data_parallel_replicate_degree", "2",
                      "--parallelism.data_parallel_shard_degree", "1"}},
        ParityLayout{"Accumulation4", {"--training.local_batch_size", "1"}},
        ParityLayout{"Fsdp2Accumulation2", {"--nproc", "2", "--training.local_batch_size", "1"}},
        ParityLayout{"Fsdp2AccumulationReducedOnce",
                     {"--nproc", "2", "--training.local_batch_size", "1",
                      "--parallelism.no_fsdp_reduce_every_micro_batch"}},
        ParityLayout{"Tp2", {"--nproc", "2", "--parallelism.tensor_parallel_degree", "2"}},
        ParityLayout{"Tp2WithoutSequenceParallel",
                     {"--nproc", "2", "--parallelism.tensor_parallel_degree", "2",
                      "--parallelism.no_enable_sequence_parallel"}},
        ParityLayout{"Tp2WithoutLossParallel",
                     {"--nproc", "2", "--parallelism.tensor_parallel_degree", "2",
                      "--parallelism.disable_loss_parallel"}},
        ParityLayout{"Tp2Async",
                     {"--nproc", "2", "--parallelism.tensor_parallel_degree", "2",
                      "--parallelism.enable_async_tensor_parallel"}},
        ParityLayout{"Tp2AsyncReference",
                     {"--nproc", "2", "--parallelism.tensor_parallel_degree", "2",
                      "--parallelism.enable_async_tensor_parallel", "--ops.kernels", "reference"}},
        ParityLayout{"Tp2Recomputed",
                     {"--nproc", "2", "--parallelism.tensor_parallel_degree", "2",
                      "--activation_checkpoint.mode", "full"},
                     "mini8"},
        ParityLayout{"Tp2AsyncRecomputedByOp",
                     {"--nproc", "2", "--parallelism.tensor_parallel_degree", "2",
                      "--parallelism.enable_async_tensor_parallel", "--activation_checkpoint.mode",
                      "selective", "--activation_checkpoint.selective_ac_option", "op"}},
        ParityLayout{"Cp2Tp2",
                     {"--nproc", "4", "--parallelism.context_parallel_degree", "2",
                      "--parallelism.tensor_parallel_degree", "2"}},
        ParityLayout{"Cp2Tp2Reference",
                     {"--nproc", "4", "--parallelism.context_parallel_degree", "2",
                      "--parallelism.tensor_parallel_degree", "2", "--ops.kernels", "reference"}},
        ParityLayout{"Tp2Fsdp2", kTwoByTwo},
        ParityLayout{"Tp2Fsdp2Accumulation2", kTwoByTwo + Words{"--training.local_batch_size", "1"}},
        ParityLayout{"Pp2", pipeline("2", "1F1B")}, ParityLayout{"Pp2Deep", pipeline("2", "1F1B"), "mini8"},
        ParityLayout{"Pp2AccumulationOfGpipe",
                     pipeline("2", "GPipe") + Words{"--training.local_batch_size", "2"}},
        ParityLayout{"Pp4", pipeline("4", "1F1B"), "mini8"},
        ParityLayout{"Pp4TwoStagesEach", pipeline("4", "Interleaved1F1B"), "mini8"},
        ParityLayout{"Pp4ZeroBubble", pipeline("4", "ZBVZeroBubble"), "mini8"},
        ParityLayout{"Pp2Fsdp2", kPipelineAndData}),
    [](const auto& info) { return std::string(info.param.name); });

// ---- heads that can't be split

// 4 heads and 2 key heads; refused before a rank starts, so nothing is written.
TEST(TensorParallelRefusal, NamesTheDegreesThatWork) {
  for (const char* degree : {"3", "4"}) {
    const auto folder = fresh_folder("refused");
    const CommandResult result =
        try_train(replay("mini") + Words{"--nproc", degree, "--parallelism.tensor_parallel_degree", degree,
                                         "--parallelism.no_enable_sequence_parallel", "--job.dump_folder",
                                         folder.string()});
    EXPECT_NE(result.status, 0) << degree;
    EXPECT_NE(
        result.err.find(str("parallelism.tensor_parallel_degree = ", degree,
                            ": doesn't divide the model's 4 heads and 2 kv heads; degrees that do: 1, 2")),
        std::string::npos)
        << result.err;
    EXPECT_TRUE(std::filesystem::is_empty(folder)) << degree;
  }
}

// ---- the file of the last step

// The fp32 tensors of a safetensors file.
std::map<std::string, std::vector<float>> read_weights(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  uint64_t header_size = 0;
  std::memcpy(&header_size, bytes.data(), sizeof header_size);
  const char* data = bytes.data() + sizeof header_size + header_size;
  std::map<std::string, std::vector<float>> tensors;
  const auto header = nlohmann::json::parse(bytes.substr(sizeof header_size, header_size));
  for (const auto& [name, info] : header.items()) {
    if (name == "__metadata__") continue;
    EXPECT_EQ(info.at("dtype"), "F32") << name;
    const size_t begin = info.at("data_offsets")[0], end = info.at("data_offsets")[1];
    tensors[name].resize((end - begin) / sizeof(float));
    std::memcpy(tensors[name].data(), data + begin, end - begin);
  }
  return tensors;
}

double relative_error(const std::vector<float>& got, const std::vector<float>& expected) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += std::pow(double{got[i]} - expected[i], 2);
    norm += std::pow(double{expected[i]}, 2);
  }
  return std::sqrt(difference / norm);
}

class ModelFile : public ::testing::TestWithParam<ParityLayout> {};

TEST_P(ModelFile, OfManyRanksEqualsThatOfOneRank) {
  const auto one = fresh_folder("one"), spread = fresh_folder("spread");
  const auto file = std::filesystem::path("checkpoint/step-20/model.safetensors");
  train(one, replay("mini"));
  train(spread, replay("mini") + GetParam().words);
  const auto expected = read_weights(one / file), found = read_weights(spread / file);
  ASSERT_EQ(found.size(), expected.size());
  EXPECT_EQ(found.size(), 21u);
  for (const auto& [name, values] : expected) {
    ASSERT_TRUE(found.contains(name)) << name;
    ASSERT_EQ(found.at(name).size(), values.size()) << name;
    EXPECT_LE(relative_error(found.at(name), values), 1e-4) << name;
  }

  // Any layout reads it.
  const Words again = replay("mini") + Words{"--checkpoint.initial_load_path", (spread / file).string(),
                                             "--training.steps", "2"};
  const auto wanted = train(fresh_folder("again"), again);
  for (const ParityLayout& layout :
       {ParityLayout{"tp 2", {"--nproc", "2", "--parallelism.tensor_parallel_degree", "2"}},
        ParityLayout{"fsdp 2", {"--nproc", "2", "--training.local_batch_size", "2"}},
        ParityLayout{"both", kTwoByTwo}, ParityLayout{"pp 2", pipeline("2", "1F1B")}}) {
    SCOPED_TRACE(layout.name);
    expect_near_torchtitan(train(fresh_folder(layout.name), again + layout.words), wanted, 5e-6);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ModelFile,
                         ::testing::Values(ParityLayout{"TensorAndData", kTwoByTwo},
                                           ParityLayout{"PipelineAndData", kPipelineAndData}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace titan::testing
