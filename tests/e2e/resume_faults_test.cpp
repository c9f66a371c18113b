// How a run handles damaged checkpoints, full disks, and folders that can't be written.

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <functional>

#include "e2e/resume_run.h"

namespace titan::testing {
namespace {

void flip_a_bit(const std::filesystem::path& file, int64_t from_end) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(-from_end, std::ios::end);
  const auto byte = static_cast<char>(stream.get() ^ 4);
  stream.seekp(-from_end, std::ios::end);
  stream.put(byte);
}

struct Damage {
  const char* name;
  std::function<void(const std::filesystem::path& step)> make;
  const char* reported;
};
void PrintTo(const Damage& damage, std::ostream* out) { *out << damage.name; }

class DamagedStep : public ::testing::TestWithParam<Damage> {};

TEST_P(DamagedStep, FallsBackToTheStepBefore) {
  const Words words = resumable(fresh_folder("config")) + ranks(2);
  const auto run = fresh_folder("run");
  train(run, part_of_run(words, 15));
  const Curve before = curve_of(run);
  GetParam().make(step_folder(run, 15));
  // Damage to a step that was requested is an error.
  EXPECT_THAT(try_train(words + Words{"--job.dump_folder", run.string(), "--checkpoint.load_step", "15"}).err,
              HasSubstr(GetParam().reported));
  EXPECT_EQ(curve_of(run), before);
  // The run has one more step to do, because a run that has ended reads no state.
  EXPECT_THAT(
      train_log(run, part_of_run(words, 16)),
      AllOf(HasSubstr("skipped: "), HasSubstr(GetParam().reported), HasSubstr("resuming after step 10")));
  Curve after = curve_of(run);
  ASSERT_EQ(after.size(), 16u);
  after.erase(16);
  EXPECT_EQ(after, before);
}

INSTANTIATE_TEST_SUITE_P(
    Resume, DamagedStep,
    ::testing::Values(
        Damage{"CutFile",
               [](const auto& step) {
                 const auto file = step / "rank_00001.safetensors";
                 std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1);
               },
               "rank_00001.safetensors has "},
        Damage{"MissingFile",
               [](const auto& step) { std::filesystem::remove(step / "rank_00000.safetensors"); },
               "rank_00000.safetensors is missing"},
        Damage{"Manifest", [](const auto& step) { flip_a_bit(step / "manifest.json", 100); },
               "manifest.json"},
        Damage{"NoManifest", [](const auto& step) { std::filesystem::remove(step / "manifest.json"); },
               "manifest.json is missing"},
        Damage{"OneBit", [](const auto& step) { flip_a_bit(step / "rank_00001.safetensors", 1000); },
               "rank_00001.safetensors"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Resume, NamesTheModelsSettingThatChanged) {
  const Words words = resumable(fresh_folder("config")) + Words{"--training.steps", "5"};
  const auto run = fresh_folder("run");
  train(run, words + Words{"--checkpoint.no_last_save_model_only"});
  const CommandResult result = try_train(
      words + Words{"--job.dump_folder", run.string(), "--training.steps", "6", "--model.args.dim", "32"});
  EXPECT_EQ(result.status, 2) << result.err;
  EXPECT_THAT(
      result.err,
      AllOf(HasSubstr("was saved with another model (its settings | this run's): model.args.dim: 64 | 32"),
            Not(HasSubstr("and 1"))));
}

TEST(DamagedSteps, AreAllNamedIfNoneIsIntact) {
  const Words words = resumable(fresh_folder("config")) + ranks(2);
  const auto run = fresh_folder("run");
  train(run, part_of_run(words, 10));
  std::filesystem::remove(step_folder(run, 5) / "manifest.json");
  flip_a_bit(step_folder(run, 10) / "rank_00000.safetensors", 1000);
  const auto resume = [&] {
    const CommandResult result = try_train(
        words + Words{"--job.dump_folder", run.string(), "--training.steps", "11", "--max-restarts", "3"});
    EXPECT_EQ(result.status, 2) << result.err;
    EXPECT_THAT(result.err,
                AllOf(HasSubstr("no intact checkpoint is left in " + (run / "checkpoint").string()),
                      ContainsRegex("step-10/rank_00000.safetensors.*step-5/manifest.json is missing"),
                      HasSubstr("exit code 2 is final")));
  };
  resume();  // the damage shows when tensors are read
  std::filesystem::resize_file(step_folder(run, 10) / "rank_00000.safetensors", 1000);
  resume();  // it shows in the file's size
}

// The run saves the damaged step again, and removes old ones.
TEST(DamagedSteps, AreReplacedAndOldOnesRemovedWithOneLineEach) {
  const Words words = resumable(fresh_folder("config")) + ranks(2) +
                      Words{"--log-rank", "all", "--checkpoint.keep_latest_k", "2"};
  const auto run = fresh_folder("run");
  train(run, part_of_run(words, 10));
  std::filesystem::remove(step_folder(run, 10) / "rank_00001.safetensors");
  const std::string log = train_log(run, part_of_run(words, 15));
  const auto count = [&](const std::string& part) {
    int count = 0;
    for (size_t at = log.find(part); at != std::string::npos; at = log.find(part, at + 1)) ++count;
    return count;
  };
  const std::string five = step_folder(run, 5).string(), ten = step_folder(run, 10).string();
  EXPECT_EQ(count("removed the earlier " + ten +
                  ", because the new step 10 takes its place; it was damaged: " + ten +
                  "/rank_00001.safetensors is missing"),
            1)
      << log;
  EXPECT_EQ(count("removed " + five + ": 2 newer steps are kept"), 1) << log;
  EXPECT_EQ(count("removed "), 2) << log;
}

// A run whose result is damaged isn't complete: it makes the result again.
TEST(DamagedSteps, TheFinalModelIsSavedAgain) {
  const Words words = resumable(fresh_folder("config")) + Words{"--checkpoint.last_save_model_only"};
  const auto run = fresh_folder("run");
  train(run, words);
  const auto model = step_folder(run, 20) / "model.safetensors";
  const auto size = std::filesystem::file_size(model);
  std::filesystem::resize_file(model, size / 2);
  const std::string log = train_log(run, words);
  EXPECT_THAT(log, AllOf(HasSubstr("resuming after step"), Not(HasSubstr("this run is complete"))));
  EXPECT_EQ(std::filesystem::file_size(model), size);
  flip_a_bit(model, static_cast<int64_t>(size) - 200);  // in the header, which is still well-formed or not
  EXPECT_THAT(train_log(run, words), HasSubstr("resuming after step"));
  EXPECT_THAT(train_log(run, words), HasSubstr("this run is complete"));
}

// A run that starts from another run's model compares checksums, as it does with a step.
TEST(DamagedSteps, AModelWithAFlippedBitIsNotLoaded) {
  const Words words = resumable(fresh_folder("config")) + Words{"--checkpoint.last_save_model_only"};
  const auto run_folder = fresh_folder("run"), step = step_folder(run_folder, 20);
  train(run_folder, words);
  EXPECT_EQ(run({titan_program(), "checkpoint", "verify", step.string()}).status, 0);
  flip_a_bit(step / "model.safetensors", 9);
  const CommandResult verified = run({titan_program(), "checkpoint", "verify", step.string()});
  EXPECT_EQ(verified.status, 1);
  EXPECT_THAT(verified.out, HasSubstr("the bytes don't match their checksum"));
  for (const auto& path : {step, step / "model.safetensors"}) {
    const CommandResult result = try_train(words + Words{"--job.dump_folder", fresh_folder("other").string(),
                                                         "--checkpoint.initial_load_path", path.string()});
    EXPECT_EQ(result.status, 2);
    EXPECT_THAT(result.err, HasSubstr("doesn't match its checksum"));
  }
}

using std::filesystem::perms;

constexpr perms kReadOnly = perms::owner_read | perms::owner_exec | perms::others_read | perms::others_exec;

// A command prefix that runs a command as a user without root's rights: root may write anywhere.
Words as_user() {
  const Words nobody = {"setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"};
  return ::geteuid() == 0 ? nobody : Words{};
}

bool user_can_train() { return run(as_user() + Words{"test", "-x", titan_program()}).status == 0; }

// A run's folder for that user, with a folder for its steps.
std::filesystem::path folder_of_user(const std::string& name) {
  const auto dump = fresh_folder(name);
  std::filesystem::create_directory(dump / "checkpoint");
  for (const auto& folder : {dump, dump / "checkpoint"}) std::filesystem::permissions(folder, perms::all);
  return dump;
}

TEST(ReadOnlyFolder, IsReportedAtTheStart) {
  if (!user_can_train()) GTEST_SKIP() << "a user without rights can't run " << titan_program();
  const auto config = fresh_folder("config"), dump = folder_of_user("run");
  std::filesystem::permissions(dump / "checkpoint", kReadOnly);
  const CommandResult result =
      run(as_user() + train_words(resumable(config)) + Words{"--job.dump_folder", dump.string()});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, AllOf(HasSubstr((dump / "checkpoint").string()), HasSubstr("Permission denied"),
                                Not(HasSubstr("step:  1"))));
}

int64_t newest_step(const std::filesystem::path& run) {
  int64_t newest = 0;
  for (const std::string& name : names_in(run / "checkpoint"))
    if (name.starts_with("step-")) newest = std::max<int64_t>(newest, std::stoll(name.substr(5)));
  return newest;
}

void expect_whole(const std::filesystem::path& step) {
  const CommandResult verified = run({titan_program(), "checkpoint", "verify", step.string()});
  EXPECT_EQ(verified.status, 0) << verified.out << verified.err;
}

Words endless(const std::string& name, const std::filesystem::path& dump, const std::string& on_failure) {
  return as_user() + train_words(resumable(fresh_folder(name + "_config")) +
                                 Words{"--job.dump_folder", dump.string(), "--training.steps", "1000000",
                                       "--checkpoint.async_mode", "async_with_pinned_mem",
                                       "--checkpoint.on_failure", on_failure});
}

TEST(ReadOnlyFolder, StopsTheRunIfItBecomesReadOnly) {
  if (!user_can_train()) GTEST_SKIP() << "a user without rights can't run " << titan_program();
  const auto dump = folder_of_user("run");
  Command job(endless("run", dump, "stop"), {{"OMP_NUM_THREADS", "1"}});
  ASSERT_TRUE(wait_until([&] { return newest_step(dump) > 0; })) << job.wait(0).err;
  std::filesystem::permissions(dump / "checkpoint", kReadOnly);
  const CommandResult result = job.wait(60);
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, AllOf(HasSubstr((dump / "checkpoint").string()), HasSubstr("Permission denied")));
  expect_whole(step_folder(dump, static_cast<int>(newest_step(dump))));
}

