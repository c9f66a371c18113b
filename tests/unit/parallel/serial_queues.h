#pragma once

// A backend that processes each rank's messages one after the other and starts none before the peer has
// reached it (NCCL's sends and receives on one stream).

#include <deque>
#include <vector>

namespace titan::testing {

struct Message {
  int peer;
  bool is_send;
};

/// Whether all messages are delivered; otherwise some ranks wait for each other forever.
inline bool all_arrive(std::vector<std::deque<Message>> queues) {
  for (bool moved = true; moved;) {
    moved = false;
    for (int rank = 0; rank < static_cast<int>(queues.size()); ++rank) {
      auto& mine = queues[static_cast<size_t>(rank)];
      if (mine.empty()) continue;
      auto& theirs = queues[static_cast<size_t>(mine.front().peer)];
      if (theirs.empty() || theirs.front().peer != rank || theirs.front().is_send == mine.front().is_send)
        continue;
      mine.pop_front();
      theirs.pop_front();
      moved = true;
    }
  }
  for (const auto& queue : queues)
    if (!queue.empty()) return false;
  return true;
}

}  // namespace titan::testing
