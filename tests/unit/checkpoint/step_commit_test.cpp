// Committing, replacing and removing steps, with a kill before every system call.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <functional>
#include <set>

#include "checkpoint_files.h"
#include "temp_folder.h"
#include "titan/checkpoint/checkpointer.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "titan/dist/world.h"
#include "titan/tensor/dtensor.h"
#include "unit/checkpoint/in_child.h"

namespace {

constexpr int kKilled = 99;
constexpr int kNever = -1;

int calls_until_kill = kNever;
bool can_exchange = true;
int renames_until_failure = kNever;
int failing_renames = 1;
std::vector<std::string>* record = nullptr;  // the calls made, as "sync /a"; one thread at a time

void note(const std::string& what, const std::string& path) {
  const std::string text = what + " " + path;
  // Many writes in a row are one entry.
  if (record && !(what.starts_with("write") && !record->empty() && record->back() == text))
    record->push_back(text);
}

std::string path_of(int descriptor) {
  return std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(descriptor)).string();
}

// Called before each system call that changes a folder. Ends the process if it is to be killed here.
void before_call() {
  if (calls_until_kill == 0) _exit(kKilled);
  if (calls_until_kill > 0) --calls_until_kill;
}

template <class... Arguments>
int call(long number, Arguments... arguments) {
  before_call();
  return static_cast<int>(syscall(number, arguments...));
}

}  // namespace

// Replaces the C library's functions, for the library under test too.
#define TITAN_INTERPOSED extern "C" __attribute__((visibility("default")))
TITAN_INTERPOSED int fsync(int descriptor) {
  if (record) note("sync", path_of(descriptor));
  return call(SYS_fsync, descriptor);
}
TITAN_INTERPOSED int fdatasync(int descriptor) {
  if (record) note("sync", path_of(descriptor));
  return call(SYS_fdatasync, descriptor);
}
// With LibTorch's large files, pwritev and pwritev64 are the same.
TITAN_INTERPOSED ssize_t pwritev(int descriptor, const iovec* parts, int count, off_t offset) {
  if (record) note(offset == 0 ? "write start of" : "write", path_of(descriptor));
  return syscall(SYS_pwritev, descriptor, parts, count, offset, 0);
}
TITAN_INTERPOSED int rename(const char* from, const char* to) noexcept {
  if (renames_until_failure > 0) {
    --renames_until_failure;
  } else if (renames_until_failure == 0) {
    if (--failing_renames == 0) {
      renames_until_failure = kNever;
      failing_renames = 1;
    }
    errno = EIO;
    return -1;
  }
  note("rename", from);
  return call(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0u);
}
TITAN_INTERPOSED int renameat2(int from_folder, const char* from, int to_folder, const char* to,
                               unsigned flags) noexcept {
  if (can_exchange) note("exchange", from);
  if (can_exchange) return call(SYS_renameat2, from_folder, from, to_folder, to, flags);
  before_call();
  errno = EINVAL;
  return -1;
}
TITAN_INTERPOSED int unlinkat(int folder, const char* name, int flags) noexcept {
  if (record) note("remove", folder == AT_FDCWD ? name : path_of(folder));
  return call(SYS_unlinkat, folder, name, flags);
}
TITAN_INTERPOSED int unlink(const char* name) noexcept { return call(SYS_unlinkat, AT_FDCWD, name, 0); }
TITAN_INTERPOSED int rmdir(const char* name) noexcept {
  return call(SYS_unlinkat, AT_FDCWD, name, AT_REMOVEDIR);
}

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using titan::testing::as_nobody;
using titan::testing::CheckpointToSave;
using titan::testing::in_child;
using titan::testing::save_checkpoint;
using titan::testing::TempFolder;
using titan::testing::write_checkpoint_files;

constexpr const char* kOld = "00000000000000000000000000000001";
constexpr const char* kNew = "00000000000000000000000000000002";