TEST(ReadOnlyFolder, IsWrittenToAgainOnceItIsWritable) {
  if (!user_can_train()) GTEST_SKIP() << "a user without rights can't run " << titan_program();
  const auto dump = folder_of_user("run");
  Command job(endless("run", dump, "continue"), {{"OMP_NUM_THREADS", "1"}});
  ASSERT_TRUE(wait_until([&] { return newest_step(dump) > 0; })) << job.wait(0).err;
  std::filesystem::permissions(dump / "checkpoint", kReadOnly);
  const auto wait_for_steps = [&](int64_t number) {
    const auto last_row = [&] {
      const Lines rows = whole_rows(dump);
      return rows.empty() ? 0 : rows.back().at("step").get<int64_t>();
    };
    const int64_t first = last_row();
    return wait_until([&] { return last_row() >= first + number; });
  };
  // The save in progress has ended, and two more are due.
  ASSERT_TRUE(wait_for_steps(6)) << job.wait(0).err;
  const int64_t before = newest_step(dump);
  ASSERT_TRUE(wait_for_steps(12)) << job.wait(0).err;
  EXPECT_EQ(newest_step(dump), before);
  expect_whole(step_folder(dump, static_cast<int>(before)));
  std::filesystem::permissions(dump / "checkpoint", perms::all);
  ASSERT_TRUE(wait_until([&] { return newest_step(dump) > before; })) << job.wait(0).err;
  job.signal(SIGTERM);
  const CommandResult result = job.wait(60);
  EXPECT_THAT(result.err, HasSubstr("Permission denied"));
  expect_whole(step_folder(dump, static_cast<int>(newest_step(dump))));
}

