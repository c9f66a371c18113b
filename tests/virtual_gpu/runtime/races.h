#pragma once

#include "runtime/stream.h"

/// Finds accesses to the same bytes that nothing orders: no event, no synchronization, no common stream. Each stream, host
/// thread and event has a vector clock; an operation's clock says which operations have happened before it.
namespace virtual_gpu {

/// Advances the stream's clock by this operation and reports its accesses that race with earlier ones.
/// The state's mutex is held, here and below.
void check_ranges(Stream& stream, const Operation& operation);

/// The clock that an event recorded now carries.
Clock clock_of(Stream& stream);

/// The stream's next operations come after those in the clock.
void stream_has_seen(Stream& stream, const Clock& clock);

/// The host's next actions come after the operations in the clock, or after all of the stream's.
void host_has_seen(const Clock& clock);
void host_has_seen(Stream& stream);

/// The memory is returned to the device: later accesses to the same addresses don't belong to the earlier ones.
void forget_range(const void* data, size_t bytes);

/// Number of races reported so far.
int num_races();

}  // namespace virtual_gpu
