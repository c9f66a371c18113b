// Two ranks and their lines, both in one process.

#include "guard/life_lines.h"

#include <gmock/gmock.h>

#include <chrono>
#include <memory>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace titan::dist {
namespace {

using namespace std::chrono_literals;

class TwoRanks : public ::testing::Test {
 protected:
  void SetUp() override {
    const Mail::Connect connect = [store = store_] { return store; };
    first_ = std::make_unique<LifeLines>(connect, 0, 2);
    second_ = std::make_unique<LifeLines>(connect, 1, 2);
    ASSERT_TRUE(holds_within(30s, [&] { return first_->are_laid() && second_->are_laid(); }));
  }
  template <class Condition>
  static bool holds_within(std::chrono::seconds limit, const Condition& holds) {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!holds() && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(10ms);
    return holds();
  }

  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  std::unique_ptr<LifeLines> first_, second_;
};

// The kernel closes a process's lines when it ends, as the end of the object does.
TEST_F(TwoRanks, NoticeThatTheOtherIsGone) {
  EXPECT_FALSE(first_->loss());
  second_.reset();
  ASSERT_TRUE(holds_within(30s, [&] { return first_->loss().has_value(); }));
  EXPECT_EQ(first_->loss()->rank, 1);
  EXPECT_EQ(first_->loss()->how, "its process is gone");
}

TEST_F(TwoRanks, AreNotLostAfterTheyHaveReportedTheirEnd) {
  Mail second([this] { return store_; }, 1, 2);
  second.exchange({.beat = {.state = RunState::Ended}}, /*everything=*/true);
  second_.reset();
  EXPECT_FALSE(holds_within(1s, [&] { return first_->loss().has_value(); }));
}

TEST(LifeLinesOfOneRank, DoNothing) {
  const LifeLines lines([] { return StorePtr(); }, 0, 1);
  EXPECT_TRUE(lines.are_laid());
  EXPECT_FALSE(lines.loss());
}

}  // namespace
}  // namespace titan::dist
