// Completes a schedule of compute actions with sends, receives and parameter actions. To place the receives,
// it runs the schedule once, without time, with sends that block until their receive is posted; if that
// deadlocks, a receive is posted earlier.

#include <algorithm>
#include <limits>
#include <map>

#include "parallel/pipeline/actions.h"
#include "titan/core/error.h"

namespace titan::pipeline {

namespace {

using Kind = Action::Kind;

/// The number of compute actions between a receive and its use.
constexpr int kLead = 1;

struct Message {
  Action receive;
  int post = 0;  ///< number of the receiver's compute action before which it is posted at the latest
};

class Completion {
 public:
  explicit Completion(const Schedule& schedule)
      : schedule_(schedule),
        channels_(schedule),
        messages_(channels_.size()),
        num_sent_(channels_.size(), 0),
        num_posted_(channels_.size(), 0),
        number_of_(schedule, -1),
        ranks_(schedule.ranks.size()),
        runnable_(schedule.num_ranks()) {
    list_messages();
    set_posts();
  }

  Schedule run() {
    do {
      while (const auto rank = runnable_.next())
        while (step(*rank)) {
        }
    } while (post_for_a_waiting_send());
    Schedule whole = schedule_;
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      TITAN_INTERNAL_ASSERT(ranks_[rank].next == schedule_.ranks[rank].size(), "rank ", rank,
                            " is stuck at action ", ranks_[rank].next, " of ", schedule_.name);
      whole.ranks[rank] = std::move(ranks_[rank].actions);
    }
    return whole;
  }

 private:
  struct Rank {
    size_t next = 0;  // index in the schedule's list
    int num_computed = 0;
    std::optional<Action> send;  // waits for its receive
    std::vector<Action> actions;
  };

  // Lists each channel's messages in the order of the sends, which each rank's list gives.
  void list_messages() {
    for (const std::vector<Action>& actions : schedule_.ranks)
      for (const Action& action : actions)
        if (const auto send = send_after(schedule_, action)) {
          std::vector<Message>& messages = messages_[channels_.of(*send)];
          number_of_(*send) = static_cast<int>(messages.size());
          messages.push_back({receive_of(*send), 0});
        }
  }

  void set_posts() {
    for (const std::vector<Action>& actions : schedule_.ranks) {
      int num_computed = 0;
      for (const Action& action : actions) {
        if (const auto receive = receive_for(schedule_, action))
          messages_[channels_.of(*receive)][number_of_(*receive)].post = std::max(0, num_computed - kLead);
        num_computed += is_compute(action.kind);
      }
    }
    // Receives keep the order of their messages.
    for (std::vector<Message>& messages : messages_) {
      int latest = std::numeric_limits<int>::max();
      for (auto message = messages.rbegin(); message != messages.rend(); ++message)
        latest = message->post = std::min(latest, message->post);
    }
  }

  void post_next(int channel) {
    const Message& message = messages_[channel][num_posted_[channel]++];
    ranks_[channels_.receiver(channel)].actions.push_back(message.receive);
    runnable_.wake(channels_.sender(channel));
  }

  void post_due(int rank) {
    for (int channel : channels_.into(rank)) {
      const std::vector<Message>& messages = messages_[channel];
      while (num_posted_[channel] < messages.size() &&
             messages[num_posted_[channel]].post <= ranks_[rank].num_computed)
        post_next(channel);
    }
  }

  bool arrived(const Action& action) {
    if (const auto receive = receive_for(schedule_, action))
      return static_cast<int>(num_sent_[channels_.of(*receive)]) > number_of_(*receive);
    return true;
  }

  // Runs one action of a rank, or its waiting send. Returns false if the rank is blocked.
  bool step(int rank) {
    Rank& state = ranks_[rank];
    if (state.send) return send(state);
    if (state.next == schedule_.ranks[rank].size()) return false;
    const Action& action = schedule_.ranks[rank][state.next];
    if (is_compute(action.kind)) {
      post_due(rank);
      if (!arrived(action)) return false;
      ++state.num_computed;
      state.send = send_after(schedule_, action);
    }
    state.actions.push_back(action);
    ++state.next;
    return true;
  }

