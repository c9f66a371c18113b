// Static objects are destroyed at the program's end, the last registered first. An operation may make some, so the scheduler's end is
// registered again after each registration: no operation runs while objects that it uses are destroyed.

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/counters.h"
#include "runtime/faults.h"
#include "runtime/stream.h"

extern "C" int __cxa_atexit(void (*handler)(void*), void* argument, void* library) {
  static auto* const real = reinterpret_cast<decltype(&__cxa_atexit)>(dlsym(RTLD_NEXT, "__cxa_atexit"));
  const int result = real(handler, argument, library);
  if (virtual_gpu::scheduler_has_started()) real(virtual_gpu::stop_scheduler, nullptr, nullptr);
  return result;
}

// The real functions do no more.
[[noreturn]] static void leave(int status) {
  for (;;) syscall(SYS_exit_group, virtual_gpu::status_with_faults(status));
}
// `titan` ends so.
extern "C" [[noreturn]] void _Exit(int status) noexcept {
  virtual_gpu::write_counts();
  leave(status);
}
extern "C" [[noreturn]] void _exit(int status) { leave(status); }
// exit() and the end of main() don't call these. What is registered first is called last.
[[gnu::constructor]] static void watch_exit() {
  on_exit(
      [](int status, void*) {
        const int other = virtual_gpu::status_with_faults(status);
        if (other == status) return;
        fflush(nullptr);
        leave(other);
      },
      nullptr);
}
