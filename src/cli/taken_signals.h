#pragma once

// Signals that ask a program for something, and would end one that has no handler for them: a rank in its
// first moments, a shell around it.

#include <sys/types.h>

namespace titan::cli {

/// Whether the process has a handler for `signal`, or its first thread blocks it and not all signals (which
/// is how one reads signals from a descriptor), as /proc says; false where there is no such process.
bool takes(pid_t pid, int signal);

/// Sends `signal` to those processes of a process group that take it. Returns how many.
int signal_takers(pid_t group, int signal);

}  // namespace titan::cli
