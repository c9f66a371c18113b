// Sends and receives for a schedule of compute actions. It is run once, without time, as the ranks would run
// it with sends that last until their receive is posted; where that leads into a circle, a receive is posted
// earlier.

#include <algorithm>
#include <limits>

#include "parallel/pipeline/schedule/dependencies.h"
#include "titan/core/error.h"
#include "titan/parallel/pipeline_check.h"
#include "titan/parallel/pipeline_completion.h"

namespace titan::pipeline {

namespace {

using Kind = Action::Kind;

/// How many compute actions stand between a receive and its use.
constexpr int kLead = 1;

struct Message {
  Action receive;
  int post = 0;  ///< the compute action of the receiver, counted, ahead of which it is posted at the latest
};

class Completion {
 public:
  explicit Completion(const Schedule& schedule)
      : schedule_(schedule),
        channels_(schedule),
        messages_(channels_.size()),
        num_sent_(channels_.size(), 0),
        num_posted_(channels_.size(), 0),
        forward_number_(schedule, -1),
        backward_number_(schedule, -1),
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
                            " stands at action ", ranks_[rank].next, " of ", schedule_.name);
      whole.ranks[rank] = std::move(ranks_[rank].actions);
    }
    return whole;
  }

 private:
  struct Rank {
    size_t next = 0;  // in the schedule's list
    int num_computed = 0;
    std::optional<Action> send;  // waits for its receive
    std::vector<Action> actions;
  };

  int& number_of(const Action& receive) {
    return (receive.kind == Kind::ReceiveForward ? forward_number_ : backward_number_)(receive);
  }

  // In the order of the sends, which each rank's list gives.
  void list_messages() {
    for (const std::vector<Action>& actions : schedule_.ranks)
      for (const Action& action : actions)
        if (const auto send = send_behind(schedule_, action)) {
          std::vector<Message>& messages = messages_[channels_.of(*send)];
          number_of(receive_of(*send)) = static_cast<int>(messages.size());
          messages.push_back({receive_of(*send), 0});
        }
  }

  void set_posts() {
    for (const std::vector<Action>& actions : schedule_.ranks) {
      int num_computed = 0;
      for (const Action& action : actions) {
        if (const auto receive = receive_for(schedule_, action))
          messages_[channels_.of(*receive)][number_of(*receive)].post = std::max(0, num_computed - kLead);
        num_computed += is_compute(action.kind);
      }
    }
    // A receive can't stand behind one of a later message.
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
      return static_cast<int>(num_sent_[channels_.of(*receive)]) > number_of(*receive);
    return true;
  }

  // One action of a rank, or its waiting send; false where it can't go on.
  bool step(int rank) {
    Rank& state = ranks_[rank];
    if (state.send) return send(state);
    if (state.next == schedule_.ranks[rank].size()) return false;
    const Action& action = schedule_.ranks[rank][state.next];
    if (is_compute(action.kind)) {
      post_due(rank);
      if (!arrived(action)) return false;
      ++state.num_computed;
      state.send = send_behind(schedule_, action);
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

  // All ranks stand. False when none of them stands at a send.
  bool post_for_a_waiting_send() {
    const auto waiting =
        std::find_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.send.has_value(); });
    if (waiting == ranks_.end()) return false;
    post_next(channels_.of(*waiting->send));
    return true;
  }

  const Schedule& schedule_;
  Channels channels_;
  std::vector<std::vector<Message>> messages_;           // per channel
  std::vector<size_t> num_sent_, num_posted_;            // per channel
  PerMicroBatch<int> forward_number_, backward_number_;  // of a receive: its message's place in the channel
  std::vector<Rank> ranks_;
  Runnable runnable_;
};

}  // namespace

Schedule with_communication(const Schedule& schedule) {
  if (has_communication(schedule)) return schedule;
  check_schedule(schedule, {.purpose = has_backward(schedule) ? Purpose::Training : Purpose::Evaluation});
  return Completion(schedule).run();
}

}  // namespace titan::pipeline
