// Loading on all ranks of a job, unusable folders, and the messages about them.

#include <algorithm>
#include <fstream>
#include <set>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/format/rank_file.h"
#include "checkpoint_files.h"
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

TEST(Load, ReportsEveryDifferenceBeforeAnythingChanges) {
  const SharedFolder folder;
  LoadCase test(folder);
  ToyJob job(world(), {1, world().size(), 1}, changed_tensors());
  ToyState more("more", job.mesh, {{"x", {3}, at::kFloat}});
  test.checkpointer.add("model", job.model);
  test.checkpointer.add("more", more);
  job.fill(5);
  try {
    test.checkpointer.load(test.path);
    ADD_FAILURE() << "the checkpoint was loaded";
  } catch (const ConfigError& error) {
    const std::string what = error.what();
    for (const char* part :
         {"no 'more'", "'optimizer' isn't an object of this run", "tensor 'model.layers.0.another' isn't in",
          "'model.layers.1.wq' has shape [7, 6] in the checkpoint, but here it has [7, 5]",
          "'model.layers.1.norm' is Float in the checkpoint, but here it is BFloat16",
          "the checkpoint's tensor 'model.layers.0.wq' isn't one of this run's"})
      EXPECT_THAT(what, HasSubstr(part));
    EXPECT_EQ(error.problems().size(), 6u) << what;
  }
  EXPECT_THAT(job.model.wrong(5), ::testing::IsEmpty());
}

TEST(Load, ADifferenceOnOneRankStopsAll) {
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

// An object's own objection, even on one rank alone, comes before any tensor is read.
TEST(Load, AnObjectThatCannotContinueStopsAllBeforeAnythingChanges) {
  struct OtherData : ToyState {
    using ToyState::ToyState;
    void check(const std::string& text) const override {
      if (is_last()) throw Error("the text '" + text + "' belongs to other data");
    }
  };
  const SharedFolder folder;
  LoadCase test(folder);
  ToyJob job(world());
  OtherData optimizer("optimizer", job.mesh, toy_tensors());
  test.checkpointer.add("model", job.model);
  test.checkpointer.add("optimizer", optimizer);
  job.fill(5);
  optimizer.fill(5);
  try {
    test.checkpointer.load(test.path);
    ADD_FAILURE() << "the checkpoint was loaded";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("the text 'optimizer at 1' belongs to other data"));
    EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("halfway")));
  }
  EXPECT_THAT(job.model.wrong(5), ::testing::IsEmpty());
  EXPECT_THAT(optimizer.wrong(5), ::testing::IsEmpty());
}

