#pragma once

// What the process says when it dies by a signal: which one, where, a note, and a backtrace; then the signal
// takes its course (core dump, exit status) as if nobody had looked.

namespace titan {

/// Reports SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT on standard error. Called by cli::main() and by
/// dist::init(); a second call does nothing. A signal that somebody else handles already (a sanitizer, the
/// user) is left to them, and so is a stack of theirs for handlers. Without one the handler has its own on
/// the calling thread, so that a stack overflow there is reported too.
void install_crash_handler();

/// Before the first of these calls: they leave all signals as they are.
void decline_crash_handler();

/// A sentence that the report adds to a SIGSEGV at a null pointer, or in an array behind one (below 1 TiB,
/// where a process has no data): what the likely cause is. Kept by pointer, so `static_text` must live as
/// long as the process (a string literal); nullptr removes it. Thread-safe.
void set_crash_note(const char* static_text);

/// Called by the report, ahead of the backtrace, with the signal's name: for what else is worth keeping. Only
/// async-signal-safe functions may be called in it. nullptr removes it. Thread-safe.
void set_crash_hook(void (*hook)(const char* signal_name));

}  // namespace titan
