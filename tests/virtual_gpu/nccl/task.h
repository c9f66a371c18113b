#pragma once

#include <coroutine>
#include <exception>
#include <functional>
#include <memory>

#include "runtime/virtual_gpu.h"

namespace virtual_gpu {

/// A collective as it is written down: a coroutine that suspends wherever it needs another rank. The scheduler resumes it
/// when the condition holds, and runs other streams in the meantime.
class Task {
 public:
  struct promise_type {
    std::function<bool()> condition;

    Task get_return_object() { return Task(Handle::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { std::terminate(); }
  };
  using Handle = std::coroutine_handle<promise_type>;

  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  ~Task() {
    if (handle_) handle_.destroy();
  }

  /// Runs as far as possible; true when the task has ended.
  bool advance() {
    auto& condition = handle_.promise().condition;
    if (condition && !condition()) return false;
    condition = nullptr;
    handle_.resume();
    return handle_.done();
  }

 private:
  explicit Task(Handle handle) : handle_(handle) {}
  Handle handle_;
};

/// `co_await until(condition)`: suspends the task until it holds.
class until {
 public:
  explicit until(std::function<bool()> condition) : condition_(std::move(condition)) {}
  bool await_ready() const { return condition_(); }
  void await_suspend(Task::Handle handle) { handle.promise().condition = std::move(condition_); }
  void await_resume() const {}

 private:
  std::function<bool()> condition_;
};

/// An attempt that advances a new task of this kind each time the operation runs.
template <class MakeTask>
std::function<Attempt()> begin_task(MakeTask make_task) {
  return [make_task]() -> Attempt {
    auto task = std::make_shared<Task>(make_task());
    return [task] { return task->advance(); };
  };
}

}  // namespace virtual_gpu
