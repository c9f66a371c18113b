// Host threads hand work to each other under locks. The functions here tell the race checker of them: all that a thread knew when it released
// a lock or ended, the next thread that takes the lock or joins it knows, too.

#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>

#include <memory>

#include "runtime/races.h"

namespace {

using virtual_gpu::Clock;

template <class Function>
Function* next(Function*, const char* name, const char* version) {
  void* found = version ? dlvsym(RTLD_NEXT, name, version) : nullptr;
  return reinterpret_cast<Function*>(found ? found : dlsym(RTLD_NEXT, name));
}
#define NEXT(name, version) static auto* const real = next(&name, #name, version)

struct Start {
  void* (*routine)(void*);
  void* argument;
  std::shared_ptr<const Clock> known;
};
void* run(void* given) {
  const std::unique_ptr<Start> start(static_cast<Start*>(given));
  if (start->known) virtual_gpu::host_thread_knows(*start->known);
  void* const result = start->routine(start->argument);
  virtual_gpu::release_lock(reinterpret_cast<const void*>(pthread_self()), nullptr);
  return result;
}

}  // namespace

#define TAKES(name, version, parameters, lock, ...)                             \
  extern "C" int name parameters {                                              \
    NEXT(name, version);                                                        \
    const int result = real(__VA_ARGS__);                                       \
    if (result == 0) virtual_gpu::take_lock(lock, __builtin_return_address(0)); \
    return result;                                                              \
  }
#define RELEASES(name, type)                                      \
  extern "C" int name(type* lock) {                               \
    NEXT(name, nullptr);                                          \
    virtual_gpu::release_lock(lock, __builtin_return_address(0)); \
    return real(lock);                                            \
  }
// Releases the mutex, waits, and takes it again.
#define WAITS(name, parameters, ...)                               \
  extern "C" int name parameters {                                 \
    NEXT(name, "GLIBC_2.3.2");                                     \
    virtual_gpu::release_lock(mutex, __builtin_return_address(0)); \
    const int result = real(__VA_ARGS__);                          \
    virtual_gpu::take_lock(mutex, __builtin_return_address(0));    \
    return result;                                                 \
  }

TAKES(pthread_mutex_lock, nullptr, (pthread_mutex_t * lock), lock, lock)
TAKES(pthread_mutex_trylock, nullptr, (pthread_mutex_t * lock), lock, lock)
TAKES(pthread_mutex_timedlock, nullptr, (pthread_mutex_t * lock, const timespec* end), lock, lock, end)
TAKES(pthread_mutex_clocklock, nullptr, (pthread_mutex_t * lock, clockid_t clock, const timespec* end), lock,
      lock, clock, end)
RELEASES(pthread_mutex_unlock, pthread_mutex_t)
TAKES(pthread_rwlock_rdlock, nullptr, (pthread_rwlock_t * lock), lock, lock)
TAKES(pthread_rwlock_wrlock, nullptr, (pthread_rwlock_t * lock), lock, lock)
TAKES(pthread_rwlock_tryrdlock, nullptr, (pthread_rwlock_t * lock), lock, lock)
TAKES(pthread_rwlock_trywrlock, nullptr, (pthread_rwlock_t * lock), lock, lock)
RELEASES(pthread_rwlock_unlock, pthread_rwlock_t)
TAKES(sem_wait, nullptr, (sem_t * lock), lock, lock)
TAKES(sem_trywait, nullptr, (sem_t * lock), lock, lock)
TAKES(sem_timedwait, nullptr, (sem_t * lock, const timespec* end), lock, lock, end)
RELEASES(sem_post, sem_t)
WAITS(pthread_cond_wait, (pthread_cond_t * condition, pthread_mutex_t* mutex), condition, mutex)
WAITS(pthread_cond_timedwait, (pthread_cond_t * condition, pthread_mutex_t* mutex, const timespec* end),
      condition, mutex, end)

extern "C" int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                      const timespec* end) {
  NEXT(pthread_cond_clockwait, nullptr);
  virtual_gpu::release_lock(mutex, __builtin_return_address(0));
  const int result = real(condition, mutex, clock, end);
  virtual_gpu::take_lock(mutex, __builtin_return_address(0));
  return result;
}
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*routine)(void*),
                              void* argument) {
  NEXT(pthread_create, nullptr);
  auto start = std::make_unique<Start>(Start{routine, argument, virtual_gpu::known_to_host_thread()});
  const int result = real(thread, attributes, run, start.get());
  if (result == 0) start.release();
  return result;
}
extern "C" int pthread_join(pthread_t thread, void** returned) {
  NEXT(pthread_join, nullptr);
  const int result = real(thread, returned);
  if (result == 0) virtual_gpu::take_lock(reinterpret_cast<const void*>(thread), nullptr);
  return result;
}