CheckpointToSave of(const std::string& run_id, int64_t step = 7) {
  return {.run_id = run_id, .step = step, .world_size = 2, .tensors = {{"w", at::arange(8.0), {}}}};
}

void write_pending(const fs::path& folder, const CheckpointToSave& save) {
  write_checkpoint_files(pending_path(folder, save.step, save.run_id), save);
}

std::vector<int64_t> numbers(const std::vector<StepEntry>& steps) {
  std::vector<int64_t> numbers;
  for (const StepEntry& step : steps) numbers.push_back(step.step);
  return numbers;
}

// The run that a whole step belongs to.
std::string owner_of(const fs::path& step) {
  return quick_problems(step).empty() ? read_manifest(step).run_id : "none: " + quick_problems(step).front();
}

void clean(const fs::path& folder) { clean_leftovers(folder, FolderLock(folder)); }

class ExchangeOrNot : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override { can_exchange = GetParam(); }
  void TearDown() override { can_exchange = true; }
};

TEST_P(ExchangeOrNot, CommitsAndReplacesAStep) {
  const TempFolder folder;
  write_pending(folder.path(), of(kOld));
  EXPECT_THAT(list_steps(folder.path()), ElementsAre());
  commit_step(folder.path(), 7, kOld);
  EXPECT_EQ(owner_of(folder / "step-7"), kOld);
  write_pending(folder.path(), of(kNew));
  commit_step(folder.path(), 7, kNew);
  EXPECT_EQ(owner_of(folder / "step-7"), kNew);
  EXPECT_THAT(list_leftovers(folder.path()), ElementsAre());
}

TEST_P(ExchangeOrNot, ReplacesALeftoverOfTheSameName) {
  const TempFolder folder;
  save_checkpoint(folder.path(), of(kOld));
  fs::create_directories(folder / str(".step-7.", kNew, ".old") / "half");
  write_pending(folder.path(), of(kNew));
  commit_step(folder.path(), 7, kNew);
  EXPECT_EQ(owner_of(folder / "step-7"), kNew);
}

// At every moment the old or the new step exists, or the next run restores it.
TEST_P(ExchangeOrNot, KillWhileReplacingLosesNoStep) {
  int kills = 0, steps_not_there = 0;
  std::set<std::string> owners;
  for (bool killed = true; killed; ++kills) {
    const TempFolder folder;
    save_checkpoint(folder.path(), of(kOld));
    write_pending(folder.path(), of(kNew));
    const int status = in_child([&] {
                         calls_until_kill = kills;
                         commit_step(folder.path(), 7, kNew);
                         return std::string();
                       }).status;
    killed = status == kKilled;
    ASSERT_TRUE(killed || status == 0) << status;
    steps_not_there += list_steps(folder.path()).empty();
    clean(folder.path());
    EXPECT_THAT(list_leftovers(folder.path()), ElementsAre());
    EXPECT_THAT(numbers(list_steps(folder.path())), ElementsAre(7));
    owners.insert(owner_of(folder / "step-7"));
  }
  EXPECT_GE(kills, 7);  // fewer: the calls weren't counted
  EXPECT_EQ(steps_not_there, GetParam() ? 0 : 1);
  EXPECT_THAT(owners, ElementsAre(kOld, kNew));
}

TEST_P(ExchangeOrNot, KillWhileCommittingLeavesNoPartialStep) {
  std::set<size_t> counts;
  bool killed = true;
  for (int kills = 0; killed; ++kills) {
    const TempFolder folder;
    write_pending(folder.path(), of(kNew));
    killed = in_child([&] {
               calls_until_kill = kills;
               commit_step(folder.path(), 7, kNew);
               return std::string();
             }).status == kKilled;
    for (const StepEntry& step : list_steps(folder.path())) EXPECT_EQ(owner_of(step.path), kNew);
    counts.insert(list_steps(folder.path()).size());
    clean(folder.path());
    EXPECT_THAT(list_leftovers(folder.path()), ElementsAre());
  }
  EXPECT_THAT(counts, ElementsAre(0, 1));
}