  bool send(Rank& state) {
    const int channel = channels_.of(*state.send);
    if (num_sent_[channel] >= num_posted_[channel]) return false;
    ++num_sent_[channel];
    state.actions.push_back(*state.send);
    state.send.reset();
    runnable_.wake(channels_.receiver(channel));
    return true;
  }

  // Call it when all ranks are blocked. Returns false if none is blocked at a send.
  bool post_for_a_waiting_send() {
    const auto waiting =
        std::find_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.send.has_value(); });
    if (waiting == ranks_.end()) return false;
    post_next(channels_.of(*waiting->send));
    return true;
  }

  const Schedule& schedule_;
  Channels channels_;
  std::vector<std::vector<Message>> messages_;  // per channel
  std::vector<size_t> num_sent_, num_posted_;   // per channel
  PerMessage<int> number_of_;                   // its number in its channel
  std::vector<Rank> ranks_;
  Runnable runnable_;
};

// ---- Unshard, Reshard and Reduce

using Actions = std::vector<Action>;

/// The gathered stages of a rank, during a walk through its actions.
class Gathering {
 public:
  Gathering(const Actions& actions, int max_gathered) : max_gathered_(max_gathered) {
    for (size_t i = 0; i < actions.size(); ++i)
      if (is_compute(actions[i].kind)) stages_[actions[i].stage].uses.push_back(i);
  }

  // Gathers the stages that are needed next and frees the others, freeing first to make room.
  void prepare(size_t position, Actions& out) {
    const std::vector<int> wanted = needed_next(position);
    for (auto& [number, stage] : stages_)
      if (stage.gathered && std::find(wanted.begin(), wanted.end(), number) == wanted.end())
        set(number, false, out);
    for (int number : wanted)
      if (!stages_[number].gathered) set(number, true, out);
  }

  void finish(Actions& out) {
    for (auto& [number, stage] : stages_)
      if (stage.gathered) set(number, false, out);
  }

 private:
  struct Stage {
    std::vector<size_t> uses;
    size_t next_use = 0;
    bool gathered = false;
  };

  std::vector<int> needed_next(size_t position) {
    std::vector<std::pair<size_t, int>> order;
    for (auto& [number, stage] : stages_) {
      while (stage.next_use < stage.uses.size() && stage.uses[stage.next_use] < position) ++stage.next_use;
      if (stage.next_use < stage.uses.size()) order.emplace_back(stage.uses[stage.next_use], number);
    }
    std::sort(order.begin(), order.end());
    if (order.size() > static_cast<size_t>(max_gathered_)) order.resize(max_gathered_);
    std::vector<int> numbers;
    for (const auto& [use, number] : order) numbers.push_back(number);
    return numbers;
  }

  void set(int number, bool gathered, Actions& out) {
    stages_[number].gathered = gathered;
    out.push_back({gathered ? Kind::Unshard : Kind::Reshard, number, -1});
  }

  int max_gathered_ = 1;
  std::map<int, Stage> stages_;
};

Actions with_gathering(const Actions& actions, int max_gathered) {
  Gathering gathering(actions, max_gathered);
  Actions out;
  for (size_t i = 0; i < actions.size(); ++i) {
    if (is_compute(actions[i].kind)) gathering.prepare(i, out);
    out.push_back(actions[i]);
  }
  gathering.finish(out);
  return out;
}

bool is_send_of(const Action& action, const Action& backward) {
  return action.kind == Kind::SendBackward && action.stage == backward.stage &&
         action.micro_batch == backward.micro_batch;
}

