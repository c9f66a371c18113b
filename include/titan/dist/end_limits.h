#pragma once

// How long the ranks of a job that fails need for their ends. Launchers wait for so long before they kill.

#include <chrono>

namespace titan::dist {

/// From a rank's failure until it has told what that comes from, at most (Heartbeat::explain).
inline constexpr std::chrono::seconds kExplainsWithin{8};

/// From the verdict that the job hangs until a rank's watchdog has ended its process, at most.
inline constexpr std::chrono::seconds kHangEndsWithin{8};

/// In all: a job that has lost a rank, or hangs, is over by then.
inline constexpr std::chrono::seconds kJobEndsWithin{10};

}  // namespace titan::dist