// Leftovers of a kill, cleaned by runs that are killed too.
TEST_P(ExchangeOrNot, KillWhileCleaningLosesNoStep) {
  int kills = 0;
  for (bool killed = true; killed; ++kills) {
    const TempFolder folder;
    save_checkpoint(folder.path(), of(kOld));
    // The moment between the two renames.
    write_pending(folder.path(), of(kNew));
    fs::rename(folder / "step-7", folder / str(".step-7.", kNew, ".replaced"));
    write_pending(folder.path(), of(kNew, 8));
    killed = in_child([&] {
               calls_until_kill = kills;
               clean(folder.path());
               return std::string();
             }).status == kKilled;
    clean(folder.path());
    EXPECT_THAT(list_leftovers(folder.path()), ElementsAre());
    ASSERT_THAT(numbers(list_steps(folder.path())), ElementsAre(7));
    EXPECT_EQ(owner_of(folder / "step-7"), kOld);
  }
  EXPECT_GE(kills, 8);
}

// A power loss leaves only what was synced; a kill doesn't lose the page cache.
TEST_P(ExchangeOrNot, SyncsBeforeRemoving) {
  const TempFolder folder;
  save_checkpoint(folder.path(), of(kOld));
  write_pending(folder.path(), of(kNew));
  std::vector<std::string> calls;
  record = &calls;
  commit_step(folder.path(), 7, kNew);
  record = nullptr;
  const std::string here = folder.path().string(), pending = pending_path(here, 7, kNew).string(),
                    replaced = str(here, "/.step-7.", kNew, ".replaced");
  const auto sync_pending = str("sync ", pending), sync_folder = str("sync ", here);
  const std::vector<std::string> exchange = {sync_pending, str("exchange ", pending), sync_folder},
                                 renames = {
                                     sync_pending, str("rename ", here, "/step-7"), str("rename ", pending),
                                     sync_folder,  str("rename ", replaced),        sync_folder};
  const auto& expected = GetParam() ? exchange : renames;
  ASSERT_GT(calls.size(), expected.size());
  EXPECT_EQ(std::vector<std::string>(calls.begin(), calls.begin() + static_cast<ptrdiff_t>(expected.size())),
            expected);
  for (size_t i = expected.size(); i < calls.size(); ++i)
    EXPECT_THAT(calls[i], ::testing::StartsWith("remove"));
}

std::string logged_by(const std::function<void()>& act) {
  ::testing::internal::CaptureStderr();
  act();
  return ::testing::internal::GetCapturedStderr();
}

TEST_P(ExchangeOrNot, LogsWhatBecomesOfTheEarlierStep) {
  const TempFolder folder;
  const fs::path step = save_checkpoint(folder.path(), of(kOld));
  fs::remove(step / "rank_00001.safetensors");
  write_pending(folder.path(), of(kNew));
  EXPECT_THAT(logged_by([&] { commit_step(folder.path(), 7, kNew); }),
              HasSubstr(str("removed the earlier ", step.string(),
                            ", because the new step 7 takes its place; it was damaged: ",
                            (step / "rank_00001.safetensors").string(), " is missing\n")));
  write_pending(folder.path(), of(kOld));
  EXPECT_THAT(logged_by([&] { commit_step(folder.path(), 7, kOld); }), HasSubstr("takes its place\n"));
  fs::remove(step / "manifest.json");
  write_pending(folder.path(), of(kNew));
  EXPECT_THAT(logged_by([&] { commit_step(folder.path(), 7, kNew); }),
              AllOf(HasSubstr(str("the earlier ", step.string(), " is kept as ", step.string(),
                                  ".model: it has no manifest.json")),
                    ::testing::Not(HasSubstr("removed"))));
}

