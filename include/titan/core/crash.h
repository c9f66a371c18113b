#pragma once

// A report on standard error when the process dies by a signal: which one, the address, and a backtrace. The
// signal then has its usual effect (core dump, exit status).
//
//   titan::install_crash_handler();                       // cli::main() and dist::init() do this
//   titan::set_crash_note("is a freed parameter used?");  // added to null pointer faults

namespace titan {

/// Reports SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT. A second call does nothing. Signals that already have
/// a handler (a sanitizer's, the user's) keep it. Unless the calling thread has an alternate signal stack, it
/// gets one, so that a stack overflow there is reported too.
void install_crash_handler();

/// Makes later calls of install_crash_handler() leave all signals as they are.
void decline_crash_handler();

/// A sentence about the likely cause. The report adds it to a SIGSEGV below 1 TiB, which comes from a null
/// pointer, possibly plus an offset. `static_text` must live as long as the process (a string literal);
/// nullptr removes it. Thread-safe.
void set_crash_note(const char* static_text);

/// A function that the report calls before the backtrace, to save other records. It may call only
/// async-signal-safe functions. nullptr removes it. Thread-safe.
void set_crash_hook(void (*hook)(const char* signal_name));

}  // namespace titan
