// Static objects are destroyed at the program's end, the last registered first. An operation may make some, so the scheduler's end is
// registered again after each registration: no operation runs while objects that it uses are destroyed.

#include <dlfcn.h>
#include <stdlib.h>

#include "runtime/counters.h"
#include "runtime/stream.h"

extern "C" int __cxa_atexit(void (*handler)(void*), void* argument, void* library) {
  static auto* const real = reinterpret_cast<decltype(&__cxa_atexit)>(dlsym(RTLD_NEXT, "__cxa_atexit"));
  const int result = real(handler, argument, library);
  if (virtual_gpu::scheduler_has_started()) real(virtual_gpu::stop_scheduler, nullptr, nullptr);
  return result;
}

// `titan` ends so.
extern "C" [[noreturn]] void _Exit(int status) noexcept {
  virtual_gpu::write_counts();
  static auto* const real = reinterpret_cast<decltype(&_Exit)>(dlsym(RTLD_NEXT, "_Exit"));
  real(status);
}
