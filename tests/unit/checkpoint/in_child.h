#pragma once

// Runs a part of a test in a child process: to be killed, to hold a lock, or to have fewer rights.

#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <functional>
#include <stdexcept>
#include <string>

namespace titan::testing {

struct ChildResult {
  int status = 0;       ///< exit code, or 128 + signal; 1 after an exception
  std::string message;  ///< the exception's, or what `body` returned
};

inline ChildResult in_child(const std::function<std::string()>& body) {
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("pipe failed");
  const pid_t child = fork();
  if (child == 0) {
    int code = 0;
    std::string message;
    try {
      message = body();
    } catch (const std::exception& error) {
      code = 1;
      message = error.what();
    }
    const bool told = write(ends[1], message.data(), message.size()) == static_cast<ssize_t>(message.size());
    _exit(told ? code : 2);
  }
  close(ends[1]);
  ChildResult result;
  char buffer[512];
  for (ssize_t count = 0; (count = read(ends[0], buffer, sizeof buffer)) > 0;)
    result.message.append(buffer, static_cast<size_t>(count));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

/// Runs `body` in a child without root's rights, which permissions apply to.
inline ChildResult as_nobody(const std::function<std::string()>& body) {
  return in_child([&] {
    constexpr uid_t kNobody = 65534;
    if (geteuid() == 0 && setuid(kNobody) != 0) throw std::runtime_error("setuid failed");
    return body();
  });
}

}  // namespace titan::testing
