#pragma once

// Dependencies between a schedule's actions. An action's input from another stage is passed locally within a
// rank, and by a message between ranks. Every directed pair of ranks has one first-in, first-out channel for
// all messages.

#include <optional>
#include <vector>

#include "titan/parallel/pipeline_schedule.h"

namespace titan::pipeline {

constexpr int kNumKinds = static_cast<int>(Action::Kind::Reduce) + 1;

constexpr bool is_send(Action::Kind kind) {
  return kind == Action::Kind::SendForward || kind == Action::Kind::SendBackward;
}
/// B or W: the end of a stage's backward, after which none of its activations are kept.
constexpr bool ends_backward(Action::Kind kind) {
  return kind == Action::Kind::Backward || kind == Action::Kind::BackwardWeight;
}

/// Whether a rank has an action of such a kind.
template <class Predicate>
bool any_kind(const Schedule& schedule, const Predicate& predicate) {
  for (const auto& actions : schedule.ranks)
    for (const Action& action : actions)
      if (predicate(action.kind)) return true;
  return false;
}

/// The stage whose output (for F) or input gradient (for B and I) is the action's input; none at the
/// pipeline's ends and for any other action.
std::optional<int> source_stage(const Schedule& schedule, const Action& action);

/// The receive of the input of an F, B or I; none if no message is needed.
std::optional<Action> receive_for(const Schedule& schedule, const Action& compute);
/// The send of the result of an F, B or I; none if no message is needed.
std::optional<Action> send_after(const Schedule& schedule, const Action& compute);

/// The two ends of a message, given either.
Action receive_of(const Action& message);
Action send_of(const Action& message);

/// The channels of a map of stages to ranks: those of neighboring stages on different ranks.
class Channels {
 public:
  explicit Channels(const Schedule& schedule);
  int size() const { return static_cast<int>(ends_.size()); }
  /// The channel of a send or a receive between stages of different ranks.
  int of(const Action& message) const;
  int sender(int channel) const { return ends_[channel].sender; }
  int receiver(int channel) const { return ends_[channel].receiver; }
  /// The channels that end at the rank.
  const std::vector<int>& into(int rank) const { return into_[rank]; }

 private:
  struct Ends {
    int sender = 0, receiver = 0;
  };
  std::vector<Ends> ends_;
  std::vector<int> forward_, backward_;  // per sending stage
  std::vector<std::vector<int>> into_;   // per rank
};

/// The schedule with its receives in the order in which ranks on GPUs post them the first time ([Note: first run of a schedule]). A rank starts no send
/// while `channel_capacity` earlier ones of its channel aren't received. Runs if the schedule does.
Schedule in_order_of_first_run(const Schedule& schedule, int channel_capacity);

/// A value for each stage and micro-batch.
template <class T>
class PerMicroBatch {
 public:
  PerMicroBatch(const Schedule& schedule, T value)
      : width_(schedule.num_micro_batches),
        values_(static_cast<size_t>(schedule.num_stages) * schedule.num_micro_batches, value) {}
  T& operator()(const Action& action) { return values_[index(action)]; }
  const T& operator()(const Action& action) const { return values_[index(action)]; }

 private:
  size_t index(const Action& action) const {
    return static_cast<size_t>(action.stage) * width_ + action.micro_batch;
  }

  int width_ = 1;
  std::vector<T> values_;
};

/// A value for each message, shared by its send and its receive.
template <class T>
class PerMessage {
 public:
  PerMessage(const Schedule& schedule, const T& value)
      : forward_(schedule, value), backward_(schedule, value) {}
  T& operator()(const Action& message) {
    const Action receive = receive_of(message);
    return receive.kind == Action::Kind::ReceiveForward ? forward_(receive) : backward_(receive);
  }

 private:
  PerMicroBatch<T> forward_, backward_;  // indexed by the receiving stage
};
/// Ranks that may be able to continue, each once, in the order in which they were woken.
class Runnable {
 public:
  explicit Runnable(int num_ranks) : queued_(num_ranks, false) {
    for (int rank = 0; rank < num_ranks; ++rank) wake(rank);
  }
  void wake(int rank) {
    if (queued_[rank]) return;
    queued_[rank] = true;
    queue_.push_back(rank);
  }
  /// The next one; none when the queue is empty.
  std::optional<int> next() {
    if (front_ == queue_.size()) {
      queue_.clear();
      front_ = 0;
      return std::nullopt;
    }
    const int rank = queue_[front_++];
    queued_[rank] = false;
    return rank;
  }

 private:
  std::vector<int> queue_;
  size_t front_ = 0;
  std::vector<bool> queued_;
};

}  // namespace titan::pipeline
