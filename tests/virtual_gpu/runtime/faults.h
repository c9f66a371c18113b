#pragma once

/// Faults of the program that runs on virtual GPUs. A fault often ends one process of a job, which may continue without it, as tests of lost ranks
/// do. So each report is also noted in a file, and the program that scripts/virtual_gpus.sh has started fails if there is one.
namespace virtual_gpu {

/// Prints a part of a report, and notes it.
[[gnu::format(printf, 1, 2)]] void report_fault(const char* format, ...);
/// The same, and ends this process.
[[noreturn, gnu::format(printf, 1, 2)]] void end_program(const char* format, ...);

/// The exit code of a process that is about to end with `status`. That of the program that the script has started isn't 0 if other processes
/// had faults, whose reports this prints.
int status_with_faults(int status);

}  // namespace virtual_gpu
