#include <gmock/gmock.h>
#include <future>

#include "guard/run_observers.h"
#include "titan/core/error.h"
#include "unit/train/toy_model.h"

namespace titan::train {
namespace {

using namespace std::chrono_literals;

class RunWatchdogs : public ::testing::Test {
 protected:
  std::unique_ptr<RunWatchdog> watch(std::chrono::milliseconds compute,
                                     std::function<void(const std::string&)> on_hang = {}) const {
    dist::WatchdogLimits limits;
    limits.compute = {compute, "compute.limit"};
    auto watchdog = std::make_shared<dist::Watchdog>(
        world_, dist::WatchdogOptions{.judges = false, .on_hang = std::move(on_hang)});
    return std::make_unique<RunWatchdog>(std::move(watchdog), limits, limits,
                                         std::vector<nn::AnyRef>{model_});
  }

  dist::World world_ = dist::init({.backend = "gloo", .device = "cpu"});
  Bigram model_{16, nn::Construct{}};
};

// Connecting a pipeline or agreeing on settings may hang, too.
TEST_F(RunWatchdogs, FindAHangBeforeTheFirstPhase) {
  auto verdict = std::make_shared<std::promise<std::string>>();
  auto found = verdict->get_future();
  const auto watchdog = watch(300ms, [verdict](const std::string& text) { verdict->set_value(text); });
  ASSERT_EQ(found.wait_for(60s), std::future_status::ready);
  EXPECT_THAT(found.get(), ::testing::HasSubstr("hangs in start, without progress for"));
}

// At its end a run saves, and then still has work to do.
TEST_F(RunWatchdogs, NameThePhaseThatSurroundsTheOneThatEnded) {
  auto verdict = std::make_shared<std::promise<std::string>>();
  auto found = verdict->get_future();
  dist::WatchdogLimits limits;
  limits.checkpoint = {300ms, "checkpoint.limit"};
  auto hangs = std::make_shared<dist::Watchdog>(
      world_, dist::WatchdogOptions{.judges = false, .on_hang = [verdict](const std::string& text) {
                                      verdict->set_value(text);
                                    }});
  RunWatchdog watchdog(hangs, limits, limits, {model_});
  watchdog.begin(Phase::Finish, 7);
  watchdog.begin(Phase::Save, 7);
  watchdog.end(Phase::Save, 7, /*failed=*/false);
  ASSERT_EQ(found.wait_for(60s), std::future_status::ready);
  EXPECT_THAT(found.get(), ::testing::HasSubstr("hangs in finish of step 7, without progress for"));
}

// A destructor may wait for a GPU whose work waits for a lost peer.
TEST_F(RunWatchdogs, WatchWhileAnErrorUnwinds) {
  auto verdict = std::make_shared<std::promise<std::string>>();
  auto found = verdict->get_future();
  dist::WatchdogLimits limits;
  limits.compute = {1ms, "compute.limit"};
  limits.checkpoint = {300ms, "checkpoint.limit"};
  const auto hangs = std::make_shared<dist::Watchdog>(
      world_, dist::WatchdogOptions{.judges = false, .on_hang = [verdict](const std::string& text) {
                                      verdict->set_value(text);
                                    }});
  struct Waits {
    std::future<std::string>& found;
    std::future_status& end;
    ~Waits() { end = found.wait_for(60s); }
  };
  std::future_status end = std::future_status::timeout;
  try {
    const Waits waits{found, end};
    const RunWatchdog watchdog(hangs, limits, limits, {model_});
    throw Error("the connection to rank 1 broke");
  } catch (const Error&) {
  }
  ASSERT_EQ(end, std::future_status::ready);
  EXPECT_THAT(found.get(), ::testing::HasSubstr("hangs in clean-up, without progress for"))
      << "a save has time to end";
}

// The hooks surround each other, and may be removed in any order.
TEST_F(RunWatchdogs, RemoveTheirHooks) {
  const auto before = model_->label_hook;
  auto watchdog = watch(600s);
  auto search = std::make_unique<NanSearch>(std::vector<nn::AnyRef>{model_}, NanSearch::Options{});
  watchdog.reset();
  EXPECT_NE(model_->label_hook, before) << "the search's hook stays";
  auto second = watch(600s);
  auto outer = std::make_unique<NanSearch>(std::vector<nn::AnyRef>{model_},
                                           NanSearch::Options{.modules = false, .operations = true});
  second.reset();
  search.reset();
  outer.reset();
  EXPECT_EQ(model_->label_hook, before);
}

}  // namespace
}  // namespace titan::train
