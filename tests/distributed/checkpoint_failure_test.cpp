// One rank's failure to save a step fails the save on all ranks; and the tree through which they learn of it.

#include <sys/mount.h>
#include <sys/resource.h>

#include <chrono>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/save/rank_tree.h"
#include "checkpoint/save/save_writer.h"
#include "core/units.h"
#include "distributed/checkpoint_saver.h"
#include "titan/dist/world.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using namespace titan::testing;

/// Throws once at a phase on one rank.
struct Fault {
  SavePhase phase{};
  int rank = -1;
  std::function<void(SavePhase)> hook() {
    return [this](SavePhase now) {
      if (now == phase && rank == world().rank()) throw Error("told to fail");
    };
  }
};

bool happens_on(SavePhase phase, int rank) {
  if (phase == SavePhase::Plan) return false;  // the first save is done
  return rank == 0 ||
         (phase != SavePhase::WriteManifest && phase != SavePhase::Commit && phase != SavePhase::Prune);
}

TEST(Failure, AtAnyPhaseTrainingContinuesOnRequest) {
  const SharedFolder folder;
  Fault fault;
  Saver saver({.folder = folder, .keep_latest = 100, .stop_on_failure = false, .on_phase = fault.hook()});
  int64_t step = 1;
  saver.fill_and_save(step);
  for (int phase = 0; phase <= static_cast<int>(SavePhase::Prune); ++phase) {
    for (const int rank : {0, world().size() - 1}) {
      fault = {static_cast<SavePhase>(phase), rank};
      saver.fill_and_save(++step);
      saver.checkpointer.finish();
      // After rank 0's verdict a failure affects only its own rank.
      const bool heard = fault.phase != SavePhase::Verdict || rank == 0 || is_last();
      const bool failed = happens_on(fault.phase, rank) && fault.phase != SavePhase::Prune && heard;
      EXPECT_NE(saver.checkpointer.last_failure().empty(), failed) << to_string(fault.phase);
      fault.rank = -1;
      const auto steps = steps_in(folder);
      const bool complete = fault.phase == SavePhase::Verdict || fault.phase == SavePhase::Prune ||
                            !happens_on(fault.phase, rank);
      EXPECT_EQ(std::count(steps.begin(), steps.end(), step), complete) << to_string(fault.phase);
      EXPECT_THAT(leftovers(folder), ::testing::IsEmpty()) << to_string(fault.phase);
      check_saved(step_path(folder, steps.back()), steps.back());
    }
  }
  saver.fill_and_save(++step);
  check_saved(step_path(folder, step), step);
}

TEST(Failure, StopsAllRanksWithItsCause) {
  const SharedFolder folder;
  for (const AsyncMode mode : {AsyncMode::Disabled, AsyncMode::Copied, AsyncMode::Staged}) {
    Fault fault{SavePhase::WriteChunk, -1};
    const fs::path here = folder / std::to_string(static_cast<int>(mode));
    Saver saver({.folder = here, .async = mode, .on_phase = fault.hook()});
    saver.fill_and_save(1);
    saver.checkpointer.finish();
    saver.checkpointer.check();
    fault.rank = world().size() - 1;
    const auto save = [&] {
      saver.fill_and_save(2);
      saver.checkpointer.finish();
    };
    const std::string error = error_of(save);
    EXPECT_THAT(error, HasSubstr("checkpoint of step 2: "));
    EXPECT_THAT(error, HasSubstr(last_rank()));
    EXPECT_THAT(error, HasSubstr("told to fail"));
    EXPECT_EQ(error_of([&] { saver.checkpointer.check(); }), error);
    EXPECT_EQ(error_of([&] { saver.checkpointer.save(3); }), error);
    EXPECT_EQ(steps_in(here), std::vector<int64_t>{1});
    check_saved(step_path(here, 1), 1);
  }
}

TEST(Failure, WhilePlanningAffectsOnlyThatSave) {
  const SharedFolder folder;
  for (const bool stops : {false, true}) {
    const fs::path here = folder / (stops ? "stops" : "continues");
    Fault fault{SavePhase::Plan, world().size() - 1};
    Saver saver({.folder = here, .stop_on_failure = stops, .on_phase = fault.hook()});
    bool began = true;
    const std::string error = error_of([&] { began = saver.checkpointer.save(1); });
    EXPECT_EQ(began, stops) << "save() must throw, or return false";
    EXPECT_THAT(
        stops ? error : saver.checkpointer.last_failure(),
        AllOf(HasSubstr("checkpoint of step 1: "), HasSubstr(last_rank()), HasSubstr("told to fail")));
    EXPECT_EQ(error.empty(), !stops);
    EXPECT_THAT(steps_in(here), ::testing::IsEmpty());
    fault.rank = -1;
    saver.fill_and_save(2);
    EXPECT_EQ(saver.checkpointer.last_failure(), "");
    check_saved(step_path(here, 2), 2);
  }
}

