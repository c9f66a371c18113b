// Jobs whose hosts are folders: after ranks and hosts are lost, the remaining files are found and contain the
// saved state.

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "e2e/command.h"
#include "titan/checkpoint/manifest.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"

namespace titan::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using Words = std::vector<std::string>;

/// The folders of a job's hosts.
class Hosts {
 public:
  CommandResult start(const std::string& hosts, const Words& what, Command::Variables variables = {}) const {
    const std::string bin = std::string(TITAN_BINARY_DIR) + "/bin/";
    Words words = {bin + "titan", "launch", "-n", std::to_string(hosts.size()),
                   "--log-rank",  "all",    "--", bin + "peer_program",
                   path_,         hosts};
    words.insert(words.end(), what.begin(), what.end());
    variables["OMP_NUM_THREADS"] = "1";
    return run(words, variables, /*limit_s=*/120);
  }
  void save(const std::string& hosts, int first, int last) const {
    const auto result = start(hosts, {"save", std::to_string(first), std::to_string(last)});
    ASSERT_EQ(result.status, 0) << result.err;
  }
  /// "newest 2" if that step was found, loaded and is equal to the saved one; otherwise the problem.
  std::string load(const std::string& hosts) const {
    const auto result = start(hosts, {"load"});
    const auto at = result.out.find("newest ");
    if (result.status != 0 || at == std::string::npos) return result.out + result.err;
    return result.out.substr(at, result.out.find('\n', at) - at);
  }
  void lose(char host) const { fs::remove_all(path_ / titan::str("host_", host)); }
  void copy_to(const Hosts& other) const {
    fs::copy(path_, other.path_, fs::copy_options::recursive | fs::copy_options::overwrite_existing);
  }
  /// Files of a host's generations: "step-2/rank_00000.safetensors".
  Words files_of(char host) const {
    Words files;
    for (const auto& entry : fs::recursive_directory_iterator(path_ / titan::str("host_", host)))
      if (entry.path().extension() == ".safetensors")
        files.push_back((entry.path().parent_path().filename() / entry.path().filename()).string());
    std::sort(files.begin(), files.end());
    return files;
  }
  /// Changes the last byte of each of the host's files, or of `rank`'s.
  void flip_bytes(char host, int rank = -1) const {
    for (const auto& entry : fs::recursive_directory_iterator(path_ / titan::str("host_", host))) {
      if (entry.path().extension() != ".safetensors") continue;
      if (rank >= 0 && entry.path().filename() != checkpoint::file_name(rank)) continue;
      std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(-1, std::ios::end);
      const char last = static_cast<char>(file.get());
      file.seekp(-1, std::ios::end);
      file.put(static_cast<char>(last ^ 1));
    }
  }
  bool empty(char host) const { return fs::is_empty(path_ / titan::str("host_", host)); }
  /// Folders of jobs and runs, ascending.
  std::vector<fs::path> folders_of(char host) const {
    std::vector<fs::path> folders;
    for (const auto& entry : fs::directory_iterator(path_ / titan::str("host_", host)))
      folders.push_back(entry.path());
    std::sort(folders.begin(), folders.end());
    return folders;
  }

 private:
  const TempFolder folder_;
  const fs::path& path_ = folder_.path;
};

TEST(PeerCheckpoints, EachHostHasItsFilesAndThoseOfThePreviousHost) {
  const Hosts hosts;
  hosts.save("aabc", 1, 3);
  EXPECT_THAT(hosts.files_of('a'),
              ElementsAre("step-3/rank_00000.safetensors", "step-3/rank_00001.safetensors",
                          "step-3/rank_00003.safetensors"));
  EXPECT_THAT(hosts.files_of('b'),
              ElementsAre("step-3/rank_00000.safetensors", "step-3/rank_00001.safetensors",
                          "step-3/rank_00002.safetensors"));
  EXPECT_THAT(hosts.files_of('c'),
              ElementsAre("step-3/rank_00002.safetensors", "step-3/rank_00003.safetensors"));
  EXPECT_EQ(hosts.load("aabc"), "newest 3");
  EXPECT_EQ(hosts.start("aabc", {"end"}).status, 0);
  EXPECT_TRUE(hosts.empty('a') && hosts.empty('b') && hosts.empty('c'));
}

TEST(PeerCheckpoints, OneHostKeepsOneCopyAndServesAnyNumberOfRanks) {
  const Hosts hosts;
  hosts.save("aaa", 1, 2);
  EXPECT_THAT(hosts.files_of('a'),
              ElementsAre("step-2/rank_00000.safetensors", "step-2/rank_00001.safetensors",
                          "step-2/rank_00002.safetensors"));
  EXPECT_EQ(hosts.load("aa"), "newest 2");  // and saves the next one
  EXPECT_EQ(hosts.load("aaaa"), "newest 3");
  EXPECT_EQ(hosts.load("a"), "newest 4");
}

