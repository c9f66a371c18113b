#pragma once

// One rank's process, at the level of the operating system.

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

namespace titan::cli {

/// Variables of a child, on top of this process's.
using Variables = std::map<std::string, std::string>;

struct ChildSpec {
  std::vector<std::string> command;
  Variables set;
  std::vector<std::string> unset;
  int inherited_fd = -1;  ///< stays open in the child
};

struct Child {
  pid_t pid = -1;
  int stdout_fd = -1;  ///< reading ends of its pipes, owned by the caller
  int stderr_fd = -1;
  int exec_errno = 0;  ///< not 0: the program couldn't be started, and its process has ended
};

/// Starts the program in a process group of its own, with no signal blocked; it is killed when the calling
/// thread's process ends. Standard input is empty. Throws Error where there is no process or pipe to be had.
Child start_child(const ChildSpec& spec);

/// A socket that listens on a free port of 127.0.0.1, or where there is no such address of ::1.
struct ListeningSocket {
  ListeningSocket();  ///< throws Error
  ~ListeningSocket();
  ListeningSocket(const ListeningSocket&) = delete;
  ListeningSocket& operator=(const ListeningSocket&) = delete;
  int fd = -1;
  std::string host;
  int port = 0;

 private:
  template <class Address>
  bool listen_at(Address* address);
};

/// As /proc has it: "D (disk sleep)"; "unknown" where there is no such process.
std::string process_state(pid_t pid);

/// Cores that this process may run on.
int num_cores();

}  // namespace titan::cli
