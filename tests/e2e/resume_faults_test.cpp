// Damaged checkpoints, full disks, folders that can't be written: what a run makes of them.

#include <unistd.h>

#include <functional>

#include "e2e/resume_run.h"

namespace titan::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

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
  const char* told;
};
void PrintTo(const Damage& damage, std::ostream* out) { *out << damage.name; }

class DamagedStep : public ::testing::TestWithParam<Damage> {};

TEST_P(DamagedStep, GivesWayToTheOneBefore) {
  const Words words = resumable(fresh_folder("config")) + ranks(2);
  const auto run = fresh_folder("run");
  train(run, part_of_run(words, 15));
  const Curve before = curve_of(run);
  GetParam().make(step_folder(run, 15));
  // One that was asked for is an error.
  EXPECT_THAT(try_train(words + Words{"--job.dump_folder", run.string(), "--checkpoint.load_step", "15"}).err,
              HasSubstr(GetParam().told));
  EXPECT_EQ(curve_of(run), before);
  // To a later end: one that has come to its end reads no state.
  EXPECT_THAT(train_log(run, part_of_run(words, 16)),
              AllOf(HasSubstr("passed over: "), HasSubstr(GetParam().told),
                    HasSubstr("the run goes on behind step 10")));
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

TEST(ReadOnlyFolder, IsToldAtTheStart) {
  using std::filesystem::perms;
  // Root may write anywhere.
  const Words nobody = {"setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"};
  const Words as_user = ::geteuid() == 0 ? nobody : Words{};
  if (run(as_user + Words{"test", "-x", titan_program()}).status != 0)
    GTEST_SKIP() << "a user without rights can't run " << titan_program();
  const auto config = fresh_folder("config"), dump = fresh_folder("run");
  std::filesystem::permissions(dump, perms::all);
  std::filesystem::create_directory(dump / "checkpoint");
  std::filesystem::permissions(
      dump / "checkpoint", perms::owner_read | perms::owner_exec | perms::others_read | perms::others_exec);
  const CommandResult result =
      run(as_user + train_words(resumable(config)) + Words{"--job.dump_folder", dump.string()});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, AllOf(HasSubstr((dump / "checkpoint").string()), HasSubstr("Permission denied"),
                                Not(HasSubstr("step:  1"))));
}

// A file-size limit fails writes as a full disk does, for every user and without a disk to fill.
CommandResult train_with_file_limit(int kib, const Words& words) {
  std::string command = "ulimit -f " + std::to_string(kib) + "; exec";
  for (const std::string& word : train_words(words)) command += " '" + word + "'";
  return run({"/bin/bash", "-c", command}, {{"OMP_NUM_THREADS", "1"}}, 100);
}

// The state is of 1.6 MB, the model alone of 0.5.
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

/// A small file system, gone with the object.
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

TEST(FullDisk, LeavesTheStepBeforeAndSaysHowMuchIsMissing) {
  const auto folder = fresh_folder("run");
  std::filesystem::create_directory(folder / "checkpoint");
  const SmallDisk disk(folder / "checkpoint", "2600k");
  if (!disk.mounted()) GTEST_SKIP() << "no file system can be mounted here";
  const Words words =
      part_of_run(resumable(fresh_folder("config")), 20) + Words{"--checkpoint.keep_latest_k", "0"};
  EXPECT_THAT(train_log(folder, words, 1), AllOf(HasSubstr("bytes"), HasSubstr("free")));
  EXPECT_EQ(names_in(folder / "checkpoint"), (std::vector<std::string>{".lock", "step-5"}));
  EXPECT_THAT(train_log(folder, words + Words{"--checkpoint.load_only"}),
              HasSubstr("the run goes on behind step 5"));
}

// Two runs that write to one folder would take each other's steps for their own.
TEST(TwoRuns, DontShareAFolder) {
  const auto folder = fresh_folder("run");
  const Words words = resumable(fresh_folder("config")) + Words{"--job.dump_folder", folder.string()};
  Command first(train_words(words + Words{"--training.steps", "1000000", "--checkpoint.interval", "1"}),
                {{"OMP_NUM_THREADS", "1"}});
  const auto step = step_folder(folder, 1);
  for (int i = 0; i < 1000 && !std::filesystem::exists(step); ++i) ::usleep(10'000);
  const CommandResult second = try_train(words + Words{"--training.steps", "1000000"});
  EXPECT_EQ(second.status, 1);
  EXPECT_THAT(second.err, HasSubstr(std::to_string(first.pid())));
}

}  // namespace
}  // namespace titan::testing