// Each start has the files that the remaining hosts kept: copies of a lost host's files are found, wherever
// the ranks are.
TEST(PeerCheckpoints, FindsCopiesOfALostHostsFiles) {
  const Hosts saved;
  saved.save("aabb", 1, 2);
  for (const auto& [lost, next] :
       {std::pair('b', "aa"), {'b', "aabb"}, {'a', "bb"}, {'a', "bbc"}, {'x', "abc"}}) {
    SCOPED_TRACE(titan::str(lost, " is lost, then ", next));
    const Hosts hosts;
    saved.copy_to(hosts);
    hosts.lose(lost);
    EXPECT_EQ(hosts.load(next), "newest 2");
  }
}

TEST(PeerCheckpoints, LosingBothCopiesLosesTheGeneration) {
  const Hosts hosts;
  hosts.save("abc", 1, 2);
  const Hosts one_lost;
  hosts.copy_to(one_lost);
  one_lost.lose('b');
  EXPECT_EQ(one_lost.load("ac"), "newest 2");
  hosts.lose('b');
  hosts.lose('c');
  EXPECT_EQ(hosts.load("a"), "newest none");
  EXPECT_THAT(hosts.files_of('a'), IsEmpty()) << "useless files are removed";
}

// If a file is damaged on one host, its copy on another is loaded, and the damage is reported. Hosts a and b
// have both files, and each file is damaged on one of them.
TEST(PeerCheckpoints, LoadsTheIntactCopyOfADamagedFile) {
  const Hosts hosts;
  hosts.save("ab", 1, 2);
  hosts.flip_bytes('a', 0);
  hosts.flip_bytes('b', 1);
  const auto loaded = hosts.start("ab", {"load"});
  EXPECT_EQ(loaded.status, 0) << loaded.err;
  EXPECT_THAT(loaded.out,
              AllOf(HasSubstr("newest 2"),
                    ContainsRegex("damaged: rank 0 [^\n]*/host_a/[^\n]*/rank_00000[^\n]*checksum"),
                    ContainsRegex("damaged: rank 1 [^\n]*/host_b/[^\n]*/rank_00001[^\n]*checksum"),
                    Not(ContainsRegex("(damaged: rank .*){3}"))));
  EXPECT_EQ(hosts.load("ab"), "newest 3");

  // The same if the damaged file could be sent to a host that has nothing.
  const Hosts three;
  three.save("abc", 1, 2);
  three.flip_bytes('a');
  EXPECT_EQ(three.load("dabc"), "newest 2");
}

TEST(PeerCheckpoints, DetectsDamageOfBothCopiesBeforeUse) {
  const Hosts hosts;
  hosts.save("ab", 1, 2);
  hosts.flip_bytes('a');
  hosts.flip_bytes('b', 0);
  EXPECT_THAT(hosts.load("ab"),
              AllOf(HasSubstr("newest 2"), HasSubstr("host_a"), HasSubstr("host_b"), HasSubstr("checksum")));
}

TEST(PeerCheckpoints, LoadsTheCopyOfAFileOfTheWrongSize) {
  const Hosts hosts;
  hosts.save("ab", 1, 2);
  fs::resize_file(hosts.folders_of('a').front() / "step-2" / checkpoint::file_name(0), 100);
  const auto loaded = hosts.start("ab", {"load"});
  EXPECT_EQ(loaded.status, 0) << loaded.err;
  EXPECT_THAT(loaded.err,
              AllOf(HasSubstr("peer checkpoints: skipped: "), HasSubstr("has 100 bytes instead of")));
}

// The copies of the second generation stall on one rank: that generation is given up, no other begins while
// the copies are in transit, and after that states are kept as before.
TEST(PeerCheckpoints, SlowCopiesCostOnlyTheirGeneration) {
  const Hosts hosts;
  const auto result = hosts.start("ab", {"stall"});
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  EXPECT_THAT(result.out,
              AllOf(ContainsRegex("step 2: peer checkpoint of step 2: .*the copies weren't made within 15 s"),
                    HasSubstr("step 3: skipped"), HasSubstr("step 4: ; 2 complete, 1 failed"),
                    HasSubstr("pieces: 3")));
  EXPECT_THAT(result.err, AllOf(HasSubstr("training continues without it"),
                                ContainsRegex("skipped, as rank [^\n]*: still sending the copies of step 2"),
                                HasSubstr("in-memory checkpoints work again")));
  EXPECT_THAT(hosts.files_of('a'),
              ElementsAre("step-4/rank_00000.safetensors", "step-4/rank_00001.safetensors"));
}

