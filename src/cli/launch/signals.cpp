#include "cli/launch/signals.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>

#include "core/process.h"
#include "titan/core/error.h"

namespace titan::cli {

std::string process_state(pid_t pid) {
  const std::string state = status_field(std::to_string(pid), "State");
  return state.empty() ? "unknown" : state;
}

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = write(fd, text.data(), text.size());
    if (n >= 0) {
      text.remove_prefix(static_cast<size_t>(n));
    } else if (errno == EAGAIN) {
      pollfd ready{fd, POLLOUT, 0};
      poll(&ready, 1, -1);
    } else if (errno != EINTR) {
      return;
    }
  }
}

bool is_ignored(int signal) {
  struct sigaction action {};
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

sigset_t launcher_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (int signal : {SIGCHLD, SIGQUIT}) sigaddset(&signals, signal);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2})
    if (!is_ignored(signal)) sigaddset(&signals, signal);
  return signals;
}

bool asks_for_end(int signal) { return signal != SIGCHLD && signal != SIGUSR2 && signal != SIGQUIT; }

SignalReader::SignalReader() {
  // If a process ignores SIGCHLD, its children vanish without their exit status.
  child_action_ = signal(SIGCHLD, SIG_DFL);
  sigset_t wanted = launcher_signals();
  if (!is_ignored(SIGTSTP)) sigaddset(&wanted, SIGTSTP);
  pthread_sigmask(SIG_BLOCK, &wanted, &before_);
  fd_ = signalfd(-1, &wanted, SFD_NONBLOCK | SFD_CLOEXEC);
  pipe_action_ = signal(SIGPIPE, SIG_IGN);
}

SignalReader::~SignalReader() {
  close(fd_);
  signal(SIGPIPE, pipe_action_);
  signal(SIGCHLD, child_action_);
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

int SignalReader::next() const {
  signalfd_siginfo info;
  while (read(fd_, &info, sizeof(info)) == sizeof(info)) {
    if (info.ssi_signo != SIGTSTP)
      return info.ssi_signo == SIGHUP ? SIGTERM : static_cast<int>(info.ssi_signo);
    if (around_stop) around_stop(true);
    sigset_t stop;
    sigemptyset(&stop);
    sigaddset(&stop, SIGTSTP);
    raise(SIGTSTP);
    pthread_sigmask(SIG_UNBLOCK, &stop, nullptr);  // the process stops here until SIGCONT
    pthread_sigmask(SIG_BLOCK, &stop, nullptr);
    if (around_stop) around_stop(false);
  }
  return 0;
}

bool SecondRequest::has_come(const SignalReader& signals) {
  while (const int signal = signals.next()) {
    if (!asks_for_end(signal)) continue;
    const auto now = Clock::now();
    if (!first_) first_ = now;
    has_come_ = has_come_ || now - *first_ >= kSameSignal;
  }
  return has_come_;
}

namespace {

namespace fs = std::filesystem;

uint64_t bit_of(int signal) { return uint64_t{1} << (signal - 1); }

/// Reads a mask of 16 hexadecimal digits; "" has no signals.
uint64_t signals_in(const std::string& mask) {
  uint64_t signals = 0;
  std::from_chars(mask.data(), mask.data() + mask.size(), signals, 16);
  return signals;
}

/// Whether these are all signals that can be blocked (the C library reserves some after the first 31). fork,
/// vfork and posix_spawn block all of them while a process starts another one, and no one reads a signal that
/// arrives then.
bool are_all(uint64_t blocked) {
  const uint64_t all = bit_of(32) - 1 - bit_of(SIGKILL) - bit_of(SIGSTOP);
  return (blocked & all) == all;
}

std::optional<pid_t> number_of(const std::string& name) {
  pid_t pid = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), pid);
  if (error != std::errc() || end != name.data() + name.size()) return std::nullopt;
  return pid;
}

}  // namespace

bool takes(pid_t pid, int signal) {
  const std::string process = std::to_string(pid);
  if (signals_in(status_field(process, "SigCgt")) & bit_of(signal)) return true;
  const uint64_t blocked = signals_in(status_field(process, "SigBlk"));
  return (blocked & bit_of(signal)) && !are_all(blocked);
}

// Looks through all processes, not the group's tree, to include those whose parent has ended.
int signal_takers(pid_t group, int signal) {
  int num_sent = 0;
  std::error_code error;
  const auto skip = fs::directory_options::skip_permission_denied;
  for (fs::directory_iterator at("/proc", skip, error), end; !error && at != end; at.increment(error)) {
    const auto pid = number_of(at->path().filename().string());
    if (pid && getpgid(*pid) == group && takes(*pid, signal) && kill(*pid, signal) == 0) ++num_sent;
  }
  return num_sent;
}

}  // namespace titan::cli
