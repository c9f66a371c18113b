#pragma once

// Helper threads, and the call stacks of all threads of this process.

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace titan {

/// Threads created in its scope block all signals except faults.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    // A fault goes to the thread that causes it.
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, fault);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

/// Calls task(0) ... task(count - 1) on up to `num_threads` threads, including the caller's, and returns when
/// all are done. After the first exception no further task starts, and run_tasks throws it.
void run_tasks(int num_threads, size_t count, const std::function<void(size_t)>& task);

/// Runs `call` on its own thread. Returns true, or throws what it throws, if it is done within `limit`.
/// Otherwise returns false and abandons the thread, so `call` has to own everything it uses.
bool within(std::chrono::milliseconds limit, std::function<void()> call);

/// A thread that runs posted tasks and, between them, a periodic `tick`.
class SideThread {
 public:
  using Task = std::function<void()>;

  /// `name`: 15 letters at most. `tick` is called once every `period`, between tasks; it doesn't throw.
  explicit SideThread(const char* name, Task tick = {},
                      std::chrono::milliseconds period = std::chrono::hours(1));
  /// Waits at most a second for the posted task, then abandons the thread.
  ~SideThread();
  SideThread(const SideThread&) = delete;
  SideThread& operator=(const SideThread&) = delete;

  /// Runs `task` soon, in place of an earlier one that hasn't begun. It must not throw.
  void post(Task task);
  /// Returns true once everything that was posted is done, false after `limit`.
  bool wait(std::chrono::milliseconds limit) const;
  bool is_idle() const { return wait(std::chrono::milliseconds(0)); }

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// ---- call stacks
//
// For programs that hang. Any thread can ask; the others answer in a signal handler, so they must not block
// the signal.

struct ThreadStack {
  int tid = 0;
  std::string name;                 ///< the kernel's name for the thread
  std::string state;                ///< "sleeping in futex_wait_queue", "running", ...
  std::vector<std::string> frames;  ///< innermost first; empty if the thread didn't answer in time
};

/// Loads the libraries that a signal handler can't load, and handles the signal SIGRTMIN + 3. Call it early;
/// a second call does nothing.
void prepare_thread_stacks();

/// The stacks of all threads, the first thread's first. Waits for each thread at most twice `limit`. Only one
/// thread may call it at a time.
std::vector<ThreadStack> thread_stacks(std::chrono::milliseconds limit = std::chrono::milliseconds(200));

/// Threads with equal stacks (usually of a thread pool) are shown together:
///   thread 4711 (titan), sleeping in futex_wait_queue
///     #0 __poll in libc.so.6 +0x1142df
///     #1 titan::data::Prefetcher::take() in libtitan.so.0 +0x21c
std::string to_text(const std::vector<ThreadStack>& stacks);

}  // namespace titan
