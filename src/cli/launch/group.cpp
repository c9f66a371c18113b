// [Note: who failed]
//   first   the rank whose end was seen first. A rank that a signal ended comes before ranks that ended with
//           an error: their exit codes may be complaints about it
//   hung    a rank that was stopped (SIGSTOP) when another one failed: the others' time limits ran out on it;
//           or a rank that had to be killed after another one gave up on its peers (dist::kHungExitCode): its
//           own watchdog is stuck with it, as in a frozen container or a system call that never returns
//   lost    the ranks whose places a next group shouldn't use: every rank killed by a signal that we didn't
//           send; if there is none, the hung ranks; if there is none, the first to fail
// Hangs of any other kind are for the program to detect (`titan train` has a watchdog on every rank) and show
// up here as exit codes.

#include "cli/launch/group.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <set>
#include <utility>

#include "core/process.h"
#include "titan/core/error.h"
#include "titan/guard/watchdog.h"
#include "train/policies/interruption.h"

namespace titan::cli {

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr size_t kTailLines = 50;
constexpr size_t kLongestLine = 64 * 1024;  // longer lines are shown in pieces, to bound memory

struct Child {
  pid_t pid = -1;
  int stdout_fd = -1;  ///< reading ends of its pipes, owned by the caller
  int stderr_fd = -1;
  int exec_errno = 0;  ///< not 0: the program couldn't be started; its process has ended
};

struct Pipe {
  Pipe() { TITAN_CHECK(pipe2(fds, O_CLOEXEC) == 0, "pipe: ", errno_text(errno)); }
  int take_reading_end() {
    close(fds[1]);
    return fds[0];
  }
  int fds[2];
};

/// The data of the child, allocated before the fork: between fork and exec nothing may allocate.
struct Prepared {
  Prepared(const std::vector<std::string>& command, const Variables& set, int inherited)
      : words(command), inherited_fd(inherited) {
    const std::set<std::string> unset = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
                                         "TORCHELASTIC_RESTART_COUNT", "TITAN_STORE_FD"};
    for (char** entry = environ; *entry; ++entry) {
      const std::string name(*entry, std::strcspn(*entry, "="));
      if (!set.contains(name) && !unset.contains(name)) texts.emplace_back(*entry);
    }
    for (const auto& [name, value] : set) texts.push_back(name + "=" + value);
    for (auto& text : texts) variables.push_back(text.data());
    variables.push_back(nullptr);
    for (auto& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
  }

  std::vector<std::string> words, texts;
  std::vector<char*> variables, arguments;
  int inherited_fd;  // stays open in the child
};

[[noreturn]] void run_child(const Prepared& prepared, pid_t parent, const Pipe& out, const Pipe& err,
                            const Pipe& status) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // the parent died before the line above
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  const int empty = open("/dev/null", O_RDONLY);
  dup2(empty, STDIN_FILENO);
  dup2(out.fds[1], STDOUT_FILENO);
  dup2(err.fds[1], STDERR_FILENO);
  if (prepared.inherited_fd >= 0) fcntl(prepared.inherited_fd, F_SETFD, 0);
  execvpe(prepared.arguments[0], prepared.arguments.data(), prepared.variables.data());
  const int error = errno;
  static_cast<void>(!write(status.fds[1], &error, sizeof(error)));
  _exit(127);
}

/// Starts the program in its own process group, with no signal blocked and empty standard input. It is killed
/// when this process ends. Throws Error when no process or pipe is available.
Child start_child(const Prepared& prepared) {
  Pipe out, err, status;
  const pid_t parent = getpid();
  const pid_t pid = fork();
  TITAN_CHECK(pid >= 0, "fork: ", errno_text(errno));
  if (pid == 0) run_child(prepared, parent, out, err, status);
  setpgid(pid, pid);  // here, too, so that a signal to the group reaches it right away
  Child child{pid, out.take_reading_end(), err.take_reading_end()};
  const int status_fd = status.take_reading_end();
  ssize_t n;
  // The status pipe closes when the program starts.
  while ((n = read(status_fd, &child.exec_errno, sizeof(child.exec_errno))) < 0 && errno == EINTR) {
  }
  close(status_fd);
  return child;
}