TEST(Load, ExcludedTensorsKeepTheirValues) {
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

TEST(Load, ConvertsDtypesOnRequest) {
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

TEST(Load, ReportsDamageOnAllRanks) {
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
  EXPECT_THAT(error, HasSubstr("halfway"));
}

// ---- number of bytes read

int64_t bytes_of(const StateTensor& tensor, const Box& box) {
  return box.numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

// The most bytes that may be read of a piece: runs of contiguous bytes, each with at most one more block at
// either end, and no block twice.
int64_t most_bytes(const StateTensor& tensor, const Box& piece, const Box& wanted) {
  Box both = piece;
  bool takes_whole_rows = true;
  for (size_t dim = 0; dim < piece.length.size(); ++dim) {
    const int64_t end =
        std::min(piece.offset[dim] + piece.length[dim], wanted.offset[dim] + wanted.length[dim]);
    both.offset[dim] = std::max(piece.offset[dim], wanted.offset[dim]);
    both.length[dim] = end - both.offset[dim];
    takes_whole_rows = takes_whole_rows && (dim == 0 || both.length[dim] == piece.length[dim]);
  }
  const int64_t num_runs = takes_whole_rows ? 1 : both.length[0];
  return std::min(bytes_of(tensor, piece), bytes_of(tensor, both) + num_runs * 2 * kBlockBytes);
}

int64_t header_bytes(const Manifest& manifest, int64_t rank) {
  int64_t bytes = manifest.files[static_cast<size_t>(rank)].num_bytes;
  for (const Piece& piece : manifest.table.pieces_of(rank))
    bytes -= bytes_of(manifest.table.tensors()[piece.tensor], piece.box);
  return bytes;
}

struct Amount {
  int64_t own = 0;    // bytes of this rank's parts
  int64_t whole = 0;  // bytes of the pieces that hold some of them
  int64_t most = 0;
};

Amount amount_of(const Manifest& manifest, ToyState& state) {
  Amount amount;
  std::set<int64_t> ranks;
  for (const ObjectTensor& tensor : state.state().tensors) {
    const size_t position = manifest.table.find("model." + tensor.name).value();
    const StateTensor& saved = manifest.table.tensors()[position];
    amount.own += bytes_of(saved, tensor.data.box);
    if (tensor.data.box.numel() == 0) continue;
    for (const Source& source : manifest.table.sources_of(position, tensor.data.box)) {
      amount.most += most_bytes(saved, source.box, tensor.data.box);
      amount.whole += bytes_of(saved, source.box);
      ranks.insert(source.rank);
    }
  }
  for (const int64_t rank : ranks) {
    amount.most += header_bytes(manifest, rank);
    amount.whole += header_bytes(manifest, rank);
  }
  return amount;
}

// Four ranks along dp saved the state. All ranks of this world load it along dp, then along tp, where rows
// are split.
TEST(Load, ReadsOnlyTheBlocksOfItsOwnParts) {
  const SharedFolder folder;
  const std::vector<TensorCase> cases = {{"short_rows", {12'000, 300}, at::kFloat, 0, 1},
                                         {"long_rows", {4, 1'200'000}, at::kFloat, 0, 1},
                                         {"norm", {4000}, at::kFloat, 0, -1}};
  const fs::path saved = step_path(folder, 1);
  if (world().rank() == 0) {
    CheckpointToSave save{.world_size = 4, .tensors = {}, .texts = {{"model", "model at 1"}}};
    for (const TensorCase& each : cases)
      save.tensors.push_back({"model." + each.name,
                              values_of("model." + each.name, each.shape, each.dtype, 1),
                              {{cut("dp", 4, 1, 0)}}});
    write_checkpoint_files(saved, save);
  }
  meet();
  const int size = world().size();
  for (const StateLayout& layout : {StateLayout{1, size, 1}, StateLayout{1, 1, size}}) {
    SCOPED_TRACE(layout.name());
    ToyState model("model", DeviceMesh::create(world(), {{"pp", 1}, {"dp", layout.dp}, {"tp", layout.tp}}),
                   cases);
    Checkpointer checkpointer(world(), {}, {.folder = folder / layout.name()});
    checkpointer.add("model", model);
    const Loaded loaded = checkpointer.load(saved);
    EXPECT_THAT(model.wrong(1), ::testing::IsEmpty());
    const Amount amount = amount_of(loaded.manifest, model);
    EXPECT_GE(loaded.num_bytes_read, amount.own);
    EXPECT_LE(loaded.num_bytes_read, amount.most);
    // Files of one or two ranks are read whole, and each once.
    if (layout.dp == size && 4 % size == 0) EXPECT_EQ(loaded.num_bytes_read, amount.whole);
    // Rows longer than a few blocks are read in part, shorter ones whole.
    if (layout.tp > 1) {
      const int64_t short_rows = int64_t{12'000} * 300 * 4, long_rows = int64_t{4} * 1'200'000 * 4;
      EXPECT_GE(loaded.num_bytes_read, short_rows);
      EXPECT_LE(loaded.num_bytes_read, amount.whole - long_rows / 2 + 4 * 2 * kBlockBytes);
    }
  }
}

TEST(Load, NamesAMissingFolder) {
  const SharedFolder folder;
  LoadCase test(folder);
  EXPECT_THAT(error_of([&] { test.checkpointer.load(folder / "step-9"); }), HasSubstr("step-9"));
}

// ---- folders

TEST(Folder, RefusesAFolderThatIsNotShared) {
  if (world().size() == 1) GTEST_SKIP() << "needs a peer";
  const SharedFolder folder;
  const fs::path mine = folder / (is_last() ? "b" : "a");
  fs::create_directories(folder / "b");
  const std::string error = error_of(
      [&] { Checkpointer checkpointer(world(), {}, {.folder = mine, .timeout = std::chrono::seconds(12)}); });
  EXPECT_THAT(error, HasSubstr(last_rank()));
  EXPECT_THAT(error, HasSubstr((folder / "b").string()));
  EXPECT_THAT(error, HasSubstr("doesn't see the file that rank 0 wrote in"));
}

TEST(Folder, NamesAFolderThatCannotBeCreated) {
  const std::string error =
      error_of([] { Checkpointer checkpointer(world(), {}, {.folder = "/proc/titan_checkpoints"}); });
  EXPECT_THAT(error, HasSubstr("/proc/titan_checkpoints"));
  EXPECT_THAT(error, HasSubstr("rank 0 ("));
}

TEST(Folder, RefusesASecondWriter) {
  const SharedFolder folder;
  Saver saver({.folder = folder});
  EXPECT_THAT(error_of([&] { Checkpointer second(world(), {}, {.folder = folder}); }),
              HasSubstr("is being written to by"));
}

TEST(Folder, ReportsAllOptionsOutOfRangeTogether) {
  try {
    Checkpointer checkpointer(world(), {},
                              {.keep_latest = -1, .timeout = std::chrono::seconds(0), .num_threads = 0});
    ADD_FAILURE() << "the checkpointer was built";
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.problems().size(), 4u) << error.what();
  }
}

}  // namespace
}  // namespace titan::checkpoint
