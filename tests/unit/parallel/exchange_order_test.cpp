// Sends and receives of overlapped products on a backend that works off each rank's messages one after the
// other, and starts none before its peer has come to it.

#include <gtest/gtest.h>

#include "parallel/tensor/send_receive_exchange.h"
#include "unit/parallel/serial_queues.h"

namespace titan::tp {
namespace {

using testing::Message;

// As SendReceiveExchange issues them.
std::deque<Message> messages_of(int rank, int size) {
  std::deque<Message> messages;
  for (int round = 0; round < size; ++round) {
    const int peer = peer_in_round(rank, size, round);
    if (peer == rank) continue;
    const bool sends_first = rank < peer;
    messages.push_back({peer, sends_first});
    messages.push_back({peer, !sends_first});
  }
  return messages;
}

class ExchangeOrder : public ::testing::TestWithParam<int> {};

TEST_P(ExchangeOrder, EndsWhereEachRankHasOneQueue) {
  const int size = GetParam();
  std::vector<std::deque<Message>> queues;
  for (int rank = 0; rank < size; ++rank) queues.push_back(messages_of(rank, size));
  EXPECT_TRUE(testing::all_arrive(queues));
}

TEST_P(ExchangeOrder, MeetsEveryPeerOnce) {
  const int size = GetParam();
  for (int rank = 0; rank < size; ++rank) {
    std::vector<int> met(static_cast<size_t>(size));
    for (int round = 0; round < size; ++round) {
      const int peer = peer_in_round(rank, size, round);
      EXPECT_EQ(peer_in_round(peer, size, round), rank);
      ++met[static_cast<size_t>(peer)];
    }
    EXPECT_EQ(met, std::vector<int>(static_cast<size_t>(size), 1));
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, ExchangeOrder, ::testing::Values(2, 3, 4, 5, 7, 8, 16));

}  // namespace
}  // namespace titan::tp
