#pragma once

#include <pthread.h>
#include <signal.h>
#include <cstddef>
#include <functional>

namespace titan::checkpoint::detail {

/// Threads made in its scope meet no signals: those are for the thread that trains.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    // Faults are of the thread that makes them.
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, fault);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

/// Calls task(0) ... task(count - 1) on up to `num_threads` threads, the caller's among them; returns when
/// all are done. Behind the first that throws no other begins, and what it threw is thrown here.
void run_tasks(int num_threads, size_t count, const std::function<void(size_t)>& task);

}  // namespace titan::checkpoint::detail