/// A socket that listens on a free port of 127.0.0.1, or of ::1 if there is no such address.
struct ListeningSocket {
  ListeningSocket() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    sockaddr_in6 address6{};
    address6.sin6_family = AF_INET6;
    address6.sin6_addr = in6addr_loopback;
    if (listen_at(&address)) {
      host = "127.0.0.1";
      port = ntohs(address.sin_port);
    } else {
      TITAN_CHECK(listen_at(&address6), "cannot listen on a port of 127.0.0.1 or ::1: ", errno_text(errno));
      host = "::1";
      port = ntohs(address6.sin6_port);
    }
  }
  ~ListeningSocket() {
    if (fd >= 0) close(fd);
  }
  ListeningSocket(const ListeningSocket&) = delete;
  ListeningSocket& operator=(const ListeningSocket&) = delete;

  int fd = -1;
  std::string host;
  int port = 0;

 private:
  template <class Address>
  bool listen_at(Address* address) {
    auto* generic = reinterpret_cast<sockaddr*>(address);
    socklen_t size = sizeof(*address);
    if (fd >= 0) close(fd);
    fd = socket(generic->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    return fd >= 0 && bind(fd, generic, size) == 0 && listen(fd, SOMAXCONN) == 0 &&
           getsockname(fd, generic, &size) == 0;
  }
};

// The number of cores that this process may use.
int num_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return std::max(1, CPU_COUNT(&cores));
}

/// The last lines of one rank, from both its streams, for the report of a failure.
struct Tail {
  void add(std::string_view line) {
    if (lines.size() == kTailLines) lines.pop_front();
    lines.emplace_back(line);
  }

  std::deque<std::string> lines;
};

/// One stream of one rank (the non-blocking reading end of a pipe), in whole lines. Owns the descriptor.
class OutputPipe {
 public:
  /// `target`: the descriptor to write tagged lines to; -1: only keep the tail.
  OutputPipe(int fd, int target, int rank, Tail& tail)
      : fd_(fd), target_(target), tag_(str("[rank ", rank, "] ")), tail_(&tail) {
    fcntl(fd_, F_SETFL, O_NONBLOCK);
  }

  ~OutputPipe() {
    if (fd_ >= 0) finish();
  }
  OutputPipe(const OutputPipe&) = delete;
  OutputPipe& operator=(const OutputPipe&) = delete;

  int fd() const { return fd_; }  ///< -1 after the end
  /// Passes on what is available now.
  void drain() {
    char buffer[16 * 1024];
    while (fd_ >= 0) {
      const ssize_t n = read(fd_, buffer, sizeof(buffer));
      if (n > 0) {
        take({buffer, static_cast<size_t>(n)});
      } else if (n == 0) {
        finish();
      } else if (errno != EINTR) {
        return;  // EAGAIN: everything that arrived has been read
      }
    }
  }

 private:
  void take(std::string_view bytes) {
    std::string shown;
    partial_ += bytes;
    size_t start = 0;
    for (size_t end;
         (end = partial_.find('\n', start)) != std::string::npos || partial_.size() - start > kLongestLine;) {
      if (end == std::string::npos) end = start + kLongestLine;
      const auto line = std::string_view(partial_).substr(start, end - start);
      tail_->add(line);
      shown.append(tag_).append(line).append("\n");
      start = end + (partial_[end] == '\n');
    }
    partial_.erase(0, start);
    if (target_ >= 0 && !shown.empty()) write_all(target_, shown);
  }

  void finish() {
    if (!partial_.empty()) take("\n");
    close(fd_);
    fd_ = -1;
  }

  int fd_;
  int target_;
  std::string tag_;
  std::string partial_;  // an incomplete line
  Tail* tail_;
};