TEST_P(ExchangeOrNot, NamesTheDamageOfAnEarlierModel) {
  const TempFolder folder;
  const dist::World world = dist::init({.backend = "gloo", .device = "cpu"});
  std::vector<Parameter> parameters(1);
  parameters[0].name = "w";
  parameters[0].data =
      distribute(at::ones({2}), DeviceMesh::create(world, {{"dp", 1}}), {Placement::replicate()});
  ModelSaveOptions options;
  options.folder.step = 7;
  const fs::path step = folder / "step-7", file = step / "model.safetensors";
  save_model(parameters, world, step, options);
  fs::remove(file);
  const std::string damage = str("takes its place; it was damaged: ", file.string(), " is missing\n");
  const fs::path pending = pending_path(folder.path(), 7, kNew);
  save_model(parameters, world, pending, options);
  EXPECT_THAT(logged_by([&] { commit_step(folder.path(), 7, kNew); }), HasSubstr(damage));
  fs::remove(file);
  write_pending(folder.path(), of(kNew));
  EXPECT_THAT(logged_by([&] { commit_step(folder.path(), 7, kNew); }),
              AllOf(HasSubstr("step-7.model"), HasSubstr("it was damaged: "),
                    HasSubstr("model.safetensors is missing")));
}

class Numbers : public Stateful {
 public:
  explicit Numbers(const dist::World& world)
      : data_(distribute(at::arange(1'000'000.0), DeviceMesh::create(world, {{"dp", 1}}),
                         {Placement::replicate()})) {}
  ObjectState state() override { return {.tensors = {{"numbers", data_, false}}, .text = "text"}; }
  void loaded(const std::string& /*text*/) override {}

 private:
  DTensor data_;
};

// A file counts as reported only when it is on disk, and the manifest, which makes the step whole, is written
// only after the reports. The step gets its name when all of its contents, and their names, are on disk.
TEST(OneSave, WritesSyncsReportsAndRenamesInThisOrder) {
  const TempFolder folder;
  const dist::World world = dist::init({.backend = "gloo", .device = "cpu"});
  std::vector<std::string> calls;
  const auto on_phase = [&](SavePhase phase) {
    if (phase == SavePhase::Gather) note("report", "");
    if (phase == SavePhase::Verdict) note("verdict", "");
  };
  Numbers object(world);
  Checkpointer checkpointer(world, {}, {.folder = folder.path(), .num_threads = 1, .on_phase = on_phase});
  checkpointer.add("numbers", object);
  record = &calls;
  checkpointer.save(7);
  checkpointer.finish();
  record = nullptr;
  const std::string run_id = read_manifest(folder / "step-7").run_id;
  const std::string pending = pending_path(folder.path(), 7, run_id).string();
  const std::string file = pending + "/rank_00000.safetensors", manifest = pending + "/manifest.json";
  EXPECT_THAT(calls, ElementsAre("write " + file, "write start of " + file, "sync " + file, "report ",
                                 "write start of " + manifest, "sync " + manifest, "sync " + pending,
                                 "rename " + pending, "sync " + folder.path().string(), "verdict "));
}

TEST(OneSave, LogsTheFoldersThatItRemoves) {
  const TempFolder folder;
  const dist::World world = dist::init({.backend = "gloo", .device = "cpu"});
  bool fails = false;
  const auto on_phase = [&](SavePhase phase) {
    if (fails && phase == SavePhase::Commit) throw Error("told to fail");
  };
  Numbers object(world);
  SaveOptions options{.folder = folder.path(), .keep_latest = 1, .stop_on_failure = false};
  options.on_phase = on_phase;
  Checkpointer checkpointer(world, {}, options);
  checkpointer.add("numbers", object);
  const auto save = [&](int64_t step) {
    checkpointer.save(step);
    checkpointer.finish();
  };
  save(7);
  EXPECT_THAT(logged_by([&] { save(8); }),
              HasSubstr(str("removed ", (folder / "step-7").string(), ": 1 newer step is kept\n")));
  fails = true;
  EXPECT_THAT(logged_by([&] { save(9); }),
              ::testing::ContainsRegex("removed [^ ]*/\\.step-9\\.[0-9a-f]*\\.tmp: its save failed\n"));
  EXPECT_THAT(list_leftovers(folder.path()), ElementsAre());
}

