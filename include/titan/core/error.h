#pragma once

// Three kinds of errors, by who has to act:
//
//   ConfigError      the user: wrong settings or input; every problem at once, no backtrace
//   Error            the caller: a broken contract (TITAN_CHECK), or the environment: a file, a peer
//   InternalError    us: a bug in this library (TITAN_INTERNAL_ASSERT)
//
// Only main() catches them.
//
//   TITAN_CHECK(rank < size, "expected a rank below ", size, ", got ", rank);

#include <functional>
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

/// The printed forms of the elements, or of what `form` makes of each: `list_str(ranks)` is "0, 3, 5".
template <class Range, class Form = std::identity>
std::string list_str(const Range& elements, std::string_view separator = ", ", const Form& form = {}) {
  std::string text;
  for (const auto& element : elements) text += str(text.empty() ? "" : separator, form(element));
  return text;
}

/// A broken contract or a failed environment. The message says what was expected, what was found, and what to
/// do.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Wrong settings or input; what() has every problem, one per line.
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

/// what() of any exception, without the C++ stack that LibTorch adds; InternalError keeps its own.
std::string reason_of(const std::exception& error);

/// The names in `known` that `name` may have been meant as, best first: few edits away (case, '-' for '_' and
/// swapped neighbors are cheap), one contains the other, or a known name is its initials ("lr" for
/// "learning_rate"). None for names of more than 200 characters.
std::vector<std::string> nearest_names(std::string_view name, const std::vector<std::string>& known,
                                       size_t limit = 3);
/// "; did you mean 'seq_len'?": the nearest of `known`, or "" if none is near.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& known);

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
