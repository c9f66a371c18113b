// [Note: first run of a schedule]
// CUDA loads a kernel when it is first launched, and the host may then have to wait until the device has nothing else to do. (With
// CUDA_MODULE_LOADING=EAGER kernels are loaded when the program starts.) A receive that is posted ahead of its use keeps the device busy until the other
// rank sends, and a send until it is received, unless it is short. If the other rank's host waits in the same way, both wait forever. So the first time,
// receives have another order. To place them, the schedule is run once without time, where each action that may load kernels waits until all of the
// rank's messages have been received and have arrived. A receive is posted when an action needs it, with the earlier ones of its channel. If all ranks are
// blocked, one of them waits for a send; its receive is posted at once. That message is on its way, so the receive waits for nobody's host.
//
// The order that results can't hang, whether hosts wait or not: no rank chooses between actions, and each waits for nothing but actions of other ranks
// which have been started before it in that run.

#include <utility>
#include <vector>

#include "parallel/pipeline/actions.h"
#include "titan/core/error.h"

namespace titan::pipeline {

namespace {

class FirstRun {
 public:
  FirstRun(const Schedule& schedule, int channel_capacity)
      : schedule_(schedule),
        capacity_(static_cast<size_t>(channel_capacity)),
        channels_(schedule),
        messages_(static_cast<size_t>(channels_.size())),
        number_of_(schedule, 0),
        ranks_(schedule.ranks.size()),
        runnable_(schedule.num_ranks()) {
    for (const std::vector<Action>& actions : schedule.ranks)
      for (const Action& action : actions)
        if (is_send(action.kind)) {
          std::vector<Action>& receives = channel_of(action).receives;
          number_of_(action) = receives.size();
          receives.push_back(receive_of(action));
        }
  }

  Schedule run() {
    do {
      while (const auto rank = runnable_.next())
        while (step(static_cast<size_t>(*rank))) {
        }
    } while (receive_what_a_rank_waits_for());
    Schedule ordered = schedule_;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      TITAN_INTERNAL_ASSERT(ranks_[rank].actions.size() == schedule_.ranks[rank].size(), "the first run of ",
                            schedule_.name, " is stuck at action ", ranks_[rank].next, " of rank ", rank);
      ordered.ranks[rank] = std::move(ranks_[rank].actions);
    }
    return ordered;
  }

 private:
  struct Channel {
    std::vector<Action> receives;  // in the order of the sends
    size_t num_sent = 0, num_posted = 0;
  };
  struct Rank {
    size_t next = 0;        // index in the schedule's list
    size_t num_moving = 0;  // its sends that aren't received, and its receives whose messages aren't sent
    std::vector<Action> actions;
  };

  Channel& channel_of(const Action& message) { return messages_[static_cast<size_t>(channels_.of(message))]; }

  void post_next(int channel) {
    Channel& messages = messages_[static_cast<size_t>(channel)];
    Rank& receiver = ranks_[static_cast<size_t>(channels_.receiver(channel))];
    Rank& sender = ranks_[static_cast<size_t>(channels_.sender(channel))];
    receiver.actions.push_back(messages.receives[messages.num_posted]);
    const bool is_on_its_way = messages.num_posted++ < messages.num_sent;
    if (is_on_its_way)
      --sender.num_moving;
    else
      ++receiver.num_moving;
    runnable_.wake(channels_.sender(channel));
  }

  bool send(const Action& action) {
    const int channel = channels_.of(action);
    Channel& messages = messages_[static_cast<size_t>(channel)];
    if (messages.num_sent >= messages.num_posted + capacity_) return false;
    const bool is_awaited = messages.num_sent++ < messages.num_posted;
    if (is_awaited)
      --ranks_[static_cast<size_t>(channels_.receiver(channel))].num_moving;
    else
      ++ranks_[static_cast<size_t>(channels_.sender(channel))].num_moving;
    runnable_.wake(channels_.receiver(channel));
    return true;
  }

  // Runs one action of a rank. Returns false if the rank is blocked or has ended.
  bool step(size_t rank) {
    Rank& state = ranks_[rank];
    if (state.next == schedule_.ranks[rank].size()) return false;
    const Action& action = schedule_.ranks[rank][state.next];
    const bool is_message = is_communication(action.kind), sends = is_send(action.kind);
    if (sends && !send(action)) return false;
    if (!is_message) {
      if (const auto receive = receive_for(schedule_, action))
        while (channel_of(*receive).num_posted <= number_of_(*receive)) post_next(channels_.of(*receive));
      if (state.num_moving > 0) return false;
    }
    if (!is_message || sends) state.actions.push_back(action);
    ++state.next;
    return true;
  }

  // Call it when all ranks are blocked. Returns false if no rank that has more to do waits for one of its sends.
  bool receive_what_a_rank_waits_for() {
    for (int channel = 0; channel < channels_.size(); ++channel) {
      const Channel& messages = messages_[static_cast<size_t>(channel)];
      const auto sender = static_cast<size_t>(channels_.sender(channel));
      if (messages.num_posted >= messages.num_sent || ranks_[sender].next == schedule_.ranks[sender].size())
        continue;
      post_next(channel);
      runnable_.wake(channels_.receiver(channel));
      return true;
    }
    return false;
  }

  const Schedule& schedule_;
  size_t capacity_;
  Channels channels_;
  std::vector<Channel> messages_;
  PerMessage<size_t> number_of_;  // its number in its channel
  std::vector<Rank> ranks_;
  Runnable runnable_;
};

}  // namespace

Schedule in_order_of_first_run(const Schedule& schedule, int channel_capacity) {
  return FirstRun(schedule, channel_capacity).run();
}

}  // namespace titan::pipeline
