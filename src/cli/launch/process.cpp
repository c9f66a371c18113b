#include "cli/launch/process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <optional>
#include <string>

#include "titan/core/error.h"

namespace titan::cli {

namespace {

struct Pipe {
  Pipe() { TITAN_CHECK(pipe2(fds, O_CLOEXEC) == 0, "pipe: ", std::strerror(errno)); }
  int take_reading_end() {
    close(fds[1]);
    return fds[0];
  }
  int fds[2];
};

/// The data of the child, allocated before the fork: between fork and exec nothing may allocate.
struct Prepared {
  explicit Prepared(const ChildSpec& spec) : inherited_fd(spec.inherited_fd) {
    for (char** entry = environ; *entry; ++entry) {
      const std::string name(*entry, std::strcspn(*entry, "="));
      const bool dropped = spec.set.count(name) || std::count(spec.unset.begin(), spec.unset.end(), name);
      if (!dropped) texts.emplace_back(*entry);
    }
    for (const auto& [name, value] : spec.set) texts.push_back(name + "=" + value);
    for (auto& text : texts) variables.push_back(text.data());
    variables.push_back(nullptr);
    words = spec.command;
    for (auto& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
  }

  std::vector<std::string> texts, words;
  std::vector<char*> variables, arguments;
  int inherited_fd;
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

}  // namespace

Child start_child(const ChildSpec& spec) {
  const Prepared prepared(spec);
  Pipe out, err, status;
  const pid_t parent = getpid();
  const pid_t pid = fork();
  TITAN_CHECK(pid >= 0, "fork: ", std::strerror(errno));
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

ListeningSocket::ListeningSocket() {
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
    TITAN_CHECK(listen_at(&address6), "cannot listen on a port of 127.0.0.1 or ::1: ", std::strerror(errno));
    host = "::1";
    port = ntohs(address6.sin6_port);
  }
}

template <class Address>
bool ListeningSocket::listen_at(Address* address) {
  auto* generic = reinterpret_cast<sockaddr*>(address);
  socklen_t size = sizeof(*address);
  if (fd >= 0) close(fd);
  fd = socket(generic->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  return fd >= 0 && bind(fd, generic, size) == 0 && listen(fd, SOMAXCONN) == 0 &&
         getsockname(fd, generic, &size) == 0;
}

ListeningSocket::~ListeningSocket() {
  if (fd >= 0) close(fd);
}

namespace {

/// The value of "NAME:" in a process's status.
std::optional<std::string> status_field(pid_t pid, const std::string& name) {
  std::ifstream file(str("/proc/", pid, "/status"));
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(name + ":")) continue;
    const size_t start = line.find_first_not_of(" \t", name.size() + 1);
    return start == std::string::npos ? std::string() : line.substr(start);
  }
  return std::nullopt;
}

}  // namespace

std::string process_state(pid_t pid) { return status_field(pid, "State").value_or("unknown"); }

int num_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return std::max(1, CPU_COUNT(&cores));
}

namespace {

constexpr size_t kTailLines = 50;
constexpr size_t kLongestLine = 64 * 1024;  // longer lines are shown in pieces, to bound memory

int parse_rank(std::string_view text, int num_ranks) {
  int rank = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || rank < 0 ||
      rank >= num_ranks) {
    throw ConfigError(
        str("--log-rank: '", text, "' isn't a rank from 0 to ", num_ranks - 1, ", 'all' or 'none'"));
  }
  return rank;
}

}  // namespace

ShownRanks::ShownRanks(const std::string& text, int num_ranks) : all_(text == "all") {
  if (all_ || text == "none") return;
  size_t start = 0;
  while (start <= text.size()) {
    const size_t comma = std::min(text.find(',', start), text.size());
    ranks_.insert(parse_rank(std::string_view(text).substr(start, comma - start), num_ranks));
    start = comma + 1;
  }
}

void Tail::add(std::string_view line) {
  if (lines_.size() == kTailLines) lines_.pop_front();
  lines_.emplace_back(line);
}

OutputPipe::OutputPipe(int fd, int target, int rank, Tail& tail)
    : fd_(fd), target_(target), tag_(str("[rank ", rank, "] ")), tail_(&tail) {
  fcntl(fd_, F_SETFL, O_NONBLOCK);
}

OutputPipe::OutputPipe(OutputPipe&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      target_(other.target_),
      tag_(std::move(other.tag_)),
      partial_(std::move(other.partial_)),
      tail_(other.tail_) {}

OutputPipe::~OutputPipe() {
  if (fd_ >= 0) finish();
}

void OutputPipe::drain() {
  char buffer[16 * 1024];
  while (fd_ >= 0) {
    const ssize_t n = read(fd_, buffer, sizeof(buffer));
    if (n > 0) {
      take({buffer, static_cast<size_t>(n)});
    } else if (n == 0) {
      finish();
    } else if (errno != EINTR) {
      return;  // EAGAIN: nothing more for now
    }
  }
}

void OutputPipe::take(std::string_view bytes) {
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

void OutputPipe::finish() {
  if (!partial_.empty()) take("\n");
  close(fd_);
  fd_ = -1;
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
  const sigset_t wanted = launcher_signals();
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

namespace {

namespace fs = std::filesystem;

uint64_t bit_of(int signal) { return uint64_t{1} << (signal - 1); }

/// Reads a mask of 16 hexadecimal digits; no signals without a mask.
uint64_t signals_in(const std::optional<std::string>& mask) {
  uint64_t signals = 0;
  if (mask) std::from_chars(mask->data(), mask->data() + mask->size(), signals, 16);
  return signals;
}

/// Whether these are all signals that can be blocked (the C library reserves some after the first 31). fork,
/// vfork and posix_spawn block all of them while a process starts another one, and nobody reads a signal that
/// comes then.
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
  if (signals_in(status_field(pid, "SigCgt")) & bit_of(signal)) return true;
  const uint64_t blocked = signals_in(status_field(pid, "SigBlk"));
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
