// Checks 10,000 schedules, most of them with an error: the checker must accept exactly those that run to
// their end in a simple trial run.

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <random>
#include <set>
#include <utility>

#include "titan/parallel/pipeline_schedule.h"
#include "unit/parallel/pipeline_cases.h"

namespace titan::pipeline {
namespace {

using Kind = Action::Kind;
using Key = std::array<int, 3>;

/// Runs the actions one by one, using sets and maps. Shares no code with the checker.
class Trial {
 public:
  Trial(const Schedule& schedule, const CheckOptions& options) : schedule_(schedule), options_(options) {
    for (const auto& actions : schedule.ranks)
      for (const Action& action : actions) {
        const int kind = static_cast<int>(action.kind);
        messages_ |= kind >= 4 && kind <= 7;
        gathers_ |= action.kind == Kind::Unshard || action.kind == Kind::Reshard;
        reduces_ |= action.kind == Kind::Reduce;
      }
  }

  bool runs() {
    std::vector<size_t> next(schedule_.ranks.size(), 0);
    for (bool moved = true; (moved || came_) && !broken_;) {
      moved = came_ = false;
      for (int rank = 0; rank < schedule_.num_ranks() && !broken_; ++rank)
        if (next[rank] < schedule_.ranks[rank].size() && take(rank, schedule_.ranks[rank][next[rank]])) {
          ++next[rank];
          moved = true;
        }
    }
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank)
      if (next[rank] < schedule_.ranks[rank].size()) return false;
    return !broken_ && complete();
  }

 private:
  struct Channel {
    std::vector<Key> sent, posted;  // each message is given by its receive
    bool sender_came = false, receiver_came = false;
  };

  static Key key(Kind kind, int stage, int micro_batch) {
    return {static_cast<int>(kind), stage, micro_batch};
  }
  bool done(Kind kind, int stage, int micro_batch) const {
    return done_.count(key(kind, stage, micro_batch)) > 0;
  }
  bool backward_done(int stage, int micro_batch) const {
    return done(Kind::Backward, stage, micro_batch) || done(Kind::BackwardInput, stage, micro_batch);
  }
  bool exists(int stage) const { return stage >= 0 && stage < schedule_.num_stages; }
  int rank_of(int stage) const { return schedule_.rank_of_stage[stage]; }
  bool evaluates() const { return options_.purpose == Purpose::Evaluation; }
  bool breaks() {
    broken_ = true;
    return false;
  }

  // Returns false if the action can't run yet, or ever (broken_).
  bool take(int rank, const Action& action) {
    const auto [kind, stage, micro_batch] = action;
    if (static_cast<int>(kind) > 10 || !exists(stage) || rank_of(stage) != rank) return breaks();
    const bool backward =
        kind == Kind::Reduce || (static_cast<int>(kind) >= 1 && static_cast<int>(kind) <= 3);
    if (evaluates() && backward) return breaks();
    if (static_cast<int>(kind) >= 8) return parameters(kind, stage);
    if (micro_batch < 0 || micro_batch >= schedule_.num_micro_batches || done(kind, stage, micro_batch))
      return breaks();
    const bool could = static_cast<int>(kind) <= 3 ? compute(rank, kind, stage, micro_batch)
                                                   : message(rank, kind, stage, micro_batch);
    if (could) done_.insert(key(kind, stage, micro_batch));
    return could;
  }

  bool parameters(Kind kind, int stage) {
    if (kind == Kind::Unshard) return gathered_.insert(stage).second || breaks();
    if (kind == Kind::Reshard) return gathered_.erase(stage) > 0 || breaks();
    for (int i = 0; i < schedule_.num_micro_batches; ++i)
      if (!done(Kind::Backward, stage, i) && !done(Kind::BackwardWeight, stage, i)) return breaks();
    return reduced_.insert(stage).second || breaks();
  }