// A file-size limit fails writes as a full disk does, for every user and without a disk to fill.
CommandResult train_with_file_limit(int kib, const Words& words) {
  std::string command = "ulimit -f " + std::to_string(kib) + "; exec";
  for (const std::string& word : train_words(words)) command += " '" + word + "'";
  return run({"/bin/bash", "-c", command}, {{"OMP_NUM_THREADS", "1"}}, 100);
}

// The state has 1.6 MB, the model alone 0.5.
TEST(FullDisk, StopsTheRunOrIsLogged) {
  for (const std::string mode : {"disabled", "async", "async_with_pinned_mem"}) {
    const Words words = resumable(fresh_folder("config")) + Words{"--checkpoint.async_mode", mode};
    const auto stopped = fresh_folder("stopped"), went_on = fresh_folder("went_on");
    const CommandResult stop =
        train_with_file_limit(800, words + Words{"--job.dump_folder", stopped.string()});
    EXPECT_EQ(stop.status, 1) << mode;
    EXPECT_THAT(stop.err, AllOf(HasSubstr("rank_00000.safetensors"), HasSubstr("bytes"))) << mode;
    EXPECT_EQ(names_in(stopped / "checkpoint"), (std::vector<std::string>{".lock"})) << mode;

    const CommandResult on = train_with_file_limit(
        800, words + Words{"--job.dump_folder", went_on.string(), "--checkpoint.on_failure", "continue",
                           "--checkpoint.interval", "8"});
    EXPECT_EQ(on.status, 0) << mode << on.err;
    EXPECT_THAT(on.err, HasSubstr("rank_00000.safetensors")) << mode;
    EXPECT_EQ(curve_of(went_on).size(), 20u) << mode;
    EXPECT_EQ(names_in(went_on / "checkpoint"), (std::vector<std::string>{".lock", "step-20"})) << mode;
  }
}

