// The local launcher: one loop over the ranks' pipes and the signals of this process (a signalfd, so that a
// child's end, a Ctrl-C and a line of output all come through one poll).

#include "titan/cli/launch.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "launch_output.h"
#include "launch_process.h"
#include "titan/core/error.h"

namespace titan::cli {
namespace {

using Clock = std::chrono::steady_clock;

/// Turns the signals that matter into reads of a descriptor for the life of the object.
class SignalReader {
 public:
  SignalReader() {
    sigset_t wanted;
    sigemptyset(&wanted);
    for (int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) sigaddset(&wanted, signal);
    pthread_sigmask(SIG_BLOCK, &wanted, &before_);
    fd_ = signalfd(-1, &wanted, SFD_NONBLOCK | SFD_CLOEXEC);
    pipe_action_ = signal(SIGPIPE, SIG_IGN);
  }
  ~SignalReader() {
    close(fd_);
    signal(SIGPIPE, pipe_action_);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SignalReader(const SignalReader&) = delete;
  SignalReader& operator=(const SignalReader&) = delete;

  int fd() const { return fd_; }
  /// The next signal, 0 when there is none.
  int next() const {
    signalfd_siginfo info;
    return read(fd_, &info, sizeof(info)) == sizeof(info) ? static_cast<int>(info.ssi_signo) : 0;
  }

 private:
  int fd_ = -1;
  sigset_t before_{};
  sighandler_t pipe_action_ = SIG_DFL;
};

struct Rank {
  pid_t pid = -1;
  bool running = false;
  int status = 0;  // as waitpid tells it
  Tail tail;
};

bool failed(int status) { return !WIFEXITED(status) || WEXITSTATUS(status) != 0; }

int exit_code(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status); }

std::string describe(int status) {
  if (WIFEXITED(status)) return str("exit code ", WEXITSTATUS(status));
  return str("killed by signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)), ")",
             WCOREDUMP(status) ? ", core dumped" : "");
}

class Job {
 public:
  explicit Job(const LaunchOptions& options)
      : options_(options), shown_(options.log_rank, options.num_ranks), ranks_(options.num_ranks) {}
  ~Job();

  int run();

 private:
  bool start(int rank, const ListeningSocket& store);
  void poll_once();
  void reap();
  void handle(int signal);
  void signal_all(int signal);
  void end_others(int signal);
  int num_running() const;
  void end_leftovers() const;
  void drain();
  void report() const;

  const LaunchOptions& options_;
  ShownRanks shown_;
  SignalReader signals_;
  std::vector<Rank> ranks_;
  std::vector<OutputPipe> pipes_;
  Clock::time_point started_ = Clock::now();
  std::optional<Clock::time_point> kill_at_;  // set once the ranks were asked to end
  int first_failed_ = -1;
  std::chrono::duration<double> failed_after_{};
  int told_to_end_ = 0;  // the signal
  int exec_errno_ = 0;
};

Job::~Job() {
  // Only an exception leaves ranks running.
  signal_all(SIGKILL);
  for (auto& rank : ranks_) {
    if (rank.running) waitpid(rank.pid, nullptr, 0);
  }
}

Variables variables_of(int rank, int num_ranks, const ListeningSocket& store) {
  Variables variables = {{"RANK", std::to_string(rank)},
                         {"WORLD_SIZE", std::to_string(num_ranks)},
                         {"LOCAL_RANK", std::to_string(rank)},
                         {"LOCAL_WORLD_SIZE", std::to_string(num_ranks)},
                         {"MASTER_ADDR", "127.0.0.1"},
                         {"MASTER_PORT", std::to_string(store.port)},
                         {"TITAN_LAUNCH", "1"}};
  if (rank == 0) variables["TITAN_STORE_FD"] = std::to_string(store.fd);
  if (!std::getenv("OMP_NUM_THREADS")) {
    variables["OMP_NUM_THREADS"] = std::to_string(std::max(1, num_cores() / num_ranks));
  }
  // The ranks write to pipes; what they print still ends on a terminal.
  if (isatty(STDOUT_FILENO) && !std::getenv("NO_COLOR")) variables["FORCE_COLOR"] = "1";
  return variables;
}

bool Job::start(int rank, const ListeningSocket& store) {
  const ChildSpec spec{.command = options_.command,
                       .set = variables_of(rank, options_.num_ranks, store),
                       .unset = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
                                 "TORCHELASTIC_RESTART_COUNT", "TITAN_STORE_FD"},
                       .inherited_fd = rank == 0 ? store.fd : -1};
  const Child child = start_child(spec);
  ranks_[rank].pid = child.pid;
  ranks_[rank].running = true;
  const bool shown = shown_.contains(rank);
  pipes_.emplace_back(child.stdout_fd, shown ? STDOUT_FILENO : -1, rank, ranks_[rank].tail);
  pipes_.emplace_back(child.stderr_fd, shown ? STDERR_FILENO : -1, rank, ranks_[rank].tail);
  exec_errno_ = child.exec_errno;
  return exec_errno_ == 0;
}

