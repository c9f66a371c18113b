// The model alone, written by all ranks: any layout, both forms, many files; failures; memory.

#include <sys/resource.h>

#include <csignal>
#include <fstream>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "distributed/checkpoint_saver.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/core/error.h"

namespace titan {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::kLabel;
using testing::SharedFolder;
using testing::world;

struct ModelTensor {
  std::string name;
  at::Tensor values;
  std::vector<Placement> placements;
};

Parameter placed(const ModelTensor& whole, const DeviceMesh& mesh) {
  Parameter parameter;
  parameter.name = whole.name;
  parameter.data = distribute(whole.values, mesh, whole.placements);
  parameter.data.local = parameter.data.local.clone().requires_grad_(true);
  parameter.compute = parameter.data.local;
  return parameter;
}

at::Tensor drawn(at::IntArrayRef shape) { return at::randn(shape).to(testing::device()); }

// Two heads of four rows, cut within a head, and tensors that are split on either axis, both, or none.
struct ModelJob {
  std::vector<ModelTensor> wholes;
  std::vector<Parameter> parameters;
  HfModel hf;

  ModelJob() {
    at::manual_seed(7);
    const Placement s0 = Placement::shard(0), s1 = Placement::shard(1), r = Placement::replicate();
    const bool two_axes = world().size() == 4;
    const DeviceMesh mesh = two_axes ? DeviceMesh::create(world(), {{"dp", 2}, {"tp", 2}})
                                     : DeviceMesh::create(world(), {{"dp", world().size()}});
    const auto add = [&](const char* name, at::IntArrayRef shape, Placement dp, Placement tp,
                         int64_t head_dim) {
      std::vector<Placement> placements = {dp};
      if (two_axes) placements.push_back(tp);
      wholes.push_back({name, drawn(shape), placements});
      parameters.push_back(placed(wholes.back(), mesh));
      hf.tensors.push_back({.name = name,
                            .hf_name = std::string("theirs.") + name,
                            .shape = shape.vec(),
                            .rotary_head_dim = head_dim});
    };
    add("wq", {8, 6}, s0, s0, 4);
    add("wk", {8, 6}, s0, r, 4);
    add("wo", {7, 5}, s0, s1, 0);
    add("wide", {6, 8}, s1, s1, 0);
    add("norm", {5}, s0, r, 0);
    add("bias", {4}, r, r, 0);
    add("tiny", {1, 2}, s0, s0, 0);
  }
};

const ModelSaveOptions kManyFiles{.least_file_bytes = 1};

std::vector<std::string> weight_files(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".safetensors") names.push_back(entry.path().filename().string());
  return names;
}

void expect_intact(const fs::path& folder) {
  const checkpoint::VerifyReport report = checkpoint::verify_step(folder);
  for (const checkpoint::Damage& damage : report.damages) ADD_FAILURE() << to_string(damage);
  EXPECT_GT(report.num_bytes, 0);
}

TEST(SaveModel, EachRankWritesAFile) {
  const SharedFolder folder;
  ModelJob job;
  save_model(job.parameters, world(), folder / "ours", kManyFiles);
  EXPECT_EQ(weight_files(folder / "ours").size(), static_cast<size_t>(world().size()));
  expect_intact(folder / "ours");
  const HfFolder files(folder / "ours");
  for (const ModelTensor& whole : job.wholes)
    EXPECT_TRUE(at::equal(files.file_of(whole.name).tensor(whole.name), whole.values.cpu())) << whole.name;

  std::vector<at::Tensor> before;
  for (Parameter& parameter : job.parameters) {
    const at::NoGradGuard no_grad;
    before.push_back(parameter.data.local.clone());
    parameter.data.local.zero_();
  }
  load_model(job.parameters, folder / "ours");
  for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(job.parameters[i].data.local, before[i]));
}

TEST(SaveModel, WritesTheSameTensorsInOneFile) {
  const SharedFolder folder;
  const ModelJob job;
  save_model(job.parameters, world(), folder / "ours", {.export_dtype = at::kBFloat16});
  EXPECT_EQ(weight_files(folder / "ours"), std::vector<std::string>{"model.safetensors"});
  const SafetensorsFile file(folder / "ours/model.safetensors");
  for (const ModelTensor& whole : job.wholes)
    EXPECT_TRUE(at::equal(file.tensor(whole.name), whole.values.cpu().to(at::kBFloat16))) << whole.name;
}