// A seed that can't be written is an error even if training may continue without checkpoints.
TEST(FullDisk, IsAnErrorForASeed) {
  const auto run = fresh_folder("run");
  const CommandResult result =
      train_with_file_limit(400, resumable(fresh_folder("config")) +
                                     Words{"--checkpoint.create_seed_checkpoint", "--checkpoint.on_failure",
                                           "continue", "--job.dump_folder", run.string()});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("rank_00000.safetensors"), Not(HasSubstr("the seed checkpoint is in"))));
}

/// A small file system that is unmounted with the object.
class SmallDisk {
 public:
  SmallDisk(const std::filesystem::path& folder, const std::string& size) : folder_(folder) {
    mounted_ = run({"mount", "-t", "tmpfs", "-o", "size=" + size, "tmpfs", folder.string()}).status == 0;
  }
  ~SmallDisk() {
    if (mounted_) run({"umount", folder_.string()});
  }
  bool mounted() const { return mounted_; }

 private:
  std::filesystem::path folder_;
  bool mounted_ = false;
};

// The space that a file takes on that disk.
int64_t on_disk(const std::filesystem::path& folder) {
  constexpr int64_t page = 4096;
  int64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.is_regular_file()) bytes += (static_cast<int64_t>(entry.file_size()) + page - 1) / page * page;
  return bytes;
}

