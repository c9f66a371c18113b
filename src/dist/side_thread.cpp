#include "dist/side_thread.h"

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

namespace titan::dist {

struct SideThread::State {
  Task tick;
  std::chrono::milliseconds period;

  std::mutex mutex;
  std::condition_variable changed;
  Task posted;
  bool works = false, stops = false;

  bool is_done() const { return !posted && !works; }

  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait_for(lock, period, [this] { return stops || posted; });
      if (posted)
        work(lock, std::exchange(posted, nullptr));
      else if (stops)
        return;
      else if (tick)
        work(lock, tick);
    }
  }

  void work(std::unique_lock<std::mutex>& lock, Task task) {
    works = true;
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    works = false;
    changed.notify_all();
  }
};

SideThread::SideThread(const char* name, Task tick, std::chrono::milliseconds period)
    : state_(std::make_shared<State>()) {
  state_->tick = std::move(tick);
  state_->period = period;
  std::thread([state = state_, name] {
    pthread_setname_np(pthread_self(), name);
    state->run();
  }).detach();
}

SideThread::~SideThread() {
  std::unique_lock lock(state_->mutex);
  state_->stops = true;
  state_->changed.notify_all();
  state_->changed.wait_for(lock, std::chrono::seconds(1), [this] { return state_->is_done(); });
}

void SideThread::post(Task task) {
  const std::lock_guard lock(state_->mutex);
  state_->posted = std::move(task);
  state_->changed.notify_all();
}

bool SideThread::wait(std::chrono::milliseconds limit) const {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, limit, [this] { return state_->is_done(); });
}

}  // namespace titan::dist
