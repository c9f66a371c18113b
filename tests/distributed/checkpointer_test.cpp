// Saving on all ranks of a job: the contents of the files, and the moment of which they hold the state.

#include <atomic>
#include <limits>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/format/rank_file.h"
#include "checkpoint/save/save_plan.h"
#include "distributed/checkpoint_saver.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using namespace titan::testing;

TEST(Checkpointer, LoadsSavedStateBitForBit) {
  const SharedFolder folder;
  for (const StateLayout& layout : layouts_of(world().size())) {
    const fs::path here = folder / layout.name();
    ToyJob job(world(), layout);
    Checkpointer checkpointer(world(), job.mesh["pp"], {.folder = here, .config = "steps = 7\n"});
    job.add_to(checkpointer);
    job.fill(7);
    EXPECT_TRUE(checkpointer.save(7));
    check_saved(step_path(here, 7), 7);
    job.fill(8);
    const Loaded loaded = checkpointer.load(step_path(here, 7));
    job.check(7);
    EXPECT_EQ(loaded.manifest.step, 7);
    EXPECT_EQ(loaded.manifest.config, "steps = 7\n");
    EXPECT_TRUE(loaded.manifest.finite);
    EXPECT_EQ(loaded.manifest.num_threads, at::get_num_threads());
    EXPECT_THAT(leftovers(here), ::testing::IsEmpty());
  }
}

// All files together contain each tensor once, however many ranks have copies.
TEST(Checkpointer, WritesReplicasOnce) {
  const SharedFolder folder;
  const std::vector<TensorCase> replicated = {{"weight", {64, 8}, at::kFloat}, {"bias", {32}, at::kFloat}};
  ToyJob job(world(), {1, 1, world().size()}, replicated);
  Checkpointer checkpointer(world(), {}, {.folder = folder});
  job.add_to(checkpointer);
  job.fill(1);
  checkpointer.save(1);
  const Manifest manifest = read_manifest(step_path(folder, 1));
  int64_t num_bytes = 0, smallest = int64_t{1} << 40;
  for (int rank = 0; rank < world().size(); ++rank) {
    const RankFile file(step_path(folder, 1) / file_name(rank), {manifest.run_id, 1, rank, world().size()},
                        manifest.files[static_cast<size_t>(rank)]);
    int64_t of_rank = 0;
    for (const std::string& name : file.names()) of_rank += file.entry(name).num_bytes;
    num_bytes += of_rank;
    smallest = std::min(smallest, of_rank);
  }
  EXPECT_EQ(num_bytes, 2 * 4 * (64 * 8 + 32));
  EXPECT_GT(smallest, 0) << "a rank wrote nothing";
}

TEST(Checkpointer, ReadsItsOwnFileOnceOnTheSameMesh) {
  const SharedFolder folder;
  const int64_t rows = 1500 * world().size();  // more than a block each
  // More bytes than one read takes (checkpointer_load.cpp); each rank has four such parts.
  const int64_t many = (world().size() <= 2 ? 14000 : 8) * world().size();
  ToyJob job(world(), {1, world().size(), 1},
             {{"huge", {many, 768}, at::kFloat, 0, -1},
              {"large", {rows, 300}, at::kFloat, 0, -1},
              {"small", {4 * world().size()}, at::kBFloat16, 0, -1}});
  Checkpointer checkpointer(world(), {}, {.folder = folder});
  job.add_to(checkpointer);
  job.fill(1);
  checkpointer.save(1);
  job.fill(2);
  const Loaded loaded = checkpointer.load(step_path(folder, 1));
  job.check(1);
  const auto size = fs::file_size(step_path(folder, 1) / file_name(world().rank()));
  EXPECT_EQ(loaded.num_bytes_read, static_cast<int64_t>(size));
}