Actions with_reduction(const Actions& actions) {
  std::map<int, size_t> last;  // per stage
  for (size_t i = 0; i < actions.size(); ++i)
    if (ends_backward(actions[i].kind)) last[actions[i].stage] = i;
  std::map<size_t, int> reduced;  // the stage, by the action that its Reduce follows
  for (const auto& [stage, position] : last) {
    const bool send_waits =
        position + 1 < actions.size() && is_send_of(actions[position + 1], actions[position]);
    reduced[position + send_waits] = stage;
  }
  Actions out;
  for (size_t i = 0; i < actions.size(); ++i) {
    out.push_back(actions[i]);
    if (const auto found = reduced.find(i); found != reduced.end())
      out.push_back({Kind::Reduce, found->second, -1});
  }
  return out;
}

// ---- messages that can share a call

struct BatchedMessage {
  Action send;
  size_t sent_at = 0, received_at = 0;  // positions in the two ranks' lists
};

// Lists each channel's messages in the order of the sends, which is also the order of the receives.
std::vector<std::vector<BatchedMessage>> list_messages(const Schedule& schedule, const Channels& channels) {
  std::vector<std::vector<BatchedMessage>> messages(static_cast<size_t>(channels.size()));
  std::vector<size_t> num_received(messages.size(), 0);
  for (const std::vector<Action>& actions : schedule.ranks)
    for (size_t i = 0; i < actions.size(); ++i)
      if (is_send(actions[i].kind))
        messages[static_cast<size_t>(channels.of(actions[i]))].push_back({actions[i], i, 0});
  for (const std::vector<Action>& actions : schedule.ranks)
    for (size_t i = 0; i < actions.size(); ++i)
      if (is_communication(actions[i].kind) && !is_send(actions[i].kind)) {
        const auto channel = static_cast<size_t>(channels.of(actions[i]));
        messages[channel].at(num_received[channel]++).received_at = i;
      }
  return messages;
}

}  // namespace

Schedule with_communication(const Schedule& schedule) {
  if (has_communication(schedule)) return schedule;
  check_schedule(schedule, {.purpose = has_backward(schedule) ? Purpose::Training : Purpose::Evaluation});
  return Completion(schedule).run();
}

Schedule with_parameter_actions(const Schedule& schedule, int max_gathered_stages) {
  TITAN_CHECK(max_gathered_stages >= 1, "expected max_gathered_stages of 1 or more, got ",
              max_gathered_stages);
  const bool gathers =
                 any_kind(schedule, [](Kind kind) { return kind == Kind::Unshard || kind == Kind::Reshard; }),
             reduces = any_kind(schedule, [](Kind kind) { return kind == Kind::Reduce; });
  Schedule whole = schedule;
  for (Actions& actions : whole.ranks) {
    if (!gathers) actions = with_gathering(actions, max_gathered_stages);
    if (!reduces) actions = with_reduction(actions);
  }
  return whole;
}

std::vector<std::vector<bool>> joined_with_next(const Schedule& schedule, const MayJoin& may_join) {
  std::vector<std::vector<bool>> joined;
  for (const std::vector<Action>& actions : schedule.ranks) joined.emplace_back(actions.size(), false);
  const Channels channels(schedule);
  const auto messages = list_messages(schedule, channels);
  for (int channel = 0; channel < channels.size(); ++channel) {
    const std::vector<BatchedMessage>& list = messages[static_cast<size_t>(channel)];
    for (size_t i = 1; i < list.size(); ++i) {
      const BatchedMessage &one = list[i - 1], &next = list[i];
      if (next.sent_at != one.sent_at + 1 || next.received_at != one.received_at + 1) continue;
      if (!may_join(one.send, next.send)) continue;
      joined[static_cast<size_t>(channels.sender(channel))][one.sent_at] = true;
      joined[static_cast<size_t>(channels.receiver(channel))][one.received_at] = true;
    }
  }
  return joined;
}

}  // namespace titan::pipeline
