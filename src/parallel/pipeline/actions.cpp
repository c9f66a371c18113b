#include "parallel/pipeline/actions.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <ostream>
#include <utility>

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

namespace {

using Kind = Action::Kind;

bool makes_input_gradient(Kind kind) { return kind == Kind::Backward || kind == Kind::BackwardInput; }

bool is_stage(const Schedule& schedule, int stage) { return stage >= 0 && stage < schedule.num_stages; }

bool same_rank(const Schedule& schedule, int a, int b) {
  return schedule.rank_of_stage[a] == schedule.rank_of_stage[b];
}

}  // namespace

std::optional<int> source_stage(const Schedule& schedule, const Action& action) {
  int source = -1;
  if (action.kind == Kind::Forward) source = action.stage - 1;
  if (makes_input_gradient(action.kind)) source = action.stage + 1;
  return is_stage(schedule, source) ? std::optional(source) : std::nullopt;
}

std::optional<Action> receive_for(const Schedule& schedule, const Action& compute) {
  const std::optional<int> source = source_stage(schedule, compute);
  if (!source || same_rank(schedule, *source, compute.stage)) return std::nullopt;
  const Kind kind = compute.kind == Kind::Forward ? Kind::ReceiveForward : Kind::ReceiveBackward;
  return Action{kind, compute.stage, compute.micro_batch};
}

std::optional<Action> send_after(const Schedule& schedule, const Action& compute) {
  const bool forward = compute.kind == Kind::Forward;
  if (!forward && !makes_input_gradient(compute.kind)) return std::nullopt;
  const int target = compute.stage + (forward ? 1 : -1);
  if (!is_stage(schedule, target) || same_rank(schedule, target, compute.stage)) return std::nullopt;
  return Action{forward ? Kind::SendForward : Kind::SendBackward, compute.stage, compute.micro_batch};
}

Action receive_of(const Action& send) {
  if (send.kind == Kind::SendForward) return {Kind::ReceiveForward, send.stage + 1, send.micro_batch};
  return {Kind::ReceiveBackward, send.stage - 1, send.micro_batch};
}

Action send_of(const Action& receive) {
  if (receive.kind == Kind::ReceiveForward)
    return {Kind::SendForward, receive.stage - 1, receive.micro_batch};
  return {Kind::SendBackward, receive.stage + 1, receive.micro_batch};
}

Channels::Channels(const Schedule& schedule)
    : forward_(schedule.num_stages, -1), backward_(schedule.num_stages, -1), into_(schedule.ranks.size()) {
  std::map<std::pair<int, int>, int> known;
  const auto channel = [&](int from_stage, int to_stage) {
    const std::pair ends(schedule.rank_of_stage[from_stage], schedule.rank_of_stage[to_stage]);
    if (ends.first == ends.second) return -1;
    const auto [at, is_new] = known.emplace(ends, size());
    if (is_new) {
      ends_.push_back({ends.first, ends.second});
      into_[ends.second].push_back(at->second);
    }
    return at->second;
  };
  for (int stage = 0; stage + 1 < schedule.num_stages; ++stage) {
    forward_[stage] = channel(stage, stage + 1);
    backward_[stage + 1] = channel(stage + 1, stage);
  }
}

int Channels::of(const Action& message) const {
  const bool receives = message.kind == Kind::ReceiveForward || message.kind == Kind::ReceiveBackward;
  const Action send = receives ? send_of(message) : message;
  const int channel = (send.kind == Kind::SendForward ? forward_ : backward_)[send.stage];
  TITAN_INTERNAL_ASSERT(channel >= 0, message, " stays on its rank");
  return channel;
}

Runnable::Runnable(int num_ranks) : queued_(num_ranks, false) {
  for (int rank = 0; rank < num_ranks; ++rank) wake(rank);
}

void Runnable::wake(int rank) {
  if (queued_[rank]) return;
  queued_[rank] = true;
  queue_.push_back(rank);
}

std::optional<int> Runnable::next() {
  if (front_ == queue_.size()) {
    queue_.clear();
    front_ = 0;
    return std::nullopt;
  }
  const int rank = queue_[front_++];
  queued_[rank] = false;
  return rank;
}

}  // namespace titan::pipeline