/// Between SIGTERM to the ranks that are left after a failure and their SIGKILL: time to report what they
/// saw.
constexpr seconds kFailureGrace = dist::kExplainsWithin + seconds(1);
static_assert(kFailureGrace < dist::kJobEndsWithin);
/// The time that the other ranks get when one fails after a request to end.
constexpr auto kStopAfterFailure = seconds(30);
/// The time that ranks that give up on a peer take to end, each by its own watchdog: the last one hears of
/// the verdict a second after the first, and then reports.
constexpr auto kWatchdogsEnd = dist::kHangEndsWithin + seconds(2);
/// After this time a process that SIGKILL hasn't ended is reported.
constexpr auto kDying = seconds(5);

bool failed(int status) { return !WIFEXITED(status) || WEXITSTATUS(status) != 0; }

std::string describe(int status) {
  if (WIFEXITED(status)) return str("exit code ", WEXITSTATUS(status));
  return str("killed by signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)), ")",
             WCOREDUMP(status) ? ", core dumped" : "");
}

/// Whether its watchdog gave up on a peer.
bool gave_up(int status) { return WIFEXITED(status) && WEXITSTATUS(status) == dist::kHungExitCode; }

/// True for signals that point to this rank itself (SIGKILL, SIGSEGV, ...), not to a peer or a stop of the
/// whole job.
bool is_own_end(int status) {
  if (!WIFSIGNALED(status)) return false;
  const int signal = WTERMSIG(status);
  return signal == SIGKILL || signal == SIGSEGV || signal == SIGBUS || signal == SIGILL || signal == SIGFPE;
}

using Clock = std::chrono::steady_clock;

/// A group while it runs.
class RankGroup {
 public:
  RankGroup(int num_ranks, GroupOptions options, SignalReader& signals)
      : options_(std::move(options)), signals_(signals), ranks_(num_ranks), grow_at_(options_.next_growth()) {
    signals_.around_stop = [this](bool stops) { stops ? stop_ranks() : continue_ranks(); };
  }

  /// Kills ranks that still run, which happens only after an exception.
  ~RankGroup() {
    signals_.around_stop = nullptr;
    signal_all(SIGKILL);
    for (auto& rank : ranks_) {
      if (rank.running) waitpid(rank.pid, nullptr, 0);
    }
  }

  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  GroupEnd run() {
    {
      const ListeningSocket store;
      bool all_started = true;
      for (int rank = 0; rank < static_cast<int>(ranks_.size()) && all_started; ++rank)
        all_started = start(rank, store);
      if (!all_started) signal_all(SIGKILL);
    }  // from here on only rank 0 listens: the others notice at once if it ends
    while (std::ranges::any_of(ranks_, &Rank::running)) poll_once();
    end_leftovers();
    for (auto& pipe : pipes_) pipe.drain();
    GroupEnd end{.kind = kind(),
                 .stop_signal = stop_signal_,
                 .stop_requested_at = stop_requested_at_,
                 .stop_requested_twice = stop_requested_twice_,
                 .start_error = start_error_,
                 .ended_badly = ended_badly(),
                 .run_time = Clock::now() - started_};
    if (first_failed_ < 0) return end;
    end.has_failed = true;
    end.exit_code = exit_code();
    for (int rank : lost()) end.lost.push_back({rank, how_lost(rank)});
    end.report = report();
    return end;
  }

 private:
  struct Rank {
    pid_t pid = -1;
    bool running = false;
    bool stopped = false;        // by SIGSTOP or the like, and not continued
    const char* hung = nullptr;  // how it hung when another rank failed
    bool killed = false;         // by us, as hung ranks are
    int status = 0;              // from waitpid
    Tail tail;
  };

  bool start(int rank, const ListeningSocket& store) {
    Child child;
    try {
      child = start_child({options_.job.command, variables_of(rank, store), rank == 0 ? store.fd : -1});
    } catch (const Error& error) {
      start_error_ = error.what();
      return false;
    }
    ranks_[rank].pid = child.pid;
    ranks_[rank].running = true;
    const bool shown = options_.shown.contains(rank);
    pipes_.emplace_back(child.stdout_fd, shown ? STDOUT_FILENO : -1, rank, ranks_[rank].tail);
    pipes_.emplace_back(child.stderr_fd, shown ? STDERR_FILENO : -1, rank, ranks_[rank].tail);
    if (child.exec_errno != 0) start_error_ = errno_text(child.exec_errno);
    return child.exec_errno == 0;
  }

