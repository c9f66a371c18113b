#include "titan/core/error.h"

#include <execinfo.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <memory>
#include <numeric>

#include "core/utf8.h"

namespace titan {
namespace {

/// "src/dist/world.cpp", wherever the library was built.
std::string_view path_in_project(std::string_view path) {
  for (std::string_view root : {"/src/", "/include/", "/models/", "/tests/"}) {
    size_t at = path.rfind(root);
    if (at != std::string_view::npos) return path.substr(at + 1);
  }
  return path;
}

std::string backtrace_text() {
  constexpr int kMaxFrames = 32;
  constexpr int kOwnFrames = 2;  // this function and throw_internal
  void* frames[kMaxFrames];
  int count = backtrace(frames, kMaxFrames);
  std::unique_ptr<char*, decltype(&std::free)> symbols(backtrace_symbols(frames, count), &std::free);
  std::string text;
  for (int i = kOwnFrames; symbols && i < count; ++i) text += str("\n    ", symbols.get()[i]);
  return text;
}

// 'AdamW' and 'adamw', 'seq-len' and 'seq_len' count as the same.
std::string folded(std::string_view name) {
  std::string result(name);
  for (char& c : result) c = c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

/// Edits (insert, delete, replace, swap of neighbors) that turn `a` into `b`: optimal string alignment.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before_previous(b.size() + 1), previous(b.size() + 1), current(b.size() + 1);
  std::iota(previous.begin(), previous.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    current[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      size_t replaced = previous[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      current[j] = std::min({previous[j] + 1, current[j - 1] + 1, replaced});
      bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) current[j] = std::min(current[j], before_previous[j - 2] + 1);
    }
    std::swap(before_previous, previous);
    std::swap(previous, current);
  }
  return previous[b.size()];
}

constexpr size_t kLongestName = 200;  // comparing longer texts, which aren't typos, would take seconds

/// "learning_rate" -> "lr"
std::string initials_of(std::string_view name) {
  std::string initials;
  for (size_t i = 0; i < name.size(); ++i)
    if (i == 0 || name[i - 1] == '_' || name[i - 1] == '-') initials += name[i];
  return initials.size() > 1 ? folded(initials) : "";
}

bool contains_either_way(std::string_view a, std::string_view b) {
  constexpr size_t kShortest = 3;  // "lr" is part of too many names
  if (std::min(a.size(), b.size()) < kShortest) return false;
  return a.find(b) != std::string_view::npos || b.find(a) != std::string_view::npos;
}

// A file that isn't what its reader takes it for may have a million problems, or one of a million characters.
std::string readable(const std::string& text) {
  constexpr size_t kMostLines = 2000, kLongest = 4000;
  std::string result;
  size_t begin = 0;
  for (size_t line = 0; line < kMostLines && begin <= text.size(); ++line) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    size_t cut = std::min(end, begin + kLongest);
    while (cut < end && cut > begin && !starts_character(text[cut])) --cut;
    result +=
        str(line > 0 ? "\n" : "", std::string_view(text).substr(begin, cut - begin), cut < end ? "..." : "");
    begin = end + 1;
  }
  if (begin > text.size()) return result;
  const auto num_left = 1 + std::count(text.begin() + static_cast<std::ptrdiff_t>(begin), text.end(), '\n');
  return str(result, "\nand ", num_left, num_left == 1 ? " more line" : " more lines");
}

}  // namespace

ConfigError::ConfigError(std::vector<std::string> problems)
    : Error(readable(list_str(problems, "\n"))), problems_(std::move(problems)) {}

namespace detail {

void throw_error(const char* file, int line, const std::string& message) {
  throw Error(str(message, " [", path_in_project(file), ":", line, "]"));
}

void throw_internal(const char* file, int line, const char* condition, const std::string& message) {
  throw InternalError(str("a bug in LibTitan: '", condition, "' does not hold", message.empty() ? "" : ": ",
                          message, " [", path_in_project(file), ":", line, "]", backtrace_text()));
}

}  // namespace detail

std::string reason_of(const std::exception& error) {
  std::string reason = error.what();
  if (dynamic_cast<const InternalError*>(&error)) return reason;  // its stack is for us
  for (const char* stack : {"\nException raised from ", "\nframe #0: "})
    if (size_t start = reason.find(stack); start != reason.npos) reason.resize(start);
  return reason;
}

std::vector<std::string> nearest_names(std::string_view name, const std::vector<std::string>& known,
                                       size_t limit) {
  struct Candidate {
    size_t distance;
    const std::string* name;
  };
  std::vector<Candidate> near;
  if (name.size() > kLongestName) return {};
  std::string wanted = folded(name), initials = initials_of(name);
  for (const std::string& candidate : known) {
    std::string other = folded(candidate);
    size_t distance = edit_distance(wanted, other);
    size_t tolerated = std::max<size_t>(1, std::max(wanted.size(), other.size()) / 3);
    if (distance <= tolerated || contains_either_way(wanted, other) || initials == other)
      near.push_back({distance, &candidate});
  }
  std::ranges::stable_sort(near, {}, &Candidate::distance);
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(limit, near.size()); ++i) names.push_back(*near[i].name);
  return names;
}

std::string did_you_mean(std::string_view name, const std::vector<std::string>& known) {
  const std::vector<std::string> near = nearest_names(name, known, /*limit=*/1);
  return near.empty() ? "" : str("; did you mean '", near[0], "'?");
}

}  // namespace titan