INSTANTIATE_TEST_SUITE_P(StepCommit, ExchangeOrNot, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "Exchange" : "TwoRenames"; });

TEST(StepCommit, RestoresTheOldStepAfterAFailedRename) {
  const TempFolder folder;
  save_checkpoint(folder.path(), of(kOld));
  write_pending(folder.path(), of(kNew));
  can_exchange = false;
  renames_until_failure = 1;
  EXPECT_THROW(commit_step(folder.path(), 7, kNew), Error);
  can_exchange = true;
  EXPECT_EQ(renames_until_failure, kNever);  // the failure happened
  EXPECT_EQ(owner_of(folder / "step-7"), kOld);
  commit_step(folder.path(), 7, kNew);
  EXPECT_EQ(owner_of(folder / "step-7"), kNew);
}

// Undoing the first rename fails too, as when a server is unavailable for seconds.
TEST(StepCommit, NextRunRestoresTheOldStep) {
  const TempFolder folder;
  save_checkpoint(folder.path(), of(kOld));
  write_pending(folder.path(), of(kNew));
  can_exchange = false;
  renames_until_failure = 1;
  failing_renames = 2;
  EXPECT_THROW(commit_step(folder.path(), 7, kNew), Error);
  can_exchange = true;
  EXPECT_THAT(list_steps(folder.path()), ElementsAre());
  fs::remove_all(pending_path(folder.path(), 7, kNew));  // as the run does after a failed commit
  clean(folder.path());
  EXPECT_EQ(owner_of(folder / "step-7"), kOld);
  EXPECT_THAT(list_leftovers(folder.path()), ElementsAre());
}

// Conversely, a half-removed step isn't restored just because another one is pending.
TEST(StepCommit, NeverRestoresAHalfRemovedStep) {
  const TempFolder folder;
  fs::rename(save_checkpoint(folder.path(), of(kOld)), folder / str(".step-7.", kNew, ".old"));
  write_pending(folder.path(), of(kNew));
  clean(folder.path());
  EXPECT_THAT(list_steps(folder.path()), ElementsAre());
  EXPECT_THAT(list_leftovers(folder.path()), ElementsAre());
}

void write_model_alone(const fs::path& step) {
  fs::create_directories(step);
  std::ofstream(step / "model.safetensors") << "a model";
}

// An exported model is a user's result, and a run resumes from a state: neither may be lost.
TEST_P(ExchangeOrNot, KeepsAStepOfAnotherKind) {
  const TempFolder folder;
  write_model_alone(folder / "step-7");
  write_pending(folder.path(), of(kNew));
  commit_step(folder.path(), 7, kNew);
  EXPECT_EQ(owner_of(folder / "step-7"), kNew);
  EXPECT_TRUE(fs::exists(folder / "step-7.model/model.safetensors"));
  for (int export_number = 0; export_number < 2; ++export_number) {
    write_model_alone(pending_path(folder.path(), 7, kOld));
    commit_step(folder.path(), 7, kOld);
    EXPECT_TRUE(fs::exists(folder / "step-7/model.safetensors"));
  }
  EXPECT_EQ(owner_of(folder / "step-7.state"), kNew);
  write_pending(folder.path(), of(kNew));
  commit_step(folder.path(), 7, kNew);
  EXPECT_EQ(
      list_put_aside(folder.path()),
      (std::vector<fs::path>{folder / "step-7.model", folder / "step-7.model.2", folder / "step-7.state"}));
  EXPECT_THAT(numbers(list_steps(folder.path())), ElementsAre(7));
  EXPECT_THAT(list_leftovers(folder.path()), ElementsAre());
}

