#include "background.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "quiet_thread.h"
#include "titan/core/error.h"
#include "titan/dist/flight_record.h"

namespace titan::checkpoint::detail {

// Shared with the thread, which may outlive the object.
struct Background::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::function<void()> job;
  bool busy = false;
  bool ending = false;

  void run() {
    const dist::BackgroundCalls background;
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return job || ending; });
      if (!job) return;
      lock.unlock();
      job();
      job = nullptr;  // what it held goes before anybody is told that it is done
      lock.lock();
      busy = false;
      changed.notify_all();
    }
  }
};

Background::Background() : state_(std::make_shared<State>()) {
  SignalsBlocked blocked;
  thread_ = std::thread([state = state_] { state->run(); });
  pthread_setname_np(thread_.native_handle(), "checkpoint");
}

Background::~Background() {
  bool busy = false;
  {
    std::lock_guard lock(state_->mutex);
    state_->ending = true;
    busy = state_->busy;
  }
  state_->changed.notify_all();
  busy ? thread_.detach() : thread_.join();
}

void Background::start(std::function<void()> job) {
  std::lock_guard lock(state_->mutex);
  TITAN_INTERNAL_ASSERT(!state_->busy, "a second job while one is under way");
  state_->job = std::move(job);
  state_->busy = true;
  state_->changed.notify_all();
}

bool Background::busy() const {
  std::lock_guard lock(state_->mutex);
  return state_->busy;
}

bool Background::wait(const std::function<bool()>& give_up) const {
  constexpr std::chrono::milliseconds between(100);
  std::unique_lock lock(state_->mutex);
  while (!state_->changed.wait_for(lock, between, [this] { return !state_->busy; }))
    if (give_up()) return false;
  return true;
}

}  // namespace titan::checkpoint::detail
