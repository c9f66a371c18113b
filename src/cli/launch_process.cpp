#include "launch_process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

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

/// What the child needs, made before the fork: between fork and exec nothing may allocate.
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
  if (getppid() != parent) _exit(1);  // it died before the line above
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
  setpgid(pid, pid);  // also here, so that a signal to the group right now meets it
  Child child{pid, out.take_reading_end(), err.take_reading_end()};
  const int status_fd = status.take_reading_end();
  ssize_t n;
  // The status pipe closes by itself when the program starts.
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
    TITAN_CHECK(listen_at(&address6), "can't listen on a port of 127.0.0.1 or ::1: ", std::strerror(errno));
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

std::string process_state(pid_t pid) {
  std::ifstream status(str("/proc/", pid, "/status"));
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("State:\t")) return line.substr(7);
  return "unknown";
}

int num_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return std::max(1, CPU_COUNT(&cores));
}

}  // namespace titan::cli