/// The share of a step's rank file that is free when the disk holds the step before.
struct Full {
  int percent;
  const char* mode;
};
void PrintTo(const Full& full, std::ostream* out) { *out << full.percent << " %"; }

class NearlyFullDisk : public ::testing::TestWithParam<Full> {};

TEST_P(NearlyFullDisk, KeepsTheStepBeforeAndReportsHowMuchIsMissing) {
  const auto measured = fresh_folder("measured");
  const Words words = resumable(fresh_folder("config")) +
                      Words{"--training.steps", "12", "--checkpoint.async_mode", GetParam().mode};
  train(measured, part_of_run(words, 10));
  const auto file_bytes =
      static_cast<int64_t>(std::filesystem::file_size(step_folder(measured, 10) / "rank_00000.safetensors"));
  const int64_t disk_bytes = on_disk(step_folder(measured, 5)) + on_disk(measured / "checkpoint") +
                             file_bytes * GetParam().percent / 100;
  for (const std::string on_failure : {"stop", "continue"}) {
    SCOPED_TRACE(on_failure);
    const auto folder = fresh_folder(on_failure);
    std::filesystem::create_directory(folder / "checkpoint");
    const SmallDisk disk(folder / "checkpoint", std::to_string(disk_bytes));
    if (!disk.mounted()) GTEST_SKIP() << "no file system can be mounted here";
    // The model alone, a third of the state, fits where half is free.
    const bool goes_on = on_failure == "continue", has_room_at_the_end = GetParam().percent >= 50;
    // Long enough for a background failure to be noticed.
    const Words steps = goes_on ? Words{} : Words{"--training.steps", "1000"};
    const std::string log = train_log(folder, words + steps + Words{"--checkpoint.on_failure", on_failure},
                                      goes_on && has_room_at_the_end ? 0 : 1);
    EXPECT_THAT(log, ContainsRegex(str("checkpoint of step 10: there is no room in ",
                                       (folder / "checkpoint").string(), ": the file needs ",
                                       "[0-9.]+ .B, and [0-9.]+ .B was free before: No space left")));
    if (goes_on && !has_room_at_the_end)
      EXPECT_THAT(log, ContainsRegex("no room in [^ ]*/checkpoint: the file needs [0-9.]+ .B, and [0-9.]+ .B "
                                     "was free before: No space left.*"));
    if (goes_on) {
      EXPECT_EQ(curve_of(folder).size(), 12u);
    } else {
      EXPECT_LT(curve_of(folder).size(), 1000u);
    }
    std::vector<std::string> left = {".lock", "step-5"};
    if (goes_on && has_room_at_the_end) left.insert(left.begin() + 1, "step-12");
    EXPECT_EQ(names_in(folder / "checkpoint"), left);
    expect_whole(step_folder(folder, 5));
  }
}

INSTANTIATE_TEST_SUITE_P(FullDisk, NearlyFullDisk,
                         ::testing::Values(Full{10, "disabled"}, Full{50, "async"},
                                           Full{99, "async_with_pinned_mem"}),
                         [](const auto& info) { return str("Free", info.param.percent); });

// Two runs that write to one folder would take each other's steps for their own.
TEST(TwoRuns, CannotShareAFolder) {
  const auto folder = fresh_folder("run");
  const Words words = resumable(fresh_folder("config")) + Words{"--job.dump_folder", folder.string()};
  Command first(train_words(words + Words{"--training.steps", "1000000", "--checkpoint.interval", "1"}),
                {{"OMP_NUM_THREADS", "1"}});
  const auto step = step_folder(folder, 1);
  for (int i = 0; i < 6000 && !std::filesystem::exists(step); ++i) ::usleep(10'000);
  ASSERT_TRUE(std::filesystem::exists(step));
  const CommandResult second = try_train(words + Words{"--training.steps", "1000000"});
  EXPECT_EQ(second.status, 2) << "a launcher must not try again";
  EXPECT_THAT(second.err, HasSubstr(std::to_string(first.pid())));
}

}  // namespace
}  // namespace titan::testing