TEST(SaveModel, WritesHuggingFacesForm) {
  const SharedFolder folder;
  ModelJob job;
  ModelSaveOptions options = kManyFiles;
  options.hf = &job.hf;
  save_model(job.parameters, world(), folder / "theirs", options);
  expect_intact(folder / "theirs");
  const HfFolder files(folder / "theirs");
  EXPECT_THAT(tensor_differences(files, job.hf), IsEmpty());
  EXPECT_TRUE(fs::exists(folder / "theirs/config.json"));
  for (size_t i = 0; i < job.wholes.size(); ++i) {
    const HfTensor& tensor = job.hf.tensors[i];
    EXPECT_EQ(files.file_of(tensor.hf_name).metadata().at("format"), "pt");
    EXPECT_TRUE(
        at::equal(files.file_of(tensor.hf_name).tensor(tensor.hf_name),
                  reorder_rows(job.wholes[i].values.cpu(), tensor.rotary_head_dim, RowOrder::HuggingFace)))
        << tensor.name;
  }
}

TEST(SaveModel, AFailedRankIsNamedOnAllRanksAndLeavesNothing) {
  const SharedFolder folder;
  const ModelJob job;
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{.rlim_cur = 64, .rlim_max = before.rlim_max};
  std::signal(SIGXFSZ, SIG_IGN);
  if (testing::is_last()) setrlimit(RLIMIT_FSIZE, &small);
  std::string message;
  try {
    save_model(job.parameters, world(), folder / "ours", kManyFiles);
  } catch (const Error& error) {
    message = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_THAT(message, HasSubstr("but files of this process are limited to 64 bytes"));
  if (world().size() > 1) EXPECT_THAT(message, HasSubstr(str("rank ", world().size() - 1, ": ")));
  testing::meet();
  EXPECT_TRUE(fs::is_empty(folder));
  EXPECT_THROW(save_model(job.parameters, world(), "/proc/nothing", kManyFiles), Error);
}

TEST(SaveModel, RefusesAModelThatHuggingFacesFormDoesNotDescribe) {
  const SharedFolder folder;
  ModelJob job;
  job.hf.tensors[1].shape = {7, 6};
  EXPECT_THROW(save_model(job.parameters, world(), folder / "theirs", {.hf = &job.hf}), Error);
  EXPECT_THROW(save_model({}, world(), folder / "ours"), Error);
  testing::meet();
  EXPECT_TRUE(fs::is_empty(folder));
}

int64_t peak_kb() {
  std::ifstream status("/proc/self/status");
  int64_t kb = 0;
  for (std::string word; status >> word;)
    if (word == "VmHWM:") status >> kb;
  return kb;
}

// The model has 400 MB; a rank's memory holds a few slices of it, whoever writes.
TEST(SaveModel, TakesMemoryForAFewSlices) {
  if (!testing::device().is_cpu()) GTEST_SKIP() << "the model is in the device's memory";
  const SharedFolder folder;
  const DeviceMesh mesh = DeviceMesh::create(world(), {{"dp", world().size()}});
  const int64_t rows = 50'000 / world().size() * world().size();
  std::vector<Parameter> parameters(2);
  for (size_t i = 0; i < 2; ++i) {
    DTensor& data = parameters[i].data;
    parameters[i].name = str("w", i);
    data = {.local = at::full({rows / world().size(), 1000}, world().rank() + 1.0),
            .mesh = mesh,
            .placements = {Placement::shard(0)},
            .global_shape = {rows, 1000},
            .box = local_box({rows, 1000}, mesh, {Placement::shard(0)})};
  }
  std::ofstream("/proc/self/clear_refs") << 5;  // resets the kernel's record of the peak
  const int64_t before = peak_kb();
  save_model(parameters, world(), folder / "ours");
  EXPECT_LT(peak_kb() - before, 180 << 10);
  testing::meet();
  const HfFolder files(folder / "ours");
  const Box last{{rows - 1, 999}, {1, 1}};
  EXPECT_EQ(files.file_of("w1").read_slice("w1", last).item<float>(), static_cast<float>(world().size()));
}

}  // namespace
}  // namespace titan