/// Stops the background thread at a phase until the gate is opened.
struct Gate {
  std::atomic<bool> open{false};
  std::function<void(SavePhase)> at(SavePhase phase) {
    return [this, phase](SavePhase now) {
      while (now == phase && !open) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
  }
};

TEST(Async, CopiedModeSavesTheStateAtTheCall) {
  const SharedFolder folder;
  Gate gate;
  Saver saver({.folder = folder, .async = AsyncMode::Copied, .on_phase = gate.at(SavePhase::MakeFolder)});
  saver.fill_and_save(1);
  saver.job.fill(2);
  gate.open = true;
  saver.checkpointer.finish();
  check_saved(step_path(folder, 1), 1);
  EXPECT_GT(saver.checkpointer.take_blocked_seconds(), 0);
  EXPECT_EQ(saver.checkpointer.take_blocked_seconds(), 0);
}

// Large enough that a GPU is still copying when the call returns.
TEST(Async, CopiedModeSavesALargeStateAtTheCall) {
  const SharedFolder folder;
  ToyJob job(world(), {1, world().size(), 1}, {{"large", {1024 * world().size(), 2048}, at::kFloat, 0, -1}});
  Checkpointer checkpointer(world(), {}, {.folder = folder, .async = AsyncMode::Copied});
  checkpointer.add("model", job.model);
  at::Tensor& large = job.model.tensors()[0].data.local;
  large.fill_(1);
  checkpointer.save(1);
  large.fill_(2);
  checkpointer.finish();
  checkpointer.load(step_path(folder, 1));
  EXPECT_TRUE(at::equal(large, at::ones_like(large)));
}

TEST(Async, StagedModeSavesTheStateUntilItIsStaged) {
  const SharedFolder folder;
  Gate gate;
  Saver saver({.folder = folder, .async = AsyncMode::Staged, .on_phase = gate.at(SavePhase::MakeFolder)});
  for (int64_t step = 1; step <= 3; ++step) {
    gate.open = false;
    saver.fill_and_save(step);
    saver.checkpointer.wait_for_staging();
    saver.job.fill(100);
    gate.open = true;
    saver.checkpointer.finish();
    check_saved(step_path(folder, step), step);
  }
}

TEST(Async, SecondSaveWaits) {
  const SharedFolder folder;
  Gate gate;
  Saver saver({.folder = folder, .async = AsyncMode::Copied, .on_phase = gate.at(SavePhase::WriteFile)});
  saver.fill_and_save(1);
  std::jthread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    gate.open = true;
  });
  saver.fill_and_save(2);
  EXPECT_TRUE(gate.open) << "the second save began while the first was still being written";
  EXPECT_GT(saver.checkpointer.take_blocked_seconds(), 0);
  saver.checkpointer.finish();
  check_saved(step_path(folder, 1), 1);
  check_saved(step_path(folder, 2), 2);
}

// All ranks skip if one is busy.
TEST(Async, SkipsASecondSaveOnRequest) {
  const SharedFolder folder;
  Gate gate;
  gate.open = !is_last();
  Saver saver({.folder = folder,
               .async = AsyncMode::Copied,
               .skip_when_busy = true,
               .on_phase = gate.at(SavePhase::MakeFolder)});
  saver.job.fill(1);
  EXPECT_TRUE(saver.checkpointer.save(1));
  EXPECT_FALSE(saver.checkpointer.save(2));
  gate.open = true;
  saver.checkpointer.finish();
  meet();
  EXPECT_TRUE(saver.checkpointer.save(3));
  saver.checkpointer.finish();
  EXPECT_EQ(steps_in(folder), (std::vector<int64_t>{1, 3}));
}

TEST(Staging, ReusesTheBuffer) {
  ToyJob job(world());
  const std::vector<detail::KeyedState> states = [&] {
    std::vector<detail::KeyedState> list;
    list.push_back({"model", job.model.state()});
    return list;
  }();
  const auto tensors = detail::tensors_of(states);
  const detail::SavePlan plan(tensors, world(), {});
  detail::StagingBuffer buffer;
  const detail::Staging first(plan, tensors, buffer, false);
  const char* data = buffer.data();
  const int64_t num_bytes = buffer.num_bytes();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 4096, 0u);
  for (int save = 0; save < 3; ++save) {
    job.fill(save);
    detail::Staging staging(plan, tensors, buffer, false);
    staging.launch_from_device();
    staging.copy_from_host(2);
    staging.synchronize();
    EXPECT_EQ(buffer.data(), data);
    EXPECT_EQ(buffer.num_bytes(), num_bytes);
    ASSERT_EQ(staging.pieces().size(), plan.pieces().size());
    for (size_t i = 0; i < staging.pieces().size(); ++i) {
      const auto& planned = plan.pieces()[i];
      EXPECT_EQ(staging.pieces()[i].data.const_data_ptr(), first.pieces()[i].data.const_data_ptr());
      EXPECT_TRUE(ToyState::same_bits(staging.pieces()[i].data,
                                      detail::part_of(tensors[planned.source].data.local, planned)));
    }
  }
}

