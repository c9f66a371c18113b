#include "train/policies/interruption.h"

#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "titan/core/error.h"

namespace titan::train {

namespace {

constexpr std::array kStopSignals = {SIGTERM, SIGINT, SIGUSR1, SIGHUP};
constexpr int64_t kSameSignalNs = 200'000'000;

// A signal handler can only reach globals.
std::atomic<int> first_signal{0};
std::atomic<int64_t> first_signal_ns{0};
std::atomic<int> first_note{0};  // the launcher's value with that signal; 0: none
std::atomic<bool> first_by_launcher{false};
std::atomic<int> launcher{0};
sem_t signal_noted;
std::atomic<bool> is_watching{false};

int64_t steady_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Async-signal-safe: lock-free atomics, clock_gettime, sem_post and _exit.
void note_signal(int signal, siginfo_t* info, void* /*context*/) {
  const int saved_errno = errno;
  const int64_t now = steady_ns();
  const bool by_launcher = launcher != 0 && info->si_pid == launcher;
  int64_t first = 0;
  if (first_signal_ns.compare_exchange_strong(first, now)) {
    first_note = by_launcher && info->si_code == SI_QUEUE ? info->si_value.sival_int : 0;
    first_by_launcher = by_launcher;
    first_signal = signal;
    ::sem_post(&signal_noted);
  } else if (now - first > kSameSignalNs && !by_launcher) {
    ::_exit(128 + signal);
  }
  errno = saved_errno;
}
static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<int>::is_always_lock_free &&
              std::atomic<bool>::is_always_lock_free);

sigset_t stop_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : kStopSignals) ::sigaddset(&set, signal);
  return set;
}

std::mutex listener_mutex;
std::vector<const std::function<void(int)>*> listeners;

void notify_listeners() {
  const std::lock_guard lock(listener_mutex);
  for (const auto* notify : listeners) (*notify)(first_signal);
}

/// The previous actions and mask, and the thread that the handler runs in.
struct Watching {
  std::array<struct sigaction, kStopSignals.size()> before{};
  sigset_t mask_before{};
  std::jthread thread;
};
std::unique_ptr<Watching> watching;

void watch(const std::stop_token& stop) {
  const sigset_t set = stop_signals();
  ::pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  while (true) {
    if (::sem_wait(&signal_noted) != 0) continue;  // interrupted by the handler, which has posted
    if (stop.stop_requested()) return;
    notify_listeners();
  }
}

}  // namespace

SignalWatch::SignalWatch(int launcher_pid) {
  TITAN_CHECK(!is_watching.exchange(true), "this process already has a SignalWatch");
  first_signal = 0;
  first_signal_ns = 0;
  first_note = 0;
  first_by_launcher = false;
  launcher = launcher_pid;
  ::sem_init(&signal_noted, /*pshared=*/0, 0);
  watching = std::make_unique<Watching>();
  const sigset_t set = stop_signals();
  ::pthread_sigmask(SIG_BLOCK, &set, &watching->mask_before);
  struct sigaction action {};
  action.sa_sigaction = note_signal;
  action.sa_mask = set;
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  for (size_t i = 0; i < kStopSignals.size(); ++i) {
    ::sigaction(kStopSignals[i], nullptr, &watching->before[i]);
    // Signals that are ignored, as under nohup or in a shell's background, stay so.
    if (watching->before[i].sa_handler != SIG_IGN) ::sigaction(kStopSignals[i], &action, nullptr);
  }
  watching->thread = std::jthread([](const std::stop_token& stop) { watch(stop); });
}

SignalWatch::~SignalWatch() {
  for (size_t i = 0; i < kStopSignals.size(); ++i)
    ::sigaction(kStopSignals[i], &watching->before[i], nullptr);
  watching->thread.request_stop();
  ::sem_post(&signal_noted);
  watching->thread.join();
  ::pthread_sigmask(SIG_SETMASK, &watching->mask_before, nullptr);
  watching.reset();
  ::sem_destroy(&signal_noted);
  is_watching = false;
}

int noted_signal() { return is_watching ? first_signal.load(std::memory_order_relaxed) : 0; }

bool peer_has_failed() { return is_watching && first_note == kPeerHasFailed; }

bool group_grows() { return is_watching && first_note == kGroupGrows; }

bool noted_by_launcher() { return noted_signal() != 0 && first_by_launcher; }

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name ? str("SIG", name) : str("signal ", signal);
}

SignalListener::SignalListener(std::function<void(int)> notify) : notify_(std::move(notify)) {
  const std::lock_guard lock(listener_mutex);
  listeners.push_back(&notify_);
  if (const int signal = noted_signal()) notify_(signal);
}

SignalListener::~SignalListener() {
  const std::lock_guard lock(listener_mutex);
  std::erase(listeners, &notify_);
}

}  // namespace titan::train