int Job::num_running() const {
  return static_cast<int>(
      std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.running; }));
}

void Job::signal_all(int signal) {
  for (const auto& rank : ranks_) {
    if (rank.running) kill(-rank.pid, signal);
  }
}

void Job::end_others(int signal) {
  if (kill_at_) return;
  kill_at_ = Clock::now() + options_.grace;
  signal_all(signal);
}

void Job::handle(int signal) {
  if (signal == SIGCHLD) return reap();
  if (told_to_end_ != 0) return signal_all(SIGKILL);  // asked twice
  told_to_end_ = signal;
  end_others(signal);
}

void Job::reap() {
  int failed_now = -1;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    if (!rank.running || waitpid(rank.pid, &rank.status, WNOHANG) != rank.pid) continue;
    rank.running = false;
    // Of several at once, one that a signal ended is the cause: an exit code may be a peer's complaint about
    // it.
    if (failed(rank.status) && (failed_now < 0 || WIFSIGNALED(rank.status))) failed_now = static_cast<int>(i);
  }
  if (failed_now < 0 || first_failed_ >= 0 || kill_at_) return;
  first_failed_ = failed_now;
  failed_after_ = Clock::now() - started_;
  end_others(SIGTERM);
}

void Job::drain() {
  for (auto& pipe : pipes_) pipe.drain();
}

void Job::poll_once() {
  std::vector<pollfd> ready = {{signals_.fd(), POLLIN, 0}};
  for (const auto& pipe : pipes_) ready.push_back({pipe.fd(), POLLIN, 0});  // negative ones are skipped
  int wait_ms = -1;
  if (kill_at_) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(*kill_at_ - Clock::now());
    wait_ms = static_cast<int>(std::max<int64_t>(left.count() + 1, 0));
  }
  poll(ready.data(), ready.size(), wait_ms);
  for (size_t i = 0; i < pipes_.size(); ++i) {
    if (ready[i + 1].revents) pipes_[i].drain();
  }
  while (const int signal = signals_.next()) handle(signal);
  if (kill_at_ && Clock::now() >= *kill_at_) {
    signal_all(SIGKILL);
    kill_at_ = Clock::now() + std::chrono::seconds(1);
  }
}

int Job::run() {
  {
    const ListeningSocket store;
    bool all_started = true;
    for (int rank = 0; rank < options_.num_ranks && all_started; ++rank) all_started = start(rank, store);
    if (!all_started) signal_all(SIGKILL);
  }  // from here on only rank 0 listens: the others notice at once if it goes
  while (num_running() > 0) poll_once();
  end_leftovers();
  drain();
  if (exec_errno_ != 0) {
    write_all(STDERR_FILENO, str("titan launch: can't start '", options_.command[0],
                                 "': ", std::strerror(exec_errno_), "\n"));
    return 127;
  }
  if (told_to_end_ != 0) return 128 + told_to_end_;
  if (first_failed_ < 0) return 0;
  report();
  return exit_code(ranks_[first_failed_].status);
}

/// After a failure: processes that a rank had started and that outlived it.
void Job::end_leftovers() const {
  if (!kill_at_) return;
  for (const auto& rank : ranks_) {
    if (rank.pid > 0) kill(-rank.pid, SIGKILL);
  }
}

void Job::report() const {
  const std::string thick(78, '='), thin(78, '-');
  const Rank& rank = ranks_[first_failed_];
  std::string text =
      str("\n", thick, "\nrank ", first_failed_, " of ", options_.num_ranks,
          " failed first: ", describe(rank.status), ", after ",
          static_cast<int>(failed_after_.count() * 10) / 10.0, " s (pid ", rank.pid, ")\n", thin, "\n");
  if (rank.tail.lines().empty())
    text += "It printed nothing.\n";
  else
    text += "Its last lines:\n";
  for (const auto& line : rank.tail.lines()) text += "  " + line + "\n";
  write_all(STDERR_FILENO, text + thick + "\n");
}

}  // namespace

int launch_local(const LaunchOptions& options) {
  if (options.num_ranks < 1)
    throw ConfigError(str("the number of ranks is ", options.num_ranks, "; allowed: 1 and above"));
  if (options.command.empty()) throw ConfigError("no program to launch");
  return Job(options).run();
}

}  // namespace titan::cli