// Files are written from the tensors' own memory.
TEST(Staging, WritesWithoutACopy) {
  if (!device().is_cpu()) GTEST_SKIP() << "a tensor on a GPU has to be copied";
  ToyJob job(world());
  std::vector<detail::KeyedState> states;
  states.push_back({"model", job.model.state()});
  const auto tensors = detail::tensors_of(states);
  const detail::SavePlan plan(tensors, world(), {});
  detail::StagingBuffer buffer;
  const detail::Staging staging(plan, tensors, buffer, true);
  size_t in_place = 0;
  for (size_t i = 0; i < plan.pieces().size(); ++i)
    in_place += staging.pieces()[i].data.is_alias_of(tensors[plan.pieces()[i].source].data.local);
  for (const auto& piece : plan.pieces()) in_place -= piece.is_whole_rows;
  EXPECT_EQ(in_place, 0u);
  EXPECT_FALSE(plan.pieces().empty());
}

TEST(Checkpointer, SavesAndLoadsStridedTensors) {
  const SharedFolder folder;
  for (const AsyncMode mode : {AsyncMode::Disabled, AsyncMode::Copied}) {
    ToyJob job(world());
    for (ToyState* state : {&job.model, &job.optimizer})
      for (auto& tensor : state->tensors())
        if (tensor.data.local.dim() == 2) tensor.data.local = tensor.data.local.t().contiguous().t();
    const fs::path here = folder / std::to_string(static_cast<int>(mode));
    Checkpointer checkpointer(world(), {}, {.folder = here, .async = mode});
    job.add_to(checkpointer);
    job.fill(1);
    checkpointer.save(1);
    checkpointer.finish();
    check_saved(step_path(here, 1), 1);
    job.fill(2);
    checkpointer.load(step_path(here, 1));
    job.check(1);
  }
}

TEST(Checkpointer, TensorsMayMoveButNotChange) {
  const SharedFolder folder;
  Saver saver({.folder = folder});
  saver.fill_and_save(1);
  for (auto& tensor : saver.job.model.tensors()) tensor.data.local = tensor.data.local.clone();
  saver.fill_and_save(2);
  check_saved(step_path(folder, 2), 2);
  auto& tensors = saver.job.model.tensors();
  if (is_last()) tensors[0].name = "renamed";
  const std::string error = error_of([&] { saver.checkpointer.save(3); });
  EXPECT_THAT(error, HasSubstr("'model.renamed'"));
  EXPECT_THAT(error, HasSubstr(last_rank()));
}

TEST(Checkpointer, RequiresTheSameObjectsOnAllRanks) {
  if (world().size() == 1) GTEST_SKIP() << "needs a peer";
  const SharedFolder folder;
  ToyJob job(world());
  Checkpointer checkpointer(world(), {}, {.folder = folder});
  checkpointer.add("model", job.model);
  if (is_last()) checkpointer.add("extra", job.optimizer);
  EXPECT_THAT(error_of([&] { checkpointer.save(1); }), HasSubstr(last_rank()));
  EXPECT_THAT(steps_in(folder), ::testing::IsEmpty());
}

TEST(Checkpointer, ReplacesAStepSavedAgain) {
  const SharedFolder folder;
  Saver saver({.folder = folder});
  saver.fill_and_save(1);
  saver.job.fill(2);
  saver.checkpointer.save(1);
  EXPECT_EQ(steps_in(folder), std::vector<int64_t>{1});
  EXPECT_THAT(leftovers(folder), ::testing::IsEmpty());
  saver.job.fill(3);
  saver.checkpointer.load(step_path(folder, 1));
  saver.job.check(2);
}

TEST(Checkpointer, PrunesOlderSteps) {
  const SharedFolder folder;
  Saver saver({.folder = folder, .keep_latest = 2});
  for (int64_t step = 1; step <= 4; ++step) saver.fill_and_save(step);
  saver.checkpointer.finish();
  EXPECT_EQ(steps_in(folder), (std::vector<int64_t>{3, 4}));
  EXPECT_THAT(leftovers(folder), ::testing::IsEmpty());
  check_saved(step_path(folder, 3), 3);
}

// As after load_step: newer steps remain from before the run was rewound.
TEST(Checkpointer, NewerStepsDoNotMakeASavedOneOld) {
  const SharedFolder folder;
  Saver saver({.folder = folder, .keep_latest = 2});
  for (const int64_t step : {7, 8, 1, 2, 3}) saver.fill_and_save(step);
  saver.checkpointer.finish();
  EXPECT_EQ(steps_in(folder), (std::vector<int64_t>{2, 3, 7, 8}));
}