// A rank that fails has finished its own part, and waits for the others within their time limit.
TEST(Failure, AFailedRankWaitsForTheOthers) {
  if (world().size() == 1) GTEST_SKIP() << "needs a peer";
  const SharedFolder folder;
  bool armed = false;
  Saver saver({.folder = folder,
               .stop_on_failure = false,
               .timeout = std::chrono::seconds(4),
               .on_phase = [&](SavePhase phase) {
                 if (!armed) return;
                 if (is_last() && phase == SavePhase::WriteFile) throw Error("told to fail");
                 if (world().rank() == 0 && phase == SavePhase::Gather)
                   std::this_thread::sleep_for(std::chrono::milliseconds(6000));
               }});
  saver.fill_and_save(1);
  armed = true;
  EXPECT_EQ(error_of([&] { saver.fill_and_save(2); }), "");
  EXPECT_THAT(saver.checkpointer.last_failure(), HasSubstr("told to fail"));
  armed = false;
  saver.fill_and_save(3);
  EXPECT_EQ(saver.checkpointer.last_failure(), "");
  EXPECT_EQ(steps_in(folder), (std::vector<int64_t>{1, 3}));
}

// One rank's file can't grow, as on a full disk.
TEST(Failure, ReportsAFileThatCannotBeWritten) {
  const SharedFolder folder;
  Saver saver({.folder = folder, .stop_on_failure = false});
  saver.fill_and_save(1);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{.rlim_cur = 64, .rlim_max = before.rlim_max};
  if (is_last()) setrlimit(RLIMIT_FSIZE, &small);
  saver.fill_and_save(2);
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_EQ(steps_in(folder), std::vector<int64_t>{1});
  EXPECT_THAT(leftovers(folder), ::testing::IsEmpty());
  saver.fill_and_save(3);
  EXPECT_EQ(steps_in(folder), (std::vector<int64_t>{1, 3}));
  check_saved(step_path(folder, 3), 3);
}

// Each rank finds only what the others have left; the message adds up what all of them need.
TEST(DiskFull, NamesTheSizesOfTheWholeSave) {
  const SharedFolder folder;
  Saver large({.folder = folder / "large"});
  large.fill_and_save(1);
  int64_t needed = 0;
  for (const FileRecord& file : read_manifest(step_path(folder / "large", 1)).files) needed += file.num_bytes;

  constexpr int64_t kPage = 4096;
  const int64_t half = (needed / 2 + kPage - 1) / kPage * kPage, lock = kPage;
  const fs::path disk = folder / "small";
  bool mounted = false;
  if (world().rank() == 0) {
    fs::create_directory(disk);
    mounted = ::mount("tmpfs", disk.c_str(), "tmpfs", 0, titan::str("size=", half + lock).c_str()) == 0;
  }
  if (world().everyone()->sum(int64_t{mounted}, kLabel) == 0) GTEST_SKIP() << "no tmpfs can be mounted here";
  {
    Saver small({.folder = disk, .stop_on_failure = false});
    small.fill_and_save(1);
    EXPECT_THAT(small.checkpointer.last_failure(),
                HasSubstr(titan::str(
                    "there is no room in ", disk.string(), ": the file",
                    world().size() == 1 ? " needs " : titan::str("s of ", world().size(), " ranks need "),
                    size_text(needed), ", and ", size_text(half), " was free before: ")));
    EXPECT_THAT(steps_in(disk), ::testing::IsEmpty());
    EXPECT_THAT(leftovers(disk), ::testing::IsEmpty());
    meet();
  }
  if (mounted) ::umount2(disk.c_str(), MNT_DETACH);
}

TEST(DiskFull, IsNotBlamedForAnotherFailure) {
  detail::SaveReport whole{.failure = {}, .file = {.num_bytes = 12'000'000}, .disk_full = {}, .texts = {}};
  detail::SaveReport full{.failure = "full",
                          .file = {.num_bytes = 4'500'000},
                          .disk_full = "No space left on device (ENOSPC)",
                          .texts = {}};
  whole.free_bytes = 12'500'000;
  full.free_bytes = 500'000;
  EXPECT_EQ(
      detail::disk_full_text("/run", {whole, full}),
      "there is no room in /run: the files of 2 ranks need 16.5 MB, and 12.5 MB was free before: No space "
      "left on device (ENOSPC)");
  EXPECT_EQ(detail::disk_full_text("/run", {whole, whole}), "");
  detail::SaveReport other{.failure = "told to fail", .file = {}, .disk_full = {}, .texts = {}};
  EXPECT_EQ(detail::disk_full_text("/run", {whole, full, other}), "");
}

