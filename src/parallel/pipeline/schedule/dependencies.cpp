#include "parallel/pipeline/schedule/dependencies.h"

#include <map>
#include <utility>

#include "titan/core/error.h"

namespace titan::pipeline {

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

std::optional<Action> send_behind(const Schedule& schedule, const Action& compute) {
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
