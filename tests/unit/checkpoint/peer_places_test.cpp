#include "checkpoint/peer/peer_folder.h"

#include <filesystem>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "temp_folder.h"

namespace titan::checkpoint::detail {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<std::string> identities_of(const std::string& hosts) {
  std::vector<std::string> identities;
  for (const char host : hosts) identities.emplace_back(1, host);
  return identities;
}

TEST(PeerPlaces, AreNumberedByTheirLowestRank) {
  const PeerPlaces places(identities_of("baab"));
  EXPECT_EQ(places.size(), 2);
  EXPECT_THAT(places.ranks_of(0), ElementsAre(0, 3));
  EXPECT_THAT(places.ranks_of(1), ElementsAre(1, 2));
  EXPECT_TRUE(places.is_leader(0) && places.is_leader(1));
  EXPECT_FALSE(places.is_leader(2) || places.is_leader(3));
}

TEST(PeerPlaces, OnePlaceKeepsNoCopies) {
  const PeerPlaces places(identities_of("aaa"));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(places.copy_target(rank), -1);
    EXPECT_THAT(places.copy_sources(rank), IsEmpty());
  }
}

// However the ranks are spread over hosts, a file's copy is on another host, sender and receiver agree, and
// the ranks of a host share the work.
TEST(PeerPlaces, PutCopiesOnTheNextPlace) {
  for (const char* hosts : {"ab", "aabb", "abab", "abc", "aaabbc", "abbbbcc", "aaaaaaab"}) {
    SCOPED_TRACE(hosts);
    const PeerPlaces places(identities_of(hosts));
    const int num_ranks = static_cast<int>(std::string(hosts).size());
    std::multiset<int> received;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const int target = places.copy_target(rank);
      ASSERT_GE(target, 0);
      EXPECT_EQ(places.place_of(target), (places.place_of(rank) + 1) % places.size());
      EXPECT_THAT(places.copy_sources(target), ::testing::Contains(rank));
      for (const int source : places.copy_sources(rank)) {
        EXPECT_EQ(places.copy_target(source), rank);
        received.insert(source);
      }
    }
    EXPECT_EQ(received.size(), static_cast<size_t>(num_ranks));
    EXPECT_EQ(std::set<int>(received.begin(), received.end()).size(), static_cast<size_t>(num_ranks));
  }
  EXPECT_THAT(PeerPlaces(identities_of("aaab")).copy_sources(3), ElementsAre(0, 1, 2));
  EXPECT_THAT(PeerPlaces(identities_of("aabb")).copy_sources(3), ElementsAre(1));
}

TEST(PeerPlaces, IdentityDependsOnTheFolderNotItsName) {
  const titan::testing::TempFolder folder;
  const auto a = folder / "a", b = folder / "b", link = folder / "link";
  std::filesystem::create_directory(a);
  std::filesystem::create_directory(b);
  std::filesystem::create_directory_symlink(a, link);
  EXPECT_EQ(place_identity(a), place_identity(link));
  EXPECT_NE(place_identity(a), place_identity(b));
}

}  // namespace
}  // namespace titan::checkpoint::detail
