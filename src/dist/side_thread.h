#pragma once

#include <chrono>
#include <functional>
#include <memory>

namespace titan::dist {

/// A thread that does the tasks it is given, and perhaps one more thing now and then.
class SideThread {
 public:
  using Task = std::function<void()>;

  /// `name`: 15 letters at most. `tick` is called once every `period`, between tasks; it doesn't throw.
  explicit SideThread(const char* name, Task tick = {},
                      std::chrono::milliseconds period = std::chrono::hours(1));
  /// Waits a second at most for what was posted, then leaves the thread to itself.
  ~SideThread();
  SideThread(const SideThread&) = delete;
  SideThread& operator=(const SideThread&) = delete;

  /// Does `task` soon, in place of one that was posted before and hasn't begun. It doesn't throw.
  void post(Task task);
  /// Returns true once everything that was posted is done, false after `limit`.
  bool wait(std::chrono::milliseconds limit) const;
  bool is_idle() const { return wait(std::chrono::milliseconds(0)); }

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace titan::dist
