#pragma once

// What this process is, and what the operating system knows of it and its machine (Linux, /proc).

#include <string>

namespace titan {

/// The version of this library.
inline constexpr const char* kVersion = "0.1.0";

std::string host_name();
/// The kernel's identifier of this start of the machine.
std::string boot_id();
/// Equal for two processes of one host; containers with names of their own count as hosts.
std::string host_identity();

/// A field of /proc/<process>/status, such as "State" or "SigBlk", "" where there is none. `process` is a pid,
/// "self", or "self/task/<tid>".
std::string status_field(const std::string& process, const std::string& field);

/// Seconds since this process started (its exec, in clock ticks of 1/100 s).
double seconds_since_process_start();
/// Seconds since the `titan train --nproc` that started this rank, or else since this process started.
double seconds_since_launch();
/// Passes this process's running time on to the ranks that it starts, for seconds_since_launch().
void pass_on_launch_time();
/// In GiB (1024^3 bytes).
double peak_resident_gib();
double machine_memory_gib();

}  // namespace titan
