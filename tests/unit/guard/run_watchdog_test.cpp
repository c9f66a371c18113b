#include <gmock/gmock.h>
#include <future>

#include "guard/run_observers.h"
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
