#pragma once

// Threads beside the one that trains.

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <cstddef>
#include <functional>

namespace titan {

/// Threads made in its scope receive no signals: those are for the thread that trains.
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

}  // namespace titan
