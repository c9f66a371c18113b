// [Note: ending a start together]
// Keys of the store:
//   stop_request   some rank was asked to stop a while ago; the value is the signal, plus 128 if the launcher
//                  sent it
//   end            set by a rank that isn't ready, i.e. hasn't reached end(). The barrier there then never
//                  completes, so the ranks that wait in it may leave as well
//   left           number of ranks that know of it; all wait until every rank does, and exit

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
constexpr seconds kLeaving{10};  // used up only if a rank is gone
constexpr int kByLauncher = 128;
constexpr const char* kStopRequest = "stop_request";
constexpr const char* kEnd = "end";
constexpr const char* kLeft = "left";

StopCause cause_here() { return {.signal = noted_signal(), .by_launcher = noted_by_launcher()}; }

}  // namespace

struct StartupWatch::Impl {
  void watch(const std::stop_token& stop) {
    std::unique_lock lock(mutex);
    try {
      while (!changed.wait_for(lock, stop, kLook, [&] { return stop.stop_requested(); })) {
        if (stop.stop_requested()) return;
        look();
      }
    } catch (const std::exception& error) {
      log::warning(str("the job's store doesn't answer: a signal takes effect only at the first step (",
                       error.what(), ")"));
    }
  }

  std::mutex mutex;
  std::condition_variable_any changed;
  // A separate connection; null: the ranks haven't met, or there is only one.
  c10::intrusive_ptr<c10d::Store> store;
  std::optional<dist::World> world;
  bool ready = false;
  std::optional<Clock::time_point> requested_at;
  std::function<int(const StopCause&)> on_end;
  std::jthread thread;

 private:
  // Called under the lock: a rank can't become ready while it ends.
  void look() {
    const bool must_stop = was_asked_long_ago();
    if (!store) {
      if (must_stop && !ready) leave();
      return;
    }
    if (must_stop) {
      const std::string request = std::to_string(noted_signal() + (noted_by_launcher() ? kByLauncher : 0));
      store->compareSet(kStopRequest, "", request);  // the first request counts
    }
    if (!ready && store->check({kStopRequest})) store->set(kEnd, "");
    if (store->check({kEnd})) leave();
  }

  bool was_asked_long_ago() {
    if (noted_signal() == 0) return false;
    if (!requested_at) requested_at = Clock::now();
    return Clock::now() - *requested_at >= kShortStart;
  }

  StopCause cause_of_all() const {
    if (!store) return cause_here();
    const int request = std::stoi(store->get_to_str(kStopRequest));
    return {.signal = request % kByLauncher, .by_launcher = request >= kByLauncher};
  }

  void wait_for_others() const {
    const auto deadline = Clock::now() + kLeaving;
    store->add(kLeft, 1);
    while (store->add(kLeft, 0) < world->size() && Clock::now() < deadline)
      std::this_thread::sleep_for(kLook);
    // Rank 0's process hosts the store.
    if (world->rank() == 0) std::this_thread::sleep_for(2 * kLook);
  }

  // Exits without destructors: threads and peers may be anywhere.
  void leave() {
    StopCause cause = cause_here();
    int code = 0;
    log::info(str(cause.signal == 0 ? std::string("a signal to another rank") : signal_name(cause.signal),
                  " stops the run before it began: nothing was trained"));
    try {
      cause = cause_of_all();
      if (store) wait_for_others();
    } catch (const std::exception&) {
      // Rank 0's process has exited.
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
};

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
