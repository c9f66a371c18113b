#include "launch_signals.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <initializer_list>

namespace titan::cli {

bool is_ignored(int signal) {
  struct sigaction action {};
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

bool asks_for_end(int signal) { return signal != SIGCHLD && signal != SIGUSR2 && signal != SIGQUIT; }

SignalReader::SignalReader() {
  // Children of a process that ignores their ends vanish, and nobody hears how they ended.
  child_action_ = signal(SIGCHLD, SIG_DFL);
  sigset_t wanted;
  sigemptyset(&wanted);
  sigaddset(&wanted, SIGCHLD);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2})
    if (!is_ignored(signal)) sigaddset(&wanted, signal);
  sigaddset(&wanted, SIGQUIT);
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
  if (read(fd_, &info, sizeof(info)) != sizeof(info)) return 0;
  return info.ssi_signo == SIGHUP ? SIGTERM : static_cast<int>(info.ssi_signo);
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

}  // namespace titan::cli
