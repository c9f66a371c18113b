#pragma once

// Facts about this process and its machine, from the operating system (Linux, /proc).

#include <sys/types.h>

#include <string>
#include <vector>

namespace titan {

/// The version of this library.
inline constexpr const char* kVersion = "0.1.0";

/// "No space left on device (ENOSPC)"
std::string errno_text(int error);

/// "?" if the machine has no name.
std::string host_name();
/// The kernel's identifier of this boot.
std::string boot_id();
/// Equal for two processes on one host. A container with its own host name or network counts as a host. Begins with "NAME/", and has no spaces.
std::string host_identity();

/// A field of /proc/<process>/status, such as "State" or "SigBlk"; "" if there is none. `process` is a pid,
/// "self", or "self/task/<tid>".
std::string status_field(const std::string& process, const std::string& field);

/// Seconds since this process started (its exec, in clock ticks of 1/100 s).
double seconds_since_process_start();
/// Seconds since the `titan train --nproc` that started this rank, or else since this process started.
double seconds_since_launch();
/// Passes this process's running time on to the ranks that it starts, for seconds_since_launch().
void pass_on_launch_time();

/// Starts words[0], which PATH finds, with no signal blocked or ignored. `output` and `errors` are files of this process that it writes to; -1:
/// where this process does. No other file stays open in it. The caller waits for its end. Throws Error if it can't be started.
pid_t start_program(const std::vector<std::string>& words, int output = -1, int errors = -1);

/// In GiB (1024^3 bytes).
double peak_resident_gib();
/// The machine's memory, or less if a control group (a container's) limits this process.
double machine_memory_gib();

}  // namespace titan