// The lost rank's training thread still takes part in all calls: only its background thread hangs.
TEST(PeerCheckpoints, RankLostOnlyToSavesDoesNotStopTraining) {
  const Hosts hosts;
  const auto result = hosts.start("ab", {"lose"});
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  EXPECT_THAT(result.out, HasSubstr("step 3: skipped"));
  EXPECT_THAT(result.err, AllOf(ContainsRegex("peer checkpoint of step 2: .*rank 1 .*didn't answer within .*"
                                              "training continues without it"),
                                HasSubstr("the ranks lost their common order while saving step 2")));
  EXPECT_EQ(hosts.load("ab"), "newest 1");
}

// Another job with the same run's mark: an earlier job's files are removed if it saved in the same folder and
// is no longer running.
TEST(PeerCheckpoints, RemovesAnEarlierJobsFolderOfTheSameRun) {
  const Hosts hosts;
  const auto save_as = [&](const std::string& job, const std::string& owner) {
    return hosts.start("a", {"save", "1", "1"}, {{"TITAN_TEST_JOB", job}, {"TITAN_TEST_OWNER", owner}});
  };
  ASSERT_EQ(save_as("first", "/runs/one").status, 0);
  const auto first = hosts.folders_of('a');
  ASSERT_THAT(first, SizeIs(1));
  const auto copied = save_as("second", "/runs/copy");
  EXPECT_THAT(copied.err, HasSubstr("belongs to a run that saves in /runs/one"));
  EXPECT_THAT(hosts.folders_of('a'), AllOf(SizeIs(2), Contains(first.front())));
  {
    const checkpoint::FolderLock at_work(first.front());
    EXPECT_THAT(save_as("third", "/runs/one").err, HasSubstr("is being written to by"));
    EXPECT_THAT(hosts.folders_of('a'), AllOf(SizeIs(3), Contains(first.front())));
  }
  EXPECT_THAT(save_as("fourth", "/runs/one").err, HasSubstr("which an earlier job of this run left"));
  EXPECT_THAT(hosts.folders_of('a'), AllOf(SizeIs(2), Not(Contains(first.front()))))
      << "expected the copied run's folder and the fourth job's own";
}

struct Interruption {
  std::string phase;
  bool by_root;
};

class Interrupted : public ::testing::TestWithParam<Interruption> {};

// If a rank ends in any phase of the second generation, the first or the second is complete, even if a host
// is lost too. From WriteManifest on, the other host may already have the second one.
TEST_P(Interrupted, GenerationLeavesTheOneBefore) {
  const auto& [phase, by_root] = GetParam();
  const Hosts hosts;
  const auto failed = hosts.start("aabb", {"fail", phase, "exit", by_root ? "0" : "2"});
  EXPECT_NE(failed.status, 0);
  EXPECT_NE(failed.status, 128 + SIGKILL) << "the job had to be killed: " << failed.err;
  if (!by_root) hosts.lose('b');
  const std::string found = hosts.load(by_root ? "aabb" : "aa");
  if (phase == "Prune")
    EXPECT_EQ(found, "newest 2");
  else if (phase == "WriteManifest" || phase == "Commit")
    EXPECT_THAT(found, AnyOf("newest 1", "newest 2"));
  else
    EXPECT_EQ(found, "newest 1");
}

INSTANTIATE_TEST_SUITE_P(Phases, Interrupted,
                         ::testing::Values(Interruption{"MakeFolder", false}, Interruption{"WriteFile", true},
                                           Interruption{"WriteChunk", false}, Interruption{"SyncFile", true},
                                           Interruption{"Gather", false}, Interruption{"CopyPiece", true},
                                           Interruption{"WriteManifest", false}, Interruption{"Commit", true},
                                           Interruption{"Prune", false}),
                         [](const auto& info) { return info.param.phase; });

TEST(PeerCheckpoints, NamesARankThatHangsOrFails) {
  const Hosts hosts;
  EXPECT_THAT(
      hosts.start("ab", {"fail", "WriteFile", "throw", "1"}).err,
      AllOf(HasSubstr("peer checkpoint of step 2"), HasSubstr("rank 1 ("), HasSubstr("told to throw")));
  EXPECT_EQ(hosts.load("ab"), "newest 1");
  const auto hung = hosts.start("ab", {"fail", "CopyPiece", "hang", "1"});
  EXPECT_THAT(hung.err, HasSubstr("the copies weren't made within 15 s"));
  EXPECT_EQ(hosts.load("ab"), "newest 1");
}

}  // namespace
}  // namespace titan::testing