TEST_P(ExchangeOrNot, KillKeepsAStepOfAnotherKind) {
  int kills = 0;
  for (bool killed = true; killed; ++kills) {
    const TempFolder folder;
    write_model_alone(folder / "step-7");
    write_pending(folder.path(), of(kNew));
    killed = in_child([&] {
               calls_until_kill = kills;
               commit_step(folder.path(), 7, kNew);
               return std::string();
             }).status == kKilled;
    clean(folder.path());
    const bool has_model = fs::exists(folder / "step-7/model.safetensors"),
               kept_model = fs::exists(folder / "step-7.model/model.safetensors");
    EXPECT_TRUE(has_model != kept_model) << kills;
    EXPECT_EQ(kept_model, fs::exists(folder / "step-7/manifest.json")) << kills;
    EXPECT_THAT(list_leftovers(folder.path()), ElementsAre());
  }
  EXPECT_GE(kills, 5);
}

TEST(StepCommit, ChangesNothingWithoutAPendingFolder) {
  const TempFolder folder;
  save_checkpoint(folder.path(), of(kOld));
  EXPECT_THROW(commit_step(folder.path(), 7, kNew), Error);
  EXPECT_EQ(owner_of(folder / "step-7"), kOld);
}

TEST(StepCommit, KillWhileRemovingLeavesNoPartialStep) {
  int kills = 0;
  for (bool killed = true; killed; ++kills) {
    const TempFolder folder;
    save_checkpoint(folder.path(), of(kOld, 6));
    save_checkpoint(folder.path(), of(kOld));
    const auto steps = list_steps(folder.path());
    killed = in_child([&] {
               calls_until_kill = kills;
               remove_step(steps.front(), kNew);
               return std::string();
             }).status == kKilled;
    for (const StepEntry& step : list_steps(folder.path())) EXPECT_EQ(owner_of(step.path), kOld);
    clean(folder.path());
    // The step is gone or still whole; a half-removed one is never restored.
    for (const StepEntry& step : list_steps(folder.path())) EXPECT_EQ(owner_of(step.path), kOld);
    EXPECT_THAT(list_leftovers(folder.path()), ElementsAre());
  }
  EXPECT_GE(kills, 6);
}

TEST(StepCommit, CleansNothingWithoutTheLock) {
  const TempFolder folder;
  write_pending(folder.path(), of(kNew));
  FolderLock lock(folder.path());
  const FolderLock other = std::move(lock);
  ASSERT_FALSE(lock.held());
  fs::rename(save_checkpoint(folder.path(), of(kOld)), folder / str(".step-7.", kOld, ".replaced"));
  ::testing::internal::CaptureStderr();
  clean_leftovers(folder.path(), lock);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr(pending_path(folder.path(), 7, kNew).string() + " belongs to a run"),
                    HasSubstr("this is a whole step: rename it to " + (folder / "step-7").string())));
  EXPECT_EQ(list_leftovers(folder.path()).size(), 2u);
  clean_leftovers(folder.path(), other);
  EXPECT_EQ(owner_of(folder / "step-7"), kOld);
  EXPECT_THAT(list_leftovers(folder.path()), ElementsAre());
}

// A step is useless if its folder's own name was lost.
TEST(StepCommit, SyncsTheParentFolders) {
  const TempFolder folder;
  std::vector<std::string> calls;
  record = &calls;
  { const FolderLock lock(folder / "outputs/checkpoint"); }
  record = nullptr;
  EXPECT_THAT(calls,
              ElementsAre(str("sync ", (folder / "outputs").string()), str("sync ", folder.path().string())));
}

TEST(StepCommit, CleaningRemovesOnlyLeftovers) {
  const TempFolder folder, elsewhere;
  std::ofstream(elsewhere / "kept") << "kept";
  fs::create_directory_symlink(elsewhere.path(), folder / ".step-3.ab.tmp");
  for (const char* name : {".snapshot", "notes", "step-5", ".step-x.a.tmp"})
    fs::create_directory(folder / name);
  clean(folder.path());
  EXPECT_TRUE(fs::exists(elsewhere / "kept"));
  EXPECT_FALSE(fs::exists(fs::symlink_status(folder / ".step-3.ab.tmp")));
  for (const char* name : {".snapshot", "notes", "step-5", ".step-x.a.tmp"})
    EXPECT_TRUE(fs::exists(folder / name));
}

