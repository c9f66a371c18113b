// Ranks and their lines, all in one process.

#include "guard/life_lines.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace titan::dist {
namespace {

using namespace std::chrono_literals;

template <class Condition>
bool holds_within(std::chrono::seconds limit, const Condition& holds) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!holds() && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(10ms);
  return holds();
}

class TwoRanks : public ::testing::Test {
 protected:
  void SetUp() override {
    const Mail::Connect connect = [store = store_] { return store; };
    first_ = std::make_unique<LifeLines>(connect, 0, 2);
    second_ = std::make_unique<LifeLines>(connect, 1, 2);
    ASSERT_TRUE(holds_within(30s, [&] { return first_->are_laid() && second_->are_laid(); }));
  }
  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  std::unique_ptr<LifeLines> first_, second_;
};

// The kernel closes a process's lines when it ends, as the end of the object does.
TEST_F(TwoRanks, NoticeThatTheOtherIsGone) {
  EXPECT_FALSE(first_->loss());
  second_.reset();
  ASSERT_TRUE(holds_within(30s, [&] { return first_->loss().has_value(); }));
  EXPECT_EQ(first_->loss()->ranks, std::vector{1});
  EXPECT_EQ(first_->loss()->how, "its process is gone");
}

TEST_F(TwoRanks, AreNotLostAfterTheyHaveReportedTheirEnd) {
  Mail second([this] { return store_; }, 1, 2);
  second.exchange({.beat = {.state = RunState::Ended}}, /*everything=*/true);
  second_.reset();
  EXPECT_FALSE(holds_within(1s, [&] { return first_->loss().has_value(); }));
}

// Rank 2 of four has no neighbor in rank 0, whose host may take the store with it.
TEST(LifeLinesOfFourRanks, LeadToRankZeroFromAll) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<LifeLines>> lines;
  for (int rank = 0; rank < 4; ++rank)
    lines.push_back(std::make_unique<LifeLines>([store] { return store; }, rank, 4));
  ASSERT_TRUE(holds_within(
      30s, [&] { return std::ranges::all_of(lines, [](auto& rank) { return rank->are_laid(); }); }));
  lines[0].reset();
  ASSERT_TRUE(holds_within(30s, [&] { return lines[2]->loss().has_value(); }));
  EXPECT_EQ(lines[2]->loss()->ranks, std::vector{0});
  EXPECT_FALSE(lines[2]->loss()->is_host);
}

TEST(LifeLinesOfOneRank, DoNothing) {
  const LifeLines lines([] { return StorePtr(); }, 0, 1);
  EXPECT_TRUE(lines.are_laid());
  EXPECT_FALSE(lines.loss());
}

}  // namespace
}  // namespace titan::dist
