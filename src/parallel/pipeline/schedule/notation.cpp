#include "parallel/pipeline/schedule/notation.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <ostream>

#include "titan/core/error.h"

namespace titan::pipeline {

namespace {

using Kind = Action::Kind;

constexpr std::array<std::string_view, kNumKinds> kWords = {
    "F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"};

// Takes a number off the front; digits only, no sign.
std::optional<int> take_number(std::string_view& text) {
  if (text.empty() || text.front() < '0' || text.front() > '9') return std::nullopt;
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(end - text.data());
  return number;
}

std::optional<Kind> kind_of(std::string_view word) {
  const auto found = std::find(kWords.begin(), kWords.end(), word);
  if (found == kWords.end()) return std::nullopt;
  return static_cast<Kind>(found - kWords.begin());
}

template <class Predicate>
bool any_kind(const Schedule& schedule, const Predicate& predicate) {
  for (const auto& actions : schedule.ranks)
    for (const Action& action : actions)
      if (predicate(action.kind)) return true;
  return false;
}

}  // namespace

std::string_view word_of(Kind kind) {
  const auto index = static_cast<size_t>(kind);
  return index < kWords.size() ? kWords[index] : "?";
}

std::optional<Action> parse_action(std::string_view text) {
  const std::optional<int> stage = take_number(text);
  if (!stage) return std::nullopt;
  const size_t length = std::min(text.find_first_of("0123456789"), text.size());
  const std::optional<Kind> kind = kind_of(text.substr(0, length));
  if (!kind) return std::nullopt;
  text.remove_prefix(length);
  if (is_parameter_action(*kind))
    return text.empty() ? std::optional(Action{*kind, *stage, -1}) : std::nullopt;
  const std::optional<int> micro_batch = take_number(text);
  if (!micro_batch || !text.empty()) return std::nullopt;
  return Action{*kind, *stage, *micro_batch};
}

std::string to_string(const Action& action) { return str(action); }

std::ostream& operator<<(std::ostream& out, const Action& action) {
  out << action.stage << word_of(action.kind);
  if (!is_parameter_action(action.kind)) out << action.micro_batch;
  return out;
}

bool has_backward(const Schedule& schedule) {
  return any_kind(schedule, [](Kind kind) { return is_compute(kind) && kind != Kind::Forward; });
}

bool has_communication(const Schedule& schedule) { return any_kind(schedule, is_communication); }

}  // namespace titan::pipeline