  bool compute(int rank, Kind kind, int stage, int micro_batch) {
    if (gathers_ && !gathered_.count(stage)) return breaks();
    const bool input = kind == Kind::BackwardInput, weight = kind == Kind::BackwardWeight;
    if (kind != Kind::Forward && !weight && backward_done(stage, micro_batch)) return breaks();
    if (weight && !done(Kind::BackwardInput, stage, micro_batch)) return false;
    if ((kind == Kind::Backward || input) && !done(Kind::Forward, stage, micro_batch)) return false;
    if (!weight && !has_input(rank, kind == Kind::Forward, stage, micro_batch)) return false;
    if (kind == Kind::Forward && !evaluates() && ++live_[rank] > options_.max_live_activations)
      return breaks();
    if (kind == Kind::Backward || weight) --live_[rank];
    return true;
  }

  bool has_input(int rank, bool forward, int stage, int micro_batch) {
    const int from = forward ? stage - 1 : stage + 1;
    if (!exists(from)) return true;
    const bool made = forward ? done(Kind::Forward, from, micro_batch) : backward_done(from, micro_batch);
    if (rank_of(from) == rank || !messages_) return made;
    const Kind receive = forward ? Kind::ReceiveForward : Kind::ReceiveBackward;
    if (!done(receive, stage, micro_batch)) return false;
    const Channel& channel = channels_[{rank_of(from), rank}];
    for (size_t i = 0; i < channel.sent.size(); ++i)
      if (channel.sent[i] == key(receive, stage, micro_batch)) return i < channel.posted.size();
    return false;
  }

  bool message(int rank, Kind kind, int stage, int micro_batch) {
    const bool sends = kind == Kind::SendForward || kind == Kind::SendBackward;
    const bool forward = kind == Kind::SendForward || kind == Kind::ReceiveForward;
    const int other = forward == sends ? stage + 1 : stage - 1;
    if (!exists(other) || rank_of(other) == rank) return breaks();
    const Kind receive = forward ? Kind::ReceiveForward : Kind::ReceiveBackward;
    if (options_.connects_at_first_message) {
      Channel& channel = channels_[sends ? std::pair(rank, rank_of(other)) : std::pair(rank_of(other), rank)];
      came_ |= !std::exchange(sends ? channel.sender_came : channel.receiver_came, true);
      if (!channel.sender_came || !channel.receiver_came) return false;
    }
    if (sends) {
      if (!(forward ? done(Kind::Forward, stage, micro_batch) : backward_done(stage, micro_batch)))
        return false;
      Channel& channel = channels_[{rank, rank_of(other)}];
      const int open = static_cast<int>(channel.sent.size()) - static_cast<int>(channel.posted.size());
      if (open >= options_.channel_capacity) return false;
      channel.sent.push_back(key(receive, other, micro_batch));
      return matches(channel, channel.sent.size() - 1);
    }
    Channel& channel = channels_[{rank_of(other), rank}];
    channel.posted.push_back(key(receive, stage, micro_batch));
    return matches(channel, channel.posted.size() - 1);
  }

  bool matches(const Channel& channel, size_t i) {
    if (i >= channel.sent.size() || i >= channel.posted.size()) return true;
    return channel.sent[i] == channel.posted[i] || breaks();
  }

  bool complete() const {
    for (int stage = 0; stage < schedule_.num_stages; ++stage)
      for (int i = 0; i < schedule_.num_micro_batches; ++i) {
        if (!done(Kind::Forward, stage, i)) return false;
        if (evaluates()) continue;
        if (!done(Kind::Backward, stage, i) && !done(Kind::BackwardWeight, stage, i)) return false;
      }
    for (const auto& [ends, channel] : channels_)
      if (channel.sent.size() != channel.posted.size()) return false;
    return gathered_.empty() && (!reduces_ || reduced_.size() == static_cast<size_t>(schedule_.num_stages));
  }

