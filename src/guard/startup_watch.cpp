// [Note: ending a start together]
//   wish   a key of the store: some rank was told to end, a while ago, by the signal that is its value, and
//          128 more if the launcher sent it
//   end    a key that only a rank sets which isn't ready, i.e. hasn't come to end(): the barrier there then
//          never completes, so that those who wait in it may leave as well
//   left   who has heard of it; all wait until it is everybody, and end

#include "guard/startup_watch.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/dist/collectives.h"
#include "train/policies/interruption.h"

namespace titan::train {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kLook{250};
constexpr seconds kShortStart{5};
constexpr seconds kLeaving{10};  // of which a rank that is gone takes all
constexpr int kByLauncher = 128;
constexpr const char* kWish = "wish";
constexpr const char* kEnd = "end";
constexpr const char* kLeft = "left";

StopCause cause_here() { return {.signal = noted_signal(), .by_launcher = noted_by_launcher()}; }

}  // namespace

struct StartupWatch::Impl {
  void watch(const std::stop_token& stop);
  void look();
  bool is_told_long_ago();
  void leave();
  StopCause cause_of_all() const;
  void wait_for_others() const;

  std::mutex mutex;
  std::condition_variable_any changed;
  c10::intrusive_ptr<c10d::Store>
      store;  // of its own connection; null: the ranks haven't met, or there is one
  std::optional<dist::World> world;
  bool ready = false;
  std::optional<Clock::time_point> told_at;
  std::function<int(const StopCause&)> on_end;
  std::jthread thread;
};

bool StartupWatch::Impl::is_told_long_ago() {
  if (noted_signal() == 0) return false;
  if (!told_at) told_at = Clock::now();
  return Clock::now() - *told_at >= kShortStart;
}

// The lock is held: a rank that ends isn't ready in between.
void StartupWatch::Impl::look() {
  const bool wishes = is_told_long_ago();
  if (!store) {
    if (wishes && !ready) leave();
    return;
  }
  if (wishes) {
    const std::string wish = std::to_string(noted_signal() + (noted_by_launcher() ? kByLauncher : 0));
    store->compareSet(kWish, std::vector<uint8_t>{}, {wish.begin(), wish.end()});  // the first one counts
  }
  if (!ready && store->check({kWish})) store->set(kEnd, "");
  if (store->check({kEnd})) leave();
}

void StartupWatch::Impl::watch(const std::stop_token& stop) {
  std::unique_lock lock(mutex);
  try {
    while (!changed.wait_for(lock, stop, kLook, [&] { return stop.stop_requested(); })) {
      if (stop.stop_requested()) return;
      look();
    }
  } catch (const std::exception& error) {
    log::warning(
        str("the store of the job doesn't answer: a signal waits for the first step (", error.what(), ")"));
  }
}

StopCause StartupWatch::Impl::cause_of_all() const {
  if (!store) return cause_here();
  const std::vector<uint8_t> text = store->get(kWish);
  const int wish = std::stoi(std::string(text.begin(), text.end()));
  return {.signal = wish % kByLauncher, .by_launcher = wish >= kByLauncher};
}

void StartupWatch::Impl::wait_for_others() const {
  const auto deadline = Clock::now() + kLeaving;
  store->add(kLeft, 1);
  while (store->add(kLeft, 0) < world->size() && Clock::now() < deadline) std::this_thread::sleep_for(kLook);
  // Its process keeps the store.
  if (world->rank() == 0) std::this_thread::sleep_for(2 * kLook);
}

// Without destructors: threads and peers may be anywhere.
void StartupWatch::Impl::leave() {
  StopCause cause = cause_here();
  int code = 0;
  log::info(str(cause.signal == 0 ? std::string("a signal to another rank") : signal_name(cause.signal),
                " stops the run before it began: nothing was trained"));
  try {
    cause = cause_of_all();
    if (store) wait_for_others();
  } catch (const std::exception&) {
    // Rank 0's process has left.
  }
  try {
    if (on_end && !peer_has_failed()) code = on_end(cause);
  } catch (const std::exception& error) {
    log::error(error.what());
    code = 1;
  }
  std::fflush(nullptr);
  std::_Exit(code);
}

StartupWatch::StartupWatch(std::function<int(const StopCause&)> on_end) : impl_(std::make_unique<Impl>()) {
  impl_->on_end = std::move(on_end);
  impl_->thread = std::jthread([impl = impl_.get()](const std::stop_token& stop) { impl->watch(stop); });
}

StartupWatch::~StartupWatch() = default;

void StartupWatch::join(const dist::World& world) {
  const std::lock_guard lock(impl_->mutex);
  impl_->world = world;
  if (world.size() > 1)
    impl_->store = c10::make_intrusive<c10d::PrefixStore>("train/startup", world.store().clone());
}

void StartupWatch::end() {
  if (!impl_->thread.joinable()) return;
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->ready = true;
  }
  if (impl_->world) impl_->world->everyone()->barrier({"train::startup"}).wait();
  impl_->thread.request_stop();
  impl_->thread.join();
}

}  // namespace titan::train