TEST(StepCommit, NamesAReadOnlyFolder) {
  const TempFolder folder;
  const fs::path step = save_checkpoint(folder.path(), of(kOld));
  write_pending(folder.path(), of(kNew));
  fs::permissions(folder.path(), fs::perms(0555));
  const auto commit = as_nobody([&] {
    commit_step(folder.path(), 7, kNew);
    return std::string();
  });
  const auto removal = as_nobody([&] {
    remove_step({7, step, true}, kNew);
    return std::string();
  });
  fs::permissions(folder.path(), fs::perms(0755));
  EXPECT_EQ(commit.status, 1);
  EXPECT_EQ(commit.message, str("cannot exchange ", pending_path(folder.path(), 7, kNew).string(), " and ",
                                step.string(), ": Permission denied (EACCES)"));
  EXPECT_EQ(removal.status, 1);
  EXPECT_EQ(removal.message,
            str("cannot rename ", step.string(), " to ", (folder / str(".step-7.", kNew, ".old")).string(),
                ": Permission denied (EACCES)"));
  EXPECT_EQ(owner_of(step), kOld);
}

CheckpointToSave not_finite(int64_t step) {
  CheckpointToSave save = of(kOld, step);
  save.tensors[0].data = at::full({8}, std::numeric_limits<double>::infinity());
  return save;
}

TEST(Prune, RemovesTheOldest) {
  const TempFolder folder;
  for (int64_t step : {1, 2, 3, 10}) save_checkpoint(folder.path(), of(kOld, step));
  const auto steps = list_steps(folder.path());
  EXPECT_THAT(numbers(steps_to_prune(steps, 2)), ElementsAre(1, 2));
  EXPECT_THAT(numbers(steps_to_prune(steps, 1)), ElementsAre(1, 2, 3));
  EXPECT_THAT(steps_to_prune(steps, 4), ElementsAre());
  EXPECT_THAT(steps_to_prune(steps, 0), ElementsAre());
  EXPECT_THAT(steps_to_prune({}, 1), ElementsAre());
}

TEST(Prune, KeepsTheNewestFiniteStepThroughAnyNumberOfOthers) {
  const TempFolder folder;
  save_checkpoint(folder.path(), of(kOld, 1));
  save_checkpoint(folder.path(), of(kOld, 2));
  for (int64_t step = 3; step <= 13; ++step) {
    save_checkpoint(folder.path(), not_finite(step));
    for (const StepEntry& pruned : steps_to_prune(list_steps(folder.path()), 2)) remove_step(pruned, kNew);
  }
  EXPECT_THAT(numbers(list_steps(folder.path())), ElementsAre(2, 12, 13));
}

TEST(Prune, DoesNotKeepADamagedStepAsTheGoodOne) {
  const TempFolder folder;
  for (int64_t step : {1, 2, 3, 4}) save_checkpoint(folder.path(), of(kOld, step));
  std::ofstream(folder / "step-4/manifest.json") << "damaged";
  fs::remove(folder / "step-3/rank_00001.safetensors");
  EXPECT_THAT(numbers(steps_to_prune(list_steps(folder.path()), 1)), ElementsAre(1, 3));
}

TEST(Prune, LeavesModelsAndPendingSteps) {
  const TempFolder folder;
  for (int64_t step : {1, 5, 6}) save_checkpoint(folder.path(), of(kOld, step));
  for (const char* name : {"step-2", "step-9"}) {
    fs::create_directory(folder / name);
    std::ofstream(folder / name / "model.safetensors") << "a model";
  }
  write_pending(folder.path(), of(kNew, 3));
  EXPECT_THAT(numbers(steps_to_prune(list_steps(folder.path()), 1)), ElementsAre(1, 5));
}

}  // namespace
}  // namespace titan::checkpoint