  Variables variables_of(int rank, const ListeningSocket& store) const {
    const int num_ranks = static_cast<int>(ranks_.size());
    Variables variables = options_.variables;
    variables.insert({{"RANK", std::to_string(rank)},
                      {"WORLD_SIZE", std::to_string(num_ranks)},
                      {"LOCAL_RANK", std::to_string(rank)},
                      {"LOCAL_WORLD_SIZE", std::to_string(num_ranks)},
                      {"MASTER_ADDR", store.host},
                      {"MASTER_PORT", std::to_string(store.port)},
                      {"TITAN_LAUNCH", "1"}});
    if (rank == 0) variables["TITAN_STORE_FD"] = std::to_string(store.fd);
    if (!std::getenv("OMP_NUM_THREADS")) {
      variables["OMP_NUM_THREADS"] = std::to_string(std::max(1, num_cores() / options_.job.num_ranks));
    }
    // The ranks write to pipes, but their output ends up on a terminal.
    if (isatty(STDOUT_FILENO) && !std::getenv("NO_COLOR")) variables["FORCE_COLOR"] = "1";
    return variables;
  }

  void poll_once() {
    std::vector<pollfd> ready = {{signals_.fd(), POLLIN, 0}};
    for (const auto& pipe : pipes_) ready.push_back({pipe.fd(), POLLIN, 0});  // negative ones are skipped
    poll(ready.data(), ready.size(), wait_ms());
    for (size_t i = 0; i < pipes_.size(); ++i) {
      if (ready[i + 1].revents) pipes_[i].drain();
    }
    while (const int signal = signals_.next()) handle(signal);
    look_at_clock();
  }

  int wait_ms() const {
    const auto next = kill_at_ ? kill_at_ : grow_at_;
    if (!next) return -1;
    const auto left = std::chrono::duration_cast<milliseconds>(*next - Clock::now()).count();
    return static_cast<int>(std::clamp<int64_t>(left + 1, 0, 3'600'000));
  }

  void look_at_clock() {
    const auto now = Clock::now();
    if (kill_at_ && now >= *kill_at_) {
      if (!killed_at_) {
        killed_at_ = now;
        end_hung();
      }
      for (auto& rank : ranks_) rank.killed |= rank.running;
      signal_all(SIGKILL);
      if (now >= *killed_at_ + kDying) report_undying();
      kill_at_ = now + seconds(1);
    } else if (!kill_at_ && grow_at_ && now >= *grow_at_) {
      outgrown_ = true;
      send_note(train::kGroupGrows);
      tell_ranks(SIGTERM);
    }
  }

