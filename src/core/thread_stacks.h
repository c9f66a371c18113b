#pragma once

// Where every thread of this process is: what a hung program is asked first. Works from any thread, whatever
// the others wait for, as long as they take signals.

#include <chrono>
#include <string>
#include <vector>

namespace titan {

struct ThreadStack {
  int tid = 0;
  std::string name;                 ///< of the thread, as the kernel has it
  std::string state;                ///< "sleeping in futex_wait_queue", "running", ...
  std::vector<std::string> frames;  ///< innermost first; empty: the thread took no signal within the limit
};

/// Loads what a signal handler can't, and takes the signal SIGRTMIN + 3. Called once, long before the need;
/// a second call does nothing.
void prepare_thread_stacks();

/// All threads', the first one's first; others than the caller are asked by a signal, and waited for twice
/// `limit` at most. One caller at a time.
std::vector<ThreadStack> thread_stacks(std::chrono::milliseconds limit = std::chrono::milliseconds(200));

/// Threads of equal stacks together, as they mostly are a library's pool:
///   thread 4711 (titan), sleeping in futex_wait_queue
///     #0 __poll in libc.so.6 +0x1142df
///     #1 titan::data::Prefetcher::take() in libtitan.so.0 +0x21c
std::string to_text(const std::vector<ThreadStack>& stacks);

}  // namespace titan