TEST(Checkpointer, KeepsTheLastFiniteStep) {
  const SharedFolder folder;
  Saver saver({.folder = folder, .keep_latest = 1});
  saver.fill_and_save(1);
  for (int64_t step = 2; step <= 3; ++step) {
    saver.job.fill(step);
    for (auto& tensor : saver.job.model.tensors())
      if (tensor.name == "layers.0.scale") tensor.data.local.fill_(std::numeric_limits<float>::infinity());
    saver.checkpointer.save(step);
  }
  saver.checkpointer.finish();
  EXPECT_EQ(steps_in(folder), (std::vector<int64_t>{1, 3}));
  EXPECT_FALSE(read_manifest(step_path(folder, 3)).finite);
}

// Training must continue meanwhile: removing a large step may take longer than the collectives' time limit.
TEST(Checkpointer, PrunesWithoutBlocking) {
  const SharedFolder folder;
  Gate gate;
  gate.open = true;
  Saver saver({.folder = folder, .keep_latest = 1, .on_phase = gate.at(SavePhase::Prune)});
  saver.fill_and_save(1);
  saver.checkpointer.finish();
  gate.open = false;
  std::jthread opener([&] {
    for (int i = 0; i < 600 && !gate.open; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    gate.open = true;
  });
  saver.fill_and_save(2);
  EXPECT_FALSE(gate.open) << "the save waited until the older step was removed";
  gate.open = true;
  saver.checkpointer.finish();
  EXPECT_EQ(steps_in(folder), std::vector<int64_t>{2});
}

// Each has its own groups, so that its background thread can't receive the other's messages.
TEST(Checkpointer, TwoCheckpointersSaveAtOnce) {
  const SharedFolder folder;
  Gate gate;
  Saver first({.folder = folder / "first",
               .async = AsyncMode::Copied,
               .timeout = std::chrono::seconds(20),
               .on_phase = world().rank() == 0 ? gate.at(SavePhase::Gather) : nullptr});
  Saver second(
      {.folder = folder / "second", .async = AsyncMode::Copied, .timeout = std::chrono::seconds(20)});
  first.fill_and_save(1);
  second.fill_and_save(2);
  EXPECT_EQ(error_of([&] { second.checkpointer.finish(); }), "");
  gate.open = true;
  first.checkpointer.finish();
  check_saved(step_path(folder / "first", 1), 1);
  check_saved(step_path(folder / "second", 2), 2);
}

// The folder may belong to another run, or be on a read-only disk.
TEST(Checkpointer, ReadingLeavesTheFolderUnchanged) {
  const SharedFolder folder;
  Saver writer({.folder = folder});
  writer.fill_and_save(1);
  const fs::path pending = pending_path(folder, 9, "0123");
  if (world().rank() == 0) fs::create_directory(pending);
  meet();
  Saver reader({.folder = folder, .read_only = true});
  reader.job.fill(5);
  reader.checkpointer.load(step_path(folder, 1));
  reader.job.check(1);
  EXPECT_TRUE(fs::exists(pending));
  EXPECT_THAT(error_of([&] { reader.checkpointer.save(2); }), HasSubstr("is read-only"));
  meet();
  Saver elsewhere({.folder = folder / "none", .read_only = true});
  meet();
  EXPECT_FALSE(fs::exists(folder / "none"));
}

TEST(Checkpointer, RemovesLeftoversOfAKilledStart) {
  const SharedFolder folder;
  if (world().rank() == 0)
    for (const char* name : {".probe", "..probe.123.4.tmp", ".step-3.ab.tmp"})
      fs::create_directory(folder / name);
  meet();
  const Saver saver({.folder = folder});
  meet();  // the probe is removed once all ranks have seen it
  EXPECT_THAT(leftovers(folder), ::testing::IsEmpty());
  meet();
}

/// An object whose text combines all ranks' texts.
struct Merged : Stateful {
  ObjectState state() override {
    return {{}, titan::str("r", world().rank()), [](const std::vector<std::string>& texts) {
              std::string all;
              for (const std::string& text : texts) all += text + ";";
              return all;
            }};
  }
  void loaded(const std::string& saved) override { text = saved; }
  std::string text;
};

TEST(Checkpointer, MergesTexts) {
  const SharedFolder folder;
  Merged merged;
  Checkpointer checkpointer(world(), {}, {.folder = folder});
  checkpointer.add("lanes", merged);
  checkpointer.save(1);
  checkpointer.load(step_path(folder, 1));
  std::string expected;
  for (int rank = 0; rank < world().size(); ++rank) expected += titan::str("r", rank, ";");
  EXPECT_EQ(merged.text, expected);
}

}  // namespace
}  // namespace titan::checkpoint