  void reap() {
    int failed_now = -1;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      if (!reap(ranks_[i])) continue;
      const int status = ranks_[i].status;
      // If several fail at once, a rank that a signal ended is the cause.
      if (failed(status) && (failed_now < 0 || WIFSIGNALED(status))) failed_now = static_cast<int>(i);
    }
    if (failed_now >= 0) note_failure(failed_now);
  }

  bool reap(Rank& rank) {
    int status = 0;
    while (rank.running && waitpid(rank.pid, &status, WNOHANG | WUNTRACED | WCONTINUED) == rank.pid) {
      rank.stopped = WIFSTOPPED(status);
      if (asked_to_save_) continue_if_stopped(rank);
      if (!WIFEXITED(status) && !WIFSIGNALED(status)) continue;
      rank.status = status;
      rank.running = false;
      return true;
    }
    return false;
  }

  void note_failure(int rank) {
    if (first_failed_ >= 0 && is_cause_of_first(ranks_[rank])) first_failed_ = rank;
    if (first_failed_ >= 0 || killed_at_) return;
    first_failed_ = rank;
    failed_after_ = Clock::now() - started_;
    // Ranks that were asked to end may be waiting for this one.
    if (kill_at_) {
      kill_at_ = std::min(*kill_at_, Clock::now() + kStopAfterFailure);
      return;
    }
    const bool hung = gave_up(ranks_[rank].status);
    kill_at_ = Clock::now() + (hung ? std::max(kFailureGrace, kWatchdogsEnd) : kFailureGrace);
    // Only the ranks get the reason, not the processes that they have started.
    send_note(train::kPeerHasFailed);
    signal_all(SIGTERM);
    end_stopped();
  }

  // Peers may notice a killed rank, and fail, before waitpid() reports it here.
  bool is_cause_of_first(const Rank& rank) const {
    return !rank.killed && WIFEXITED(ranks_[first_failed_].status) && WIFSIGNALED(rank.status) &&
           WTERMSIG(rank.status) != SIGTERM;
  }

  void handle(int signal) {
    if (signal == SIGCHLD) return reap();
    if (asks_for_end(signal)) return ask_for_end(signal);
    if (signal == SIGQUIT) return ask_for_reports();
    options_.on_rejoin();
    grow_at_ = options_.next_growth();
  }

  void signal_all(int signal) {
    for (const auto& rank : ranks_) {
      if (rank.running) kill(-rank.pid, signal);
    }
  }

  // Ctrl-Z. The ranks' watchdogs don't count the time in which all of them stand still.
  void stop_ranks() {
    stopped_at_ = Clock::now();
    signal_all(SIGSTOP);
  }
  void continue_ranks() {
    signal_all(SIGCONT);
    const auto pause = Clock::now() - stopped_at_;
    for (auto* time : {&kill_at_, &killed_at_})
      if (*time) **time += pause;
    started_ += pause;
    stop_requested_at_ += pause;
  }

  // Ranks report what they are doing; nothing ends.
  void ask_for_reports() {
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      if (ranks_[rank].running && signal_takers(ranks_[rank].pid, SIGQUIT) == 0)
        tell("rank ", rank, " has no handler for SIGQUIT (yet): not sent");
  }

  void ask_for_end(int signal) {
    if (stop_signal_ == 0) {
      stop_signal_ = signal;
      stop_requested_at_ = Clock::now();
      return tell_ranks(signal);
    }
    if (Clock::now() - stop_requested_at_ < kSameSignal) return;
    stop_requested_twice_ = true;
    signal_all(SIGKILL);
  }

  void tell_ranks(int signal) {
    if (!kill_at_) kill_at_ = Clock::now() + options_.job.stop_grace;
    signal_all(signal);
    asked_to_save_ = true;
    reap();
    for (auto& rank : ranks_) continue_if_stopped(rank);
  }

  /// Sends SIGTERM with a note (interruption.h).
  void send_note(int note) {
    for (const auto& rank : ranks_)
      if (rank.running) sigqueue(rank.pid, SIGTERM, {.sival_int = note});
  }

  // A rank that somebody stopped could neither save nor let its peers save.
  void continue_if_stopped(Rank& rank) {
    if (!rank.running || !rank.stopped || first_failed_ >= 0) return;
    tell("rank ", &rank - ranks_.data(), " (pid ", rank.pid,
         ") was stopped by a signal; continuing it, so that the run can end");
    kill(-rank.pid, SIGCONT);
    rank.stopped = false;
  }

  // A stopped process doesn't react to SIGTERM.
  void end_stopped() {
    for (auto& rank : ranks_) {
      if (!rank.running || !rank.stopped) continue;
      rank.hung = "it was stopped when another failed";
      rank.killed = true;
      kill(-rank.pid, SIGKILL);
    }
  }

  // Called at the end of the grace period.
  void end_hung() {
    if (first_failed_ < 0 || !gave_up(ranks_[first_failed_].status)) return;
    for (auto& rank : ranks_)
      if (rank.running && !rank.hung) rank.hung = "it didn't end when another gave up on its peers";
  }

  // A killed process may be in state D (a file system, a driver), or held by a debugger. Nothing is started
  // while it exists.
  void report_undying() {
    if (std::exchange(reported_undying_, true)) return;
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      if (ranks_[rank].running)
        tell("rank ", rank, " (pid ", ranks_[rank].pid, ", state ", process_state(ranks_[rank].pid),
             ") doesn't end although it was killed; waiting for it");
  }

  // Ends processes that a rank started and that outlived it.
  void end_leftovers() const {
    if (!kill_at_) return;
    for (const auto& rank : ranks_) {
      if (rank.pid > 0) kill(-rank.pid, SIGKILL);
    }
  }

  GroupEnd::Kind kind() const {
    if (!start_error_.empty()) return GroupEnd::Kind::CantStart;
    if (stop_signal_ != 0) return ended_badly().empty() ? GroupEnd::Kind::Done : GroupEnd::Kind::Stopped;
    if (outgrown_) return GroupEnd::Kind::Outgrown;
    return first_failed_ >= 0 ? GroupEnd::Kind::Failed : GroupEnd::Kind::Done;
  }

  int exit_code() const {
    const int status = ranks_[first_failed_].status;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  std::vector<int> lost() const {
    std::vector<int> own, hung;
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
      const bool is_first = rank == first_failed_ && WIFSIGNALED(ranks_[rank].status);
      if (ranks_[rank].hung) hung.push_back(rank);
      if (!ranks_[rank].killed && (is_first || is_own_end(ranks_[rank].status))) own.push_back(rank);
    }
    if (!own.empty()) return own;
    return hung.empty() ? std::vector<int>{first_failed_} : hung;
  }

  std::string how_lost(int rank) const {
    return ranks_[rank].hung ? str("hung: ", ranks_[rank].hung) : describe(ranks_[rank].status);
  }

  std::string ended_badly() const {
    std::string text;
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      if (failed(ranks_[rank].status))
        text += str(text.empty() ? "" : ", ", "rank ", rank, " (",
                    ranks_[rank].killed ? "it was killed because it didn't end in time"
                                        : describe(ranks_[rank].status),
                    ")");
    return text;
  }

  std::string report() const {
    const std::string thick(78, '='), thin(78, '-');
    const Rank& rank = ranks_[first_failed_];
    std::string text = str("\n", thick, "\nrank ", first_failed_, " of ", ranks_.size(),
                           " failed first: ", describe(rank.status), ", after ",
                           static_cast<int>(failed_after_.count() * 10) / 10.0, " s (pid ", rank.pid, ")\n");
    for (int other : lost())
      if (ranks_[other].hung)
        text += str("rank ", other, " ", how_lost(other), " (pid ", ranks_[other].pid, ")\n");
    if (!rank.tail.lines.empty() && options_.shown.contains(first_failed_))
      return text + str("its last lines are above, after [rank ", first_failed_, "]\n") + thick + "\n";
    text += thin + (rank.tail.lines.empty() ? "\nIt printed nothing.\n" : "\nIts last lines:\n");
    for (const auto& line : rank.tail.lines) text += "  " + line + "\n";
    return text + thick + "\n";
  }

  GroupOptions options_;
  SignalReader& signals_;
  std::vector<Rank> ranks_;
  std::deque<OutputPipe> pipes_;  // they don't move
  Clock::time_point started_ = Clock::now();
  std::optional<Clock::time_point> kill_at_;    // set when the ranks are asked to end
  std::optional<Clock::time_point> killed_at_;  // when they were first killed
  std::optional<Clock::time_point> grow_at_;
  int first_failed_ = -1;
  std::chrono::duration<double> failed_after_{};
  bool outgrown_ = false;
  bool asked_to_save_ = false;  // all ranks have been asked to save and end
  int stop_signal_ = 0;
  Clock::time_point stop_requested_at_{};
  Clock::time_point stopped_at_{};  // by Ctrl-Z
  bool stop_requested_twice_ = false;
  bool reported_undying_ = false;
  std::string start_error_;
};

}  // namespace

GroupEnd run_group(int num_ranks, GroupOptions options, SignalReader& signals) {
  return RankGroup(num_ranks, std::move(options), signals).run();
}

}  // namespace titan::cli
