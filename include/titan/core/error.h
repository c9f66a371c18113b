#pragma once

// Errors. Three kinds, so that the reader of a message knows who has to act:
//   ConfigError             the user's settings or input: no backtrace, all problems at once
//   Error (TITAN_CHECK)     a broken contract between caller and library, or a failed environment (file,
//   peer) InternalError           a bug of ours (TITAN_INTERNAL_ASSERT)
// Only main() catches; everything between lets them pass.

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace titan {

/// Concatenates the printed forms of its arguments: `str("expected ", 3, ", got ", n)`.
template <class... Args>
std::string str(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

/// A broken contract or a failed environment. The message says what was expected, what was found and the
/// remedy.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Wrong settings or input of the user; what() holds every problem, one a line.
class ConfigError : public Error {
 public:
  explicit ConfigError(std::string problem) : ConfigError(std::vector<std::string>{std::move(problem)}) {}
  explicit ConfigError(std::vector<std::string> problems);
  const std::vector<std::string>& problems() const { return problems_; }

 private:
  std::vector<std::string> problems_;
};

/// A bug in this library.
class InternalError : public Error {
 public:
  using Error::Error;
};

namespace detail {
[[noreturn]] void throw_error(const char* file, int line, const std::string& message);
[[noreturn]] void throw_internal(const char* file, int line, const char* condition,
                                 const std::string& message);
}  // namespace detail

/// The names of `known` that someone who wrote `name` may have meant, best first: few edits away (case, '-'
/// for '_' and swapped neighbours are cheap), or one contains the other. Empty when nothing is near.
std::vector<std::string> nearest_names(std::string_view name, const std::vector<std::string>& known,
                                       size_t limit = 3);

}  // namespace titan

#define TITAN_CHECK(condition, ...)                                                                \
  do {                                                                                             \
    if (!(condition)) ::titan::detail::throw_error(__FILE__, __LINE__, ::titan::str(__VA_ARGS__)); \
  } while (0)

#define TITAN_INTERNAL_ASSERT(condition, ...)                                       \
  do {                                                                              \
    if (!(condition))                                                               \
      ::titan::detail::throw_internal(__FILE__, __LINE__, #condition,               \
                                      ::titan::str("" __VA_OPT__(, ) __VA_ARGS__)); \
  } while (0)
