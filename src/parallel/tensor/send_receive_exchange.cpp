#include "parallel/tensor/send_receive_exchange.h"

#include <ATen/ops/empty.h>

#include "parallel/tensor/rank_sum.h"
#include "titan/core/error.h"

namespace titan::tp {

namespace {

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

// The other ranks, in the order of the rounds.
std::vector<int> peers_of(const dist::Group& group) {
  std::vector<int> peers;
  for (int round = 0; round < group.size(); ++round) {
    const int peer = peer_in_round(group.rank(), group.size(), round);
    if (peer != group.rank()) peers.push_back(peer);
  }
  return peers;
}

class ReceivedParts final : public ops::SequenceExchange::Gather {
 public:
  ReceivedParts(dist::Group& group, const at::Tensor& own, dist::Label label, Traffic& traffic)
      : group_(group), own_(own), peers_(peers_of(group)) {
    std::vector<int64_t> sizes = own.sizes().vec();
    sizes.insert(sizes.begin(), group.size());
    parts_ = at::empty(sizes, own.options());
    received_.resize(static_cast<size_t>(group.size()));
    for (const int peer : peers_) start(peer, label);
    traffic.calls += 1;
    traffic.bytes += bytes_of(own) * (group.size() - 1);
  }
  ~ReceivedParts() override = default;

  // In the order in which they were asked for.
  int next() override {
    const size_t step = step_++;
    if (step == 0) return group_.rank();
    if (step <= peers_.size()) {
      received_[static_cast<size_t>(peers_[step - 1])].wait();
      return peers_[step - 1];
    }
    for (dist::Work& send : sends_) send.wait();
    sends_.clear();
    return -1;
  }
  at::Tensor part(int rank) const override { return rank == group_.rank() ? own_ : parts_[rank]; }

 private:
  void start(int peer, dist::Label label) {
    const auto receive = [&] {
      received_[static_cast<size_t>(peer)] = group_.receive(parts_[peer].view(-1), peer, label);
    };
    if (peer < group_.rank()) receive();
    sends_.push_back(group_.send(own_.view(-1), peer, label));
    if (peer > group_.rank()) receive();
  }

  dist::Group& group_;
  at::Tensor own_;
  at::Tensor parts_;  // [N, ...]; this rank's stays empty
  std::vector<int> peers_;
  std::vector<dist::Work> received_, sends_;
  size_t step_ = 0;
};

class SentSummands final : public ops::SequenceExchange::Scatter {
 public:
  SentSummands(dist::Group& group, dist::Label label, Traffic& traffic)
      : group_(group),
        label_(label),
        traffic_(traffic),
        ranks_(peers_of(group)),
        received_(static_cast<size_t>(group.size())) {
    ranks_.push_back(group.rank());
  }

  int next() override { return given_ == ranks_.size() ? -1 : ranks_[given_]; }

  void give(const at::Tensor& summand) override {
    const int rank = ranks_[given_++];
    if (!parts_.defined()) {
      std::vector<int64_t> sizes = summand.sizes().vec();
      sizes.insert(sizes.begin(), group_.size());
      parts_ = at::empty(sizes, summand.options());
    }
    if (rank == group_.rank()) {
      own_ = summand;
      return;
    }
    if (rank < group_.rank()) receive(rank);
    sends_.push_back(group_.send(summand.contiguous().view(-1), rank, label_));
    if (rank > group_.rank()) receive(rank);
    traffic_.bytes += bytes_of(summand);
  }

  at::Tensor finish() override {
    TITAN_INTERNAL_ASSERT(given_ == ranks_.size(), "a scatter that misses summands");
    traffic_.calls += 1;
    RankSum sum;
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (rank != group_.rank()) received_[static_cast<size_t>(rank)].wait();
      sum.add(rank == group_.rank() ? own_ : parts_[rank]);
    }
    for (dist::Work& send : sends_) send.wait();
    return sum.result();
  }

 private:
  void receive(int peer) {
    received_[static_cast<size_t>(peer)] = group_.receive(parts_[peer].view(-1), peer, label_);
  }

  dist::Group& group_;
  dist::Label label_;
  Traffic& traffic_;
  at::Tensor own_, parts_;
  std::vector<int> ranks_;  // in the order in which they are served, this one last
  std::vector<dist::Work> received_, sends_;
  size_t given_ = 0;
};

}  // namespace

std::unique_ptr<ops::SequenceExchange::Gather> SendReceiveExchange::gather(const at::Tensor& part) const {
  return std::make_unique<ReceivedParts>(*group_, part, dist::Label{"tp::gather parts", module_}, *traffic_);
}

std::unique_ptr<ops::SequenceExchange::Scatter> SendReceiveExchange::scatter() const {
  return std::make_unique<SentSummands>(*group_, dist::Label{"tp::scatter summands", module_}, *traffic_);
}

}  // namespace titan::tp
