#include "core/threads.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace titan {
namespace {

class Tasks {
 public:
  Tasks(size_t count, const std::function<void(size_t)>& task) : count_(count), task_(task) {}

  void work() {
    for (size_t index = next_++; index < count_; index = next_++) {
      try {
        task_(index);
      } catch (...) {
        next_ = count_;
        std::lock_guard lock(mutex_);
        if (!error_) error_ = std::current_exception();
      }
    }
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const size_t count_;
  const std::function<void(size_t)>& task_;
  std::atomic<size_t> next_{0};
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

void run_tasks(int num_threads, size_t count, const std::function<void(size_t)>& task) {
  Tasks tasks(count, task);
  {
    std::vector<std::jthread> threads;
    const size_t more = std::min<size_t>(static_cast<size_t>(std::max(num_threads, 1)), count);
    {
      SignalsBlocked blocked;
      for (size_t i = 1; i < more; ++i) threads.emplace_back([&tasks] { tasks.work(); });
    }
    tasks.work();
  }
  tasks.rethrow();
}

bool within(std::chrono::milliseconds limit, std::function<void()> call) {
  const auto promise = std::make_shared<std::promise<void>>();
  std::future<void> done = promise->get_future();
  const auto run = [promise, call = std::move(call)]() mutable {
    std::exception_ptr error;
    try {
      call();
    } catch (...) {
      error = std::current_exception();
    }
    call = nullptr;  // releases what it holds (a group) before the caller learns that it is done
    error ? promise->set_exception(error) : promise->set_value();
  };
  {
    SignalsBlocked blocked;
    std::thread(run).detach();
  }
  if (done.wait_for(limit) != std::future_status::ready) return false;
  done.get();
  return true;
}

}  // namespace titan
