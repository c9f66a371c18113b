#include "parallel/tensor/exchanges.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "dist/device_backend.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::tp {

CollectiveExchange::CollectiveExchange(std::shared_ptr<const TpGroup> group, const char* module)
    : group_(std::move(group)), module_(module) {
  traffic_->way = "at once, in Float8 where the products take it";
}

at::Tensor CollectiveExchange::gather_whole(const at::Tensor& part) const {
  traffic_->calls += 1;
  traffic_->bytes += static_cast<int64_t>(part.nbytes()) * (count() - 1);
  return group_->gather(part, /*dim=*/1, /*whole=*/-1, {"tp::gather", module_});
}

at::Tensor CollectiveExchange::scatter_whole(const at::Tensor& summand) const {
  traffic_->calls += 1;
  traffic_->bytes += static_cast<int64_t>(summand.nbytes()) / count() * (count() - 1);
  return group_->reduce_scatter(summand, /*dim=*/1, {"tp::reduce_scatter", module_});
}

std::unique_ptr<ops::SequenceExchange::Gather> CollectiveExchange::gather(const at::Tensor& /*part*/) const {
  TITAN_INTERNAL_ASSERT(false, "an exchange at once was asked for parts");
  return nullptr;
}

std::unique_ptr<ops::SequenceExchange::Scatter> CollectiveExchange::scatter() const {
  TITAN_INTERNAL_ASSERT(false, "an exchange at once was asked for parts");
  return nullptr;
}

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

  // In the order of the requests.
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

namespace {

constexpr dist::Label kLabel{"tp::choose_exchange"};

std::string names_of(const std::vector<int>& ranks) {
  std::string names;
  for (const int rank : ranks) names += str(names.empty() ? "" : "-", rank);
  return names;
}

std::unique_ptr<dist::SymmetricMemory> make_symmetric_memory(const DeviceMesh& axis,
                                                             dist::DeviceBackend& devices) {
  const dist::World& world = axis.world();
  const auto store = c10::intrusive_ptr<c10d::Store>::reclaim_copy(&world.store());
  const auto own_store =
      c10::make_intrusive<c10d::PrefixStore>(str("peer_memory/", names_of(axis.ranks())), store);
  const auto group = axis.group();
  return devices.make_symmetric_memory(
      {group->name(), own_store, group->rank(), group->size(), world.timeout()});
}

template <class Exchange>
CountedExchange counted(std::shared_ptr<const Exchange> exchange) {
  return {exchange, exchange->traffic()};
}

void log_choice(const std::string& text) {
  log::info_rank0(str("asynchronous tensor parallelism: parts travel ", text));
}

// For --print-plan, where there are no real ranks to ask.
std::string way_of_plan(OverlapTransport transport) {
  switch (transport) {
    case OverlapTransport::Auto:
      return "sent and received, or through symmetric memory over NVLink";
    case OverlapTransport::SymmetricMemory:
      return "through symmetric memory";
    case OverlapTransport::SendReceive:
      return "sent and received";
    case OverlapTransport::AtOnce:
      return "at once";
  }
  return "";
}

}  // namespace

std::string why_not_all_share(dist::Group& group, const dist::DeviceBackend& devices) {
  const auto addresses = group.all_gather_text(devices.device_address(), kLabel);
  std::string mine;
  for (int peer = 0; peer < group.size() && mine.empty(); ++peer) {
    if (peer == group.rank()) continue;
    const std::string why = devices.why_no_symmetric_memory(addresses[static_cast<size_t>(peer)]);
    if (!why.empty())
      mine = str("rank ", group.ranks()[static_cast<size_t>(group.rank())], " can't share memory with rank ",
                 group.ranks()[static_cast<size_t>(peer)], ": ", why);
  }
  for (const std::string& why : group.all_gather_text(mine, kLabel))
    if (!why.empty()) return why;
  return "";
}

namespace {

std::string why_no_symmetric_memory(const DeviceMesh& axis, dist::DeviceBackend* devices) {
  return devices ? why_not_all_share(*axis.group(), *devices)
                 : str("the backend is ", axis.world().backend());
}

}  // namespace

MakeExchange collective_exchange(std::shared_ptr<const TpGroup> group) {
  return [group = std::move(group)](const char* module) {
    return counted(std::make_shared<const CollectiveExchange>(group, module));
  };
}

MakeExchange choose_exchange(const DeviceMesh& axis, OverlapTransport transport) {
  const auto group = axis.group();
  const std::string carrier = group->backend_name();
  const auto sends = [&](const std::string& way) -> MakeExchange {
    return [group, way](const char* module) {
      return counted(std::make_shared<const SendReceiveExchange>(group, module, way));
    };
  };
  if (group->size() == 1 || carrier == "fake") return sends(way_of_plan(transport));
  if (transport == OverlapTransport::SendReceive) {
    log_choice("by sends and receives, as the settings say");
    return sends(way_of_plan(transport));
  }
  dist::DeviceBackend* devices = carrier == "nccl" ? dist::device_backend() : nullptr;
  const std::string why = why_no_symmetric_memory(axis, devices);
  if (!why.empty() && transport == OverlapTransport::SymmetricMemory)
    throw ConfigError("parallelism.async_tensor_parallel_transport = \"symmetric_memory\": " + why);
  if (!why.empty()) {
    log_choice(str("by sends and receives, as ", why));
    return sends(way_of_plan(OverlapTransport::SendReceive));
  }
  log_choice("through symmetric memory");
  const auto pieces = std::make_shared<PeerPieces>(PeerPieces{make_symmetric_memory(axis, *devices)});
  // Their copies aren't calls of a group: no record takes the module's name.
  return [pieces](const char* /*module*/) {
    return counted(std::make_shared<const PeerMemoryExchange>(pieces));
  };
}

}  // namespace titan::tp