  const Schedule& schedule_;
  const CheckOptions& options_;
  bool messages_ = false, gathers_ = false, reduces_ = false, broken_ = false;
  bool came_ = false;  // a rank came to a channel's first message
  std::set<Key> done_;
  std::map<std::pair<int, int>, Channel> channels_;
  std::set<int> gathered_, reduced_;
  std::map<int, int> live_;
};

class Mutator {
 public:
  explicit Mutator(std::mt19937& random) : random_(random) {}

  void mutate(Schedule& schedule) {
    auto& actions = schedule.ranks[below(schedule.num_ranks())];
    if (actions.empty()) return;
    const size_t at = below(static_cast<int>(actions.size()));
    Action& action = actions[at];
    switch (below(8)) {
      case 0:
        actions.erase(actions.begin() + at);
        break;
      case 1:
        insert(actions, action);
        break;
      case 2:
        std::swap(action, actions[below(static_cast<int>(actions.size()))]);
        break;
      case 3:
        if (at + 1 < actions.size()) std::swap(action, actions[at + 1]);
        break;
      case 4:
        action.stage = below(schedule.num_stages + 2) - 1;
        break;
      case 5:
        action.micro_batch = below(schedule.num_micro_batches + 2) - 1;
        break;
      case 6:
        action.kind = static_cast<Kind>(below(12));
        break;
      default: {  // moves an action to any place on any rank
        const Action moved = action;
        actions.erase(actions.begin() + at);
        insert(schedule.ranks[below(2) == 0 ? below(schedule.num_ranks()) : rank_of(schedule, actions)],
               moved);
      }
    }
  }

  int below(int end) { return std::uniform_int_distribution<int>(0, end - 1)(random_); }

 private:
  void insert(std::vector<Action>& actions, Action action) {
    actions.insert(actions.begin() + below(static_cast<int>(actions.size()) + 1), action);
  }
  static int rank_of(const Schedule& schedule, const std::vector<Action>& actions) {
    return static_cast<int>(&actions - schedule.ranks.data());
  }

  std::mt19937& random_;
};

// The schedule as generated, with messages, with parameter actions, or with both.
Schedule form_of(const Schedule& plain, int form) {
  if (form == 0) return plain;
  if (form == 1) return with_communication(plain);
  if (form == 2) return with_parameter_actions(plain, 1);
  return with_parameter_actions(with_communication(plain), 2);
}

TEST(PipelineFuzz, CheckerAcceptsExactlyTheSchedulesThatRun) {
  constexpr int kSchedules = 10000;
  const auto cases = titan::testing::pipeline_cases(4, 5);
  std::mt19937 random(20240607);
  Mutator mutator(random);
  int num_accepted = 0, num_refused = 0;
  for (int i = 0; i < kSchedules; ++i) {
    const auto& one = cases[mutator.below(static_cast<int>(cases.size()))];
    CheckOptions options{.channel_capacity = mutator.below(3),
                         .connects_at_first_message = mutator.below(2) == 0};
    Schedule plain = one.make();
    if (mutator.below(8) == 0) {
      options.purpose = Purpose::Evaluation;
      plain = make_forward_only_schedule(plain.rank_of_stage, plain.num_micro_batches);
    }
    const Schedule original = form_of(plain, mutator.below(4));
    Schedule mutated = original;
    for (int times = mutator.below(3); times >= 0; --times) mutator.mutate(mutated);
    if (mutator.below(4) == 0) options.max_live_activations = 1 + mutator.below(6);
    const auto problems = find_problems(mutated, options);
    ASSERT_EQ(problems.empty(), Trial(mutated, options).runs())
        << one.text() << ", schedule " << i << ": "
        << (problems.empty() ? "accepted, but doesn't run" : to_string(problems.front(), mutated));
    (problems.empty() ? num_accepted : num_refused) += 1;
  }
  EXPECT_GT(num_accepted, kSchedules / 50);
  EXPECT_GT(num_refused, kSchedules / 2);
}

}  // namespace
}  // namespace titan::pipeline
