#pragma once

// The call stack of every thread of this process, for programs that hang. Any thread can ask; the others
// answer in a signal handler, so they must not block the signal.

#include <chrono>
#include <string>
#include <vector>

namespace titan {

struct ThreadStack {
  int tid = 0;
  std::string name;                 ///< the kernel's name for the thread
  std::string state;                ///< "sleeping in futex_wait_queue", "running", ...
  std::vector<std::string> frames;  ///< innermost first; empty if the thread didn't answer in time
};

/// Loads what a signal handler can't load, and takes the signal SIGRTMIN + 3. Call it early; a second call
/// does nothing.
void prepare_thread_stacks();

/// The stacks of all threads, the first thread's first. Waits for each thread at most twice `limit`. Only one
/// thread may call it at a time.
std::vector<ThreadStack> thread_stacks(std::chrono::milliseconds limit = std::chrono::milliseconds(200));

/// Threads with equal stacks (a thread pool's, mostly) are shown together:
///   thread 4711 (titan), sleeping in futex_wait_queue
///     #0 __poll in libc.so.6 +0x1142df
///     #1 titan::data::Prefetcher::take() in libtitan.so.0 +0x21c
std::string to_text(const std::vector<ThreadStack>& stacks);

}  // namespace titan
