#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace titan::dist {

/// Wakes the one thread that waits; rung while nobody does, it wakes the next one that comes.
class Bell {
 public:
  void ring() {
    {
      const std::lock_guard lock(mutex_);
      rung_ = true;
    }
    changed_.notify_all();
  }
  /// False: it wasn't rung within `limit`.
  bool wait(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    const bool rung = changed_.wait_for(lock, limit, [this] { return rung_; });
    rung_ = false;
    return rung;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool rung_ = false;
};

}  // namespace titan::dist
