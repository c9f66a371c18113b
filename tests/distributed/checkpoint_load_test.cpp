// Loading by all ranks of a job, folders that they can't use, and what they are told.

#include <fstream>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "distributed/checkpoint_saver.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using namespace titan::testing;

struct LoadCase {
  explicit LoadCase(const fs::path& folder)
      : saver({.folder = folder / "run"}),
        path(step_path(folder / "run", 1)),
        checkpointer(world(), {}, {.folder = folder / "other"}) {
    saver.fill_and_save(1);
  }
  Saver saver;
  fs::path path;
  Checkpointer checkpointer;
};

std::vector<TensorCase> changed_tensors() {
  std::vector<TensorCase> tensors = toy_tensors();
  for (TensorCase& tensor : tensors) {
    if (tensor.name == "layers.0.wq") tensor.name = "layers.0.another";
    if (tensor.name == "layers.1.wq") tensor.shape = {7, 5};
    if (tensor.name == "layers.1.norm") tensor.dtype = at::kBFloat16;
  }
  return tensors;
}

TEST(Load, EveryDifferenceIsToldBeforeAnythingChanges) {
  const SharedFolder folder;
  LoadCase test(folder);
  ToyJob job(world(), {1, world().size(), 1}, changed_tensors());
  ToyState more("more", job.mesh, {{"x", {3}, at::kFloat}});
  test.checkpointer.add("model", job.model);
  test.checkpointer.add("more", more);
  job.fill(5);
  try {
    test.checkpointer.load(test.path);
    ADD_FAILURE() << "loaded";
  } catch (const ConfigError& error) {
    const std::string what = error.what();
    for (const char* part :
         {"no 'more'", "'optimizer' is no object of this run", "tensor 'model.layers.0.another' isn't in",
          "'model.layers.1.wq' has shape [7, 6] in the checkpoint, here it has [7, 5]",
          "'model.layers.1.norm' is Float in the checkpoint, here it is BFloat16",
          "the checkpoint's tensor 'model.layers.0.wq' isn't one of this run's"})
      EXPECT_THAT(what, HasSubstr(part));
    EXPECT_EQ(error.problems().size(), 6u) << what;
  }
  EXPECT_THAT(job.model.wrong(5), ::testing::IsEmpty());
}

TEST(Load, OneRanksDifferenceKeepsAllFromLoading) {
  const SharedFolder folder;
  LoadCase test(folder);
  ToyJob job(world());
  job.fill(5);
  if (is_last()) job.model.tensors()[1].name = "gone";
  job.add_to(test.checkpointer);
  EXPECT_THAT(error_of([&] { test.checkpointer.load(test.path); }),
              HasSubstr("tensor 'model.gone' isn't in"));
  EXPECT_THAT(job.optimizer.wrong(5), ::testing::IsEmpty());
}

TEST(Load, WhatIsExcludedKeepsWhatItHas) {
  const SharedFolder folder;
  LoadCase test(folder);
  ToyJob job(world());
  job.add_to(test.checkpointer);
  job.fill(5);
  test.checkpointer.load(test.path, {.exclude = {"optimizer"}});
  EXPECT_THAT(job.model.wrong(1), ::testing::IsEmpty());
  EXPECT_THAT(job.optimizer.wrong(5), ::testing::IsEmpty());
  job.fill(5);
  test.checkpointer.load(test.path, {.only = {"optimizer"}});
  EXPECT_THAT(job.model.wrong(5), ::testing::IsEmpty());
  EXPECT_THAT(job.optimizer.wrong(1), ::testing::IsEmpty());
  EXPECT_THAT(error_of([&] { test.checkpointer.load(test.path, {.exclude = {"optimiser"}}); }),
              HasSubstr("'optimiser' is to be excluded, but neither"));
}

TEST(Load, DtypesAreConvertedOnRequest) {
  const SharedFolder folder;
  LoadCase test(folder);
  std::vector<TensorCase> tensors = toy_tensors();
  for (TensorCase& tensor : tensors) tensor.dtype = at::kDouble;
  ToyJob job(world(), {1, world().size(), 1}, tensors);
  job.add_to(test.checkpointer);
  EXPECT_THAT(error_of([&] { test.checkpointer.load(test.path); }), HasSubstr("converted only on request"));
  test.checkpointer.load(test.path, {.convert_dtypes = true});
  for (const auto& tensor : job.model.tensors()) {
    for (const TensorCase& each : toy_tensors()) {
      if (each.name != tensor.name) continue;
      const at::Tensor whole = values_of("model." + each.name, each.shape, each.dtype, 1);
      EXPECT_TRUE(full_tensor(tensor.data).cpu().equal(whole.to(at::kDouble))) << each.name;
    }
  }
}

TEST(Load, DamageIsNamedOnAllRanks) {
  const SharedFolder folder;
  LoadCase test(folder);
  meet();
  if (world().rank() == 0) {
    std::fstream file(test.path / file_name(0), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1, std::ios::end);
    const char last = static_cast<char>(file.get() ^ 1);
    file.seekp(-1, std::ios::end);
    file.put(last);
  }
  meet();
  ToyJob job(world());
  job.add_to(test.checkpointer);
  const std::string error = error_of([&] { test.checkpointer.load(test.path); });
  EXPECT_THAT(error, HasSubstr(file_name(0)));
  EXPECT_THAT(error, HasSubstr("half-way"));
}

TEST(Load, AFolderThatIsNotThere) {
  const SharedFolder folder;
  LoadCase test(folder);
  EXPECT_THAT(error_of([&] { test.checkpointer.load(folder / "step-9"); }), HasSubstr("step-9"));
}

// --- folders

TEST(Folder, OneThatIsNotSharedIsRefusedByName) {
  if (world().size() == 1) GTEST_SKIP() << "needs a peer";
  const SharedFolder folder;
  const fs::path mine = folder / (is_last() ? "b" : "a");
  fs::create_directories(folder / "b");
  const std::string error = error_of([&] { Checkpointer checkpointer(world(), {}, {.folder = mine}); });
  EXPECT_THAT(error, HasSubstr(last_rank()));
  EXPECT_THAT(error, HasSubstr((folder / "b").string()));
  EXPECT_THAT(error, HasSubstr("what rank 0 wrote"));
}

TEST(Folder, OneThatCannotBeMade) {
  const std::string error =
      error_of([] { Checkpointer checkpointer(world(), {}, {.folder = "/proc/titan_checkpoints"}); });
  EXPECT_THAT(error, HasSubstr("/proc/titan_checkpoints"));
  EXPECT_THAT(error, HasSubstr("rank 0 ("));
}

TEST(Folder, ASecondWriterIsRefused) {
  const SharedFolder folder;
  Saver saver({.folder = folder});
  EXPECT_THAT(error_of([&] { Checkpointer second(world(), {}, {.folder = folder}); }),
              HasSubstr("is being written to by"));
}

TEST(Folder, OptionsOutOfRangeAreToldTogether) {
  try {
    Checkpointer checkpointer(world(), {},
                              {.keep_latest = -1, .timeout = std::chrono::seconds(0), .num_threads = 0});
    ADD_FAILURE() << "made";
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.problems().size(), 4u) << error.what();
  }
}

}  // namespace
}  // namespace titan::checkpoint
