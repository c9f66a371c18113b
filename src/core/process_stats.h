#pragma once

// What the operating system says of this process and machine (Linux, /proc).

namespace titan::train {

/// Seconds since this process was started (its exec, in clock ticks of 1/100 s).
double seconds_since_process_start();
/// The same from the start of the `titan train --nproc` that started this rank, where one did.
double seconds_since_launch();
/// Tells the ranks that this process starts next how long it has run.
void pass_on_launch_time();
/// Most memory that was resident so far, and the machine's memory, in GiB (1024^3 bytes).
double peak_resident_gib();
double machine_memory_gib();

}  // namespace titan::train
