#pragma once

// The ranks' logs as one trace in Chrome's JSON form, which ui.perfetto.dev and chrome://tracing open.

#include <functional>
#include <string_view>
#include <vector>

#include "cli/run/structured_events.h"

namespace titan::cli {

/// Each process of the job becomes one of the trace, with a track a thread; spans nest, numbers are counters,
/// and other instants are marks. A span that a process never ended (it was killed) lasts to its last event.
/// `next` is asked for the logs one after another, until it has none: they needn't all be in memory.
void write_perfetto(const std::function<std::optional<ProcessLog>()>& next,
                    const std::function<void(std::string_view)>& append);

}  // namespace titan::cli
