#include "titan/core/crash.h"

#include <execinfo.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>

// report() makes only async-signal-safe calls: write, sigaction, raise, nanosleep, and backtrace*, which is
// safe once libgcc is loaded (install_crash_handler makes a first call for that).

namespace titan {
namespace {

constexpr std::array kSignals = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
constexpr int kMaxFrames = 64;
constexpr size_t kStackBytes = 64 * 1024;
// Addresses below this come from a null pointer, possibly plus an offset.
constexpr uintptr_t kNullPointersEnd = uintptr_t{1} << 40;

std::atomic<const char*> crash_note{nullptr};
std::atomic<void (*)(const char*)> crash_hook{nullptr};
std::atomic<bool> declined{false};
std::atomic_flag reporting = ATOMIC_FLAG_INIT;
alignas(16) char handler_stack[kStackBytes];

void write_text(const char* text) {
  size_t left = std::strlen(text);
  while (left > 0) {
    ssize_t written = ::write(STDERR_FILENO, text, left);
    if (written <= 0) return;
    text += written;
    left -= static_cast<size_t>(written);
  }
}

void write_hex(uintptr_t value) {
  char digits[2 * sizeof(value) + 1] = {};
  for (size_t i = 0; i < 2 * sizeof(value); ++i)
    digits[i] = "0123456789abcdef"[(value >> (4 * (2 * sizeof(value) - 1 - i))) & 15];
  write_text("0x");
  write_text(digits);
}

const char* signal_name(int signal) {
  switch (signal) {
    case SIGSEGV:
      return "SIGSEGV (invalid memory access)";
    case SIGBUS:
      return "SIGBUS (a mapped file shrank, or memory is gone)";
    case SIGFPE:
      return "SIGFPE (arithmetic error)";
    case SIGILL:
      return "SIGILL (instruction unknown to this processor)";
    default:
      return "SIGABRT (aborted)";
  }
}

// A pointer that isn't a valid address at all faults with another code and reports address 0.
bool is_null_pointer(int signal, const siginfo_t* info) {
  return signal == SIGSEGV && info->si_code == SEGV_MAPERR &&
         reinterpret_cast<uintptr_t>(info->si_addr) < kNullPointersEnd;
}

void report(int signal, const siginfo_t* info) {
  bool memory_fault = signal == SIGSEGV || signal == SIGBUS;
  write_text("[titan] fatal signal ");
  write_text(signal_name(signal));
  if (memory_fault && info->si_code > 0) {  // from the kernel: a signal from a process has no address
    write_text(" at address ");
    write_hex(reinterpret_cast<uintptr_t>(info->si_addr));
  }
  write_text("\n");
  const char* note = crash_note.load();
  if (note != nullptr && is_null_pointer(signal, info)) {
    write_text("[titan] ");
    write_text(note);
    write_text("\n");
  }
  // Before the backtrace, because the stack may be damaged.
  if (auto* hook = crash_hook.load()) hook(signal_name(signal));
  void* frames[kMaxFrames];
  backtrace_symbols_fd(frames, backtrace(frames, kMaxFrames), STDERR_FILENO);
}

/// Gives another thread time to finish its report, which ends the process.
void wait_for_end() {
  for (int i = 0; i < 50; ++i) {
    timespec tenth{0, 100'000'000};
    nanosleep(&tenth, nullptr);
  }
}

void handle(int signal, siginfo_t* info, void*) {
  if (reporting.test_and_set())
    wait_for_end();
  else
    report(signal, info);
  struct sigaction default_action = {};
  default_action.sa_handler = SIG_DFL;
  sigaction(signal, &default_action, nullptr);
  raise(signal);  // blocked while this handler runs, so it is delivered when it returns
}

bool is_default(int signal) {
  struct sigaction current = {};
  return sigaction(signal, nullptr, &current) == 0 && (current.sa_flags & SA_SIGINFO) == 0 &&
         current.sa_handler == SIG_DFL;
}

}  // namespace

void decline_crash_handler() { declined.store(true); }

void install_crash_handler() {
  static std::atomic_flag installed;
  if (declined.load() || installed.test_and_set()) return;
  void* frame = nullptr;
  backtrace(&frame, 1);  // loads libgcc now: dlopen isn't safe in a handler

  stack_t stack = {}, others = {};
  stack.ss_sp = handler_stack;
  stack.ss_size = kStackBytes;
  if (sigaltstack(nullptr, &others) == 0 && (others.ss_flags & SS_DISABLE) != 0) sigaltstack(&stack, nullptr);

  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int signal : kSignals)
    if (is_default(signal)) sigaction(signal, &action, nullptr);
}

void set_crash_note(const char* static_text) { crash_note.store(static_text); }

void set_crash_hook(void (*hook)(const char* signal_name)) { crash_hook.store(hook); }

}  // namespace titan
