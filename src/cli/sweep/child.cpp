#include "cli/sweep/child.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "cli/launch_signals.h"
#include "titan/core/error.h"

namespace titan::cli::sweep {

namespace {

[[noreturn]] void become(const std::vector<std::string>& command, const HeldSignals& signals, pid_t parent) {
  std::vector<char*> words;
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  setpgid(0, 0);  // a Ctrl-C of the terminal comes by us, once
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::signal(SIGQUIT, SIG_IGN);  // until `titan train` takes it: it would end its start
  signals.restore();
  if (getppid() == parent) execv(words.front(), words.data());
  _exit(127);
}

}  // namespace

HeldSignals::HeldSignals() {
  sigemptyset(&set_);
  for (int signal : {SIGCHLD, SIGQUIT}) sigaddset(&set_, signal);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2})
    if (!is_ignored(signal)) sigaddset(&set_, signal);
  pthread_sigmask(SIG_BLOCK, &set_, &before_);
}

HeldSignals::~HeldSignals() { restore(); }

void HeldSignals::restore() const { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

int HeldSignals::wait() const {
  int signal = 0;
  sigwait(&set_, &signal);
  return signal;
}

// A child that has been waited for may have left its SIGCHLD.
std::optional<int> HeldSignals::pending() const {
  const timespec at_once{};
  for (int signal; (signal = sigtimedwait(&set_, nullptr, &at_once)) > 0;)
    if (signal != SIGCHLD && signal != SIGQUIT) return signal;
  return std::nullopt;
}

ChildEnd run_child(const std::vector<std::string>& command, const HeldSignals& signals) {
  const pid_t parent = getpid(), pid = fork();
  TITAN_CHECK(pid >= 0, "can't start ", command.front(), ": ", std::strerror(errno));
  if (pid == 0) become(command, signals, parent);
  ChildEnd end;
  for (int status = 0;;) {
    if (waitpid(pid, &status, WNOHANG) == pid) {
      end.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      return end;
    }
    const int signal = signals.wait();
    if (signal == SIGCHLD) continue;
    if (signal != SIGQUIT) end.told_to_end = signal;
    kill(pid, signal);
  }
}

}  // namespace titan::cli::sweep
