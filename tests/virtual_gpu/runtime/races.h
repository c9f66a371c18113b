#pragma once

#include <array>
#include <memory>

#include "runtime/stream.h"

/// Finds accesses to the same bytes that nothing orders: no event, no synchronization, no common stream. Each stream, event and
/// the host has a vector clock; an operation's clock says which operations have happened before it. Accesses are checked when
/// operations have run, because some learn only then what they access; an operation never runs before one that it is ordered after.
namespace virtual_gpu {

/// The host's calls that have led to an operation, innermost first.
struct Calls {
  std::array<void*, 64> frames;
  int count = 0;
};
/// Those of the program itself, not of LibTorch or the virtual GPU.
void print_calls(const Calls& calls);
/// The calling thread's.
void print_calls_here();

/// An operation's place in the order of its stream, and what happened before it.
struct Stamp {
  int stream = 0;
  uint64_t number = 0;
  Clock clock;
  std::shared_ptr<const Calls> calls;  ///< null unless VIRTUAL_GPU_STACKS asks for them
};

/// Advances the stream's clock by this operation. The state's mutex is held, here and below.
void stamp(Stream& stream, Operation& operation);
/// Keeps the host's calls, and what the allocator knows, when an operation is captured. Each launch of the graph then stamps a copy of it.
void stamp_captured(Operation& operation);

/// The running operation's stamp; null if races aren't looked for. Only on the scheduler's thread.
const Stamp* running_stamp();

/// Reports accesses of an operation that has run to its ranges, if they race with earlier ones.
void check_ranges(const Operation& operation);

/// The clock that an event recorded now carries.
Clock clock_of(Stream& stream);

/// The stream's next operations come after those in the clock.
void stream_has_seen(Stream& stream, const Clock& clock);

/// The calling host thread's next actions come after the operations in the clock, or after all of the stream's, and it sees the bytes that they have
/// copied to pinned memory. If the thread holds a lock of
/// LibTorch's allocator, which asks for events in any thread, only the allocator's do.
void host_has_seen(const Clock& clock);
void host_has_seen(Stream& stream);
/// All streams of the device, destroyed ones, too.
void host_has_seen_device(int device);
/// A destroyed stream's operations have run, and it is deleted.
void note_end(const Stream& stream);
/// That of a deleted stream if the calling host thread knows that all its operations are over, so that clocks don't grow with each stream that
/// a long test makes.
int new_stream_id();

/// The memory is returned to the device: later accesses to the same addresses don't belong to the earlier ones.
void forget_range(const void* data, size_t bytes);

/// LibTorch is loaded.
void find_allocator();

// Each host thread has a clock of its own. These four need no mutex. Locks that LibTorch's allocator and this library take don't count, because
// every thread takes them all the time.
void take_lock(const void* lock, const void* caller);
void release_lock(const void* lock, const void* caller);
/// For a thread that is started.
std::shared_ptr<const Clock> known_to_host_thread();
void host_thread_knows(const Clock& clock);

/// Counts a race that has been printed, and ends the program if VIRTUAL_GPU_RACES is fatal.
void count_race();
/// Ends the program if VIRTUAL_GPU_RACES is fatal.
void end_at_fault();

}  // namespace virtual_gpu
