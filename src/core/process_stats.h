#pragma once

// What the operating system knows of this process and machine (Linux, /proc).

#include <string>

namespace titan::train {

std::string host_name();

/// Seconds since this process started (its exec, in clock ticks of 1/100 s).
double seconds_since_process_start();
/// Seconds since the `titan train --nproc` that started this rank, or else since this process started.
double seconds_since_launch();
/// Passes this process's running time on to the ranks that it starts, for seconds_since_launch().
void pass_on_launch_time();
/// In GiB (1024^3 bytes).
double peak_resident_gib();
double machine_memory_gib();

}  // namespace titan::train
