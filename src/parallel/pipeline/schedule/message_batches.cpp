#include "parallel/pipeline/schedule/dependencies.h"
#include "titan/parallel/pipeline_batches.h"

namespace titan::pipeline {

namespace {

struct Message {
  Action send;
  size_t sent_at = 0, received_at = 0;  // positions in the two ranks' lists
};

bool is_send(const Action& action) {
  return action.kind == Action::Kind::SendForward || action.kind == Action::Kind::SendBackward;
}

// Per channel, in the order of the sends, which is that of the receives.
std::vector<std::vector<Message>> list_messages(const Schedule& schedule, const Channels& channels) {
  std::vector<std::vector<Message>> messages(static_cast<size_t>(channels.size()));
  std::vector<size_t> num_received(messages.size(), 0);
  for (const std::vector<Action>& actions : schedule.ranks)
    for (size_t i = 0; i < actions.size(); ++i)
      if (is_send(actions[i]))
        messages[static_cast<size_t>(channels.of(actions[i]))].push_back({actions[i], i, 0});
  for (const std::vector<Action>& actions : schedule.ranks)
    for (size_t i = 0; i < actions.size(); ++i)
      if (is_communication(actions[i].kind) && !is_send(actions[i])) {
        const auto channel = static_cast<size_t>(channels.of(actions[i]));
        messages[channel].at(num_received[channel]++).received_at = i;
      }
  return messages;
}

}  // namespace

std::vector<std::vector<bool>> joined_with_next(const Schedule& schedule, const MayJoin& may_join) {
  std::vector<std::vector<bool>> joined;
  for (const std::vector<Action>& actions : schedule.ranks) joined.emplace_back(actions.size(), false);
  const Channels channels(schedule);
  const auto messages = list_messages(schedule, channels);
  for (int channel = 0; channel < channels.size(); ++channel) {
    const std::vector<Message>& list = messages[static_cast<size_t>(channel)];
    for (size_t i = 1; i < list.size(); ++i) {
      const Message &one = list[i - 1], &next = list[i];
      if (next.sent_at != one.sent_at + 1 || next.received_at != one.received_at + 1) continue;
      if (!may_join(one.send, next.send)) continue;
      joined[static_cast<size_t>(channels.sender(channel))][one.sent_at] = true;
      joined[static_cast<size_t>(channels.receiver(channel))][one.received_at] = true;
    }
  }
  return joined;
}

}  // namespace titan::pipeline
