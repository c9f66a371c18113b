#include "checkpoint/peer/peer_folder.h"
#include "checkpoint/save/rank_tree.h"

#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/file.h"
#include "sample_manifest.h"
#include "temp_folder.h"
#include "titan/checkpoint/manifest.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"

namespace titan::checkpoint::detail {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
namespace fs = std::filesystem;

HeldGeneration held(int64_t step, int64_t num_files, std::vector<int64_t> ranks,
                    const std::string& digest = "d") {
  return {.step = step, .digest = digest, .num_files = num_files, .ranks = std::move(ranks)};
}

TEST(PeerGenerations, ChoosesTheNewestCompleteGeneration) {
  // The second host has only its own file of step 8: the first was lost before the copies were made.
  const auto chosen = newest_generation({{held(7, 2, {0, 1})}, {held(7, 2, {0, 1}), held(8, 2, {1})}});
  ASSERT_TRUE(chosen);
  EXPECT_EQ(chosen->step, 7);
  EXPECT_THAT(chosen->holders, ElementsAre(ElementsAre(0, 1), ElementsAre(0, 1)));

  const auto spread = newest_generation({{held(7, 3, {0, 1, 2})}, {held(8, 3, {1, 2})}, {held(8, 3, {0})}});
  ASSERT_TRUE(spread);
  EXPECT_EQ(spread->step, 8);
  EXPECT_THAT(spread->has_manifest, ElementsAre(false, true, true));
}

TEST(PeerGenerations, NeverMixesGenerationsOfOneStep) {
  EXPECT_FALSE(newest_generation({{held(7, 2, {0}, "before")}, {held(7, 2, {1}, "after")}}));
  EXPECT_FALSE(newest_generation({{}, {}}));
  EXPECT_FALSE(newest_generation({{held(7, 2, {0})}, {held(7, 2, {0})}}));
}

TEST(PeerGenerations, RoundTripsAsBytes) {
  const std::vector<HeldGeneration> all = {held(7, 4, {0, 3}, "x"), held(9, 1, {}, "y")};
  const auto back = from_wire<std::vector<HeldGeneration>>(to_wire(all));
  ASSERT_THAT(back, SizeIs(2));
  EXPECT_EQ(back[0].digest, "x");
  EXPECT_THAT(back[0].ranks, ElementsAre(0, 3));
  EXPECT_EQ(back[1].step, 9);
  EXPECT_EQ(back[1].num_files, 1);
  EXPECT_THROW(from_wire<std::vector<HeldGeneration>>(to_wire(all).substr(0, 20)), Error);
}

TEST(PeerGenerations, CountsOnlyFilesOfTheRightSize) {
  const titan::testing::TempFolder folder;
  Manifest manifest = testing::sample_manifest();
  const fs::path step = step_path(folder.path(), manifest.step);
  fs::create_directory(step);
  write_file_atomic(step / kManifestName, to_text(manifest));
  for (const int64_t rank : {0, 1, 3}) std::ofstream(step / file_name(rank)).put('x');
  fs::resize_file(step / file_name(0), static_cast<uintmax_t>(manifest.files[0].num_bytes));
  fs::resize_file(step / file_name(3), static_cast<uintmax_t>(manifest.files[3].num_bytes));
  std::vector<std::string> problems;
  const auto found = held_generations(folder.path(), problems);
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_THAT(found[0].ranks, ElementsAre(0, 3));
  EXPECT_EQ(found[0].num_files, 4);
  // Missing files are at other places.
  EXPECT_THAT(problems,
              ElementsAre(AllOf(HasSubstr(file_name(1)), HasSubstr("has 1 bytes instead of 1001"))));
  problems.clear();

  std::ofstream(step / kManifestName, std::ios::app) << "x";
  EXPECT_THAT(held_generations(folder.path(), problems), IsEmpty());
  EXPECT_THAT(problems, ElementsAre(HasSubstr(kManifestName)));
}

// Two hosts of two ranks each, and a new third one that has no files.
TEST(PeerGenerations, SendsEachFileOncePerPlace) {
  const PeerPlaces places({"a", "a", "b", "b", "c", "c"});
  const std::vector<std::vector<int>> holders = {{0, 1}, {0, 1}, {1}, {1}};
  EXPECT_THAT(moves_for({{0}, {1}, {2}, {3}, {}, {}}, holders, places), IsEmpty());

  const auto moves = moves_for({{0, 2}, {2}, {3}, {0}, {1, 2}, {2, 3}}, holders, places);
  ASSERT_THAT(moves, SizeIs(4));
  EXPECT_EQ(moves[0], (FileMove{2, 2, 0}));
  for (const FileMove& move : moves) {
    const std::vector<int>& at = holders[static_cast<size_t>(move.file)];
    EXPECT_THAT(at, ::testing::Contains(places.place_of(move.from)));
    EXPECT_THAT(at, ::testing::Not(::testing::Contains(places.place_of(move.to))));
  }
  EXPECT_EQ(moves[1].to, 4);
  EXPECT_EQ(moves[2].to, 4);
  EXPECT_EQ(moves[3].to, 5);
}

}  // namespace
}  // namespace titan::checkpoint::detail