/// An object whose state can't be read.
struct Faulty : Stateful {
  ObjectState state() override {
    if (fails) throw Error("no state today");
    return {};
  }
  void loaded(const std::string&) override {}
  bool fails = false;
};

TEST(Failure, ReportsAStateThatCannotBeRead) {
  const SharedFolder folder;
  Faulty faulty;
  Checkpointer checkpointer(world(), {}, {.folder = folder, .async = AsyncMode::Copied});
  checkpointer.add("faulty", faulty);
  for (int64_t step = 1; step <= 4; ++step) {
    faulty.fails = is_last() && step % 2 == 1;
    const std::string error = error_of([&] { checkpointer.save(step); });
    if (step % 2 == 1) {
      EXPECT_THAT(error, HasSubstr("no state today"));
    } else {
      EXPECT_EQ(error, "");
    }
  }
  checkpointer.finish();
  EXPECT_EQ(steps_in(folder), (std::vector<int64_t>{2, 4}));
}

// ---- the tree

TEST(RankTree, HasTheExpectedShape) {
  using detail::children_of;
  EXPECT_EQ(children_of(0, 8), (std::vector<int>{1, 2, 4}));
  EXPECT_EQ(children_of(4, 8), (std::vector<int>{5, 6}));
  EXPECT_EQ(children_of(4, 6), (std::vector<int>{5}));
  for (const int size : {1, 2, 3, 5, 8, 4096}) {
    std::vector<int> parents(static_cast<size_t>(size), -1);
    for (int rank = 0; rank < size; ++rank) {
      for (const int child : children_of(rank, size)) {
        EXPECT_EQ(detail::parent_of(child), rank);
        EXPECT_LE(detail::end_below(child, size), detail::end_below(rank, size));
        parents[static_cast<size_t>(child)] = rank;
      }
    }
    EXPECT_EQ(std::count(parents.begin(), parents.end(), -1), 1) << "only rank 0 has none";
  }
  EXPECT_EQ(detail::height_of(0, 4096), 12);
}

TEST(RankTree, CollectsEveryAnswerAndSpreadsTheVerdict) {
  const auto group = world().group(world().everyone()->ranks(), "tree", "tree test");
  const std::vector<std::string> hosts(static_cast<size_t>(world().size()), "here");
  detail::RankTree tree(
      world(), group,
      {.name = "tree", .run_id = "test", .hosts = hosts, .timeout = std::chrono::seconds(20)});
  for (int call = 0; call < 20; ++call) {
    const std::string own(static_cast<size_t>(1000 * world().rank()), static_cast<char>('a' + call));
    const auto answers = tree.gather(own);
    if (world().rank() == 0) {
      ASSERT_EQ(answers.size(), static_cast<size_t>(world().size()));
      for (int rank = 0; rank < world().size(); ++rank) {
        EXPECT_EQ(answers[rank].rank, rank);
        EXPECT_EQ(answers[rank].text,
                  std::string(static_cast<size_t>(1000 * rank), static_cast<char>('a' + call)));
      }
    }
    EXPECT_EQ(tree.spread({world().rank() == 0 ? titan::str("verdict ", call) : "mine"}).text,
              titan::str("verdict ", call));
  }
  EXPECT_EQ(detail::agree(tree, "").text, "");
  EXPECT_EQ(detail::agree(tree, "the same").text, "the same");
  EXPECT_EQ(detail::agree(tree, is_last() ? "mine" : "").text,
            world().size() == 1 ? "mine" : last_rank() + "here): mine");
  EXPECT_EQ(detail::any_text(tree, ""), "");
  EXPECT_EQ(detail::any_text(tree, is_last() ? "mine" : ""), "mine");
}

// The tree's calls run on other threads than training's, whose time limit gets shorter after the first step.
TEST(RankTree, KeepsItsTimeLimit) {
  if (world().size() == 1) GTEST_SKIP() << "needs a peer";
  const auto before = world().timeout();
  const auto group =
      world().group(world().everyone()->ranks(), "own", titan::str(dist::kOwnTimeout, "tree test"));
  group->set_timeout(std::chrono::seconds(60));
  world().set_timeout(std::chrono::seconds(1));
  if (world().rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  EXPECT_EQ(error_of([&] { group->sum(int64_t{1}, kLabel); }), "");
  world().set_timeout(before);
}

}  // namespace
}  // namespace titan::checkpoint
