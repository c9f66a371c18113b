#include "cli/launch/launch.h"

#include <gtest/gtest.h>

namespace titan::cli {
namespace {

using Places = std::vector<int>;
using std::chrono::seconds;

const RankPlaces::Time kStart = RankPlaces::Time() + seconds(1000);

RankPlaces places_for(int num_places, int min_ranks, std::function<bool(int)> fits = {}) {
  return RankPlaces({.num_places = num_places,
                     .min_ranks = min_ranks,
                     .rejoin_after = seconds(10),
                     .fits = std::move(fits)});
}

TEST(RankPlaces, ReturnAfterATime) {
  RankPlaces places = places_for(4, 2);
  EXPECT_EQ(places.available(kStart), Places({0, 1, 2, 3}));
  EXPECT_FALSE(places.next_growth(4));
  places.lose(1, kStart);
  EXPECT_EQ(places.available(kStart), Places({0, 2, 3}));
  places.lose(0, kStart + seconds(5));
  EXPECT_EQ(places.available(kStart + seconds(5)), Places({2, 3}));
  EXPECT_EQ(places.next_growth(2), kStart + seconds(10));
  EXPECT_EQ(places.available(kStart + seconds(10)), Places({1, 2, 3}));
  EXPECT_EQ(places.next_growth(3), kStart + seconds(15));
  EXPECT_EQ(places.available(kStart + seconds(15)), Places({0, 1, 2, 3}));
}

// A broken place is used less and less often.
TEST(RankPlaces, StayAwayTwiceAsLongWhenLostAgain) {
  RankPlaces places = places_for(2, 1);
  RankPlaces::Time now = kStart;
  for (const int absence : {10, 20, 40, 80, 160, 320, 640, 640}) {
    places.lose(1, now);
    EXPECT_EQ(places.next_growth(1), now + seconds(absence));
    now += seconds(absence + 5);  // the rank dies as it starts
  }
  places.lose(1, now + seconds(700));  // it ran for longer than it was away
  EXPECT_EQ(places.next_growth(1), now + seconds(710));
  places.lose(1, now + seconds(711));
  places.bring_back();
  places.lose(1, now + seconds(712));
  EXPECT_EQ(places.next_growth(1), now + seconds(722));
}

TEST(RankPlaces, AreNotAvailableBelowTheMinimum) {
  RankPlaces places = places_for(3, 2);
  places.lose(0, kStart);
  places.lose(2, kStart + seconds(1));
  EXPECT_TRUE(places.available(kStart + seconds(1)).empty());
  EXPECT_EQ(places.next_growth(0), kStart + seconds(10));
  places.bring_back();
  EXPECT_EQ(places.available(kStart), Places({0, 1, 2}));
}

TEST(RankPlaces, AreNeverLostWhenGroupsNeedAll) {
  RankPlaces places = places_for(2, 2);
  places.lose(1, kStart);
  EXPECT_EQ(places.available(kStart), Places({0, 1}));
}

TEST(RankPlaces, FormGroupsThatFitTheMesh) {
  RankPlaces places = places_for(6, 2, [](int size) { return size % 2 == 0; });
  places.lose(5, kStart);
  EXPECT_EQ(places.available(kStart), Places({0, 1, 2, 3}));
  EXPECT_EQ(places.next_growth(4), kStart + seconds(10));
  places.lose(0, kStart + seconds(3));
  places.lose(1, kStart + seconds(4));
  EXPECT_EQ(places.available(kStart + seconds(4)), Places({2, 3}));
  EXPECT_EQ(places.next_growth(2), kStart + seconds(10));  // the places 2, 3, 4 and 5
}

TEST(RankPlaces, ReturnOnlyBySignalWithoutATime) {
  RankPlaces places({.num_places = 2, .min_ranks = 1, .rejoin_after = std::nullopt});
  places.lose(0, kStart);
  EXPECT_FALSE(places.next_growth(1));
  EXPECT_EQ(places.available(kStart + std::chrono::hours(1000)), Places({1}));
  places.bring_back();
  EXPECT_TRUE(places.next_growth(1));
}

TEST(RestartDelay, GrowsWithEachShortRun) {
  const auto delay = [](int num_short_runs) { return restart_delay(num_short_runs, seconds(60)); };
  EXPECT_EQ(delay(0), seconds(0));
  EXPECT_EQ(delay(1), seconds(0));
  EXPECT_EQ(delay(2), seconds(1));
  EXPECT_EQ(delay(3), seconds(2));
  EXPECT_EQ(delay(7), seconds(32));
  EXPECT_EQ(delay(8), seconds(60));
  EXPECT_EQ(delay(1000), seconds(60));
  EXPECT_EQ(restart_delay(1000, seconds(0)), seconds(0));
}

TEST(DevicesOfPlaces, LeaveOutDevicesOfOtherPlaces) {
  EXPECT_EQ(devices_of_places({0, 2}, 3, "GPU-a,GPU-b,GPU-c", 0), "GPU-a,GPU-c");
  EXPECT_EQ(devices_of_places({1, 3}, 4, std::nullopt, 8), "1,3");
  EXPECT_FALSE(devices_of_places({0, 1}, 2, "0,1", 8)) << "all places are used";
  EXPECT_FALSE(devices_of_places({0}, 4, "0,1", 8)) << "places share GPUs";
  EXPECT_FALSE(devices_of_places({0}, 4, std::nullopt, 0)) << "there is no GPU";
}

}  // namespace
}  // namespace titan::cli
