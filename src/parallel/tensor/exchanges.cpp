#include "parallel/tensor/exchanges.h"

#include <exception>
#include <vector>

#include <ATen/ops/empty.h>

#include "ops/operators.h"
#include "parallel/peer_memory.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::tp {

namespace {

int64_t nbytes(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

// Uninitialized [N, ...], with a place for each rank's part.
at::Tensor empty_parts(const at::Tensor& part, int num_ranks) {
  std::vector<int64_t> sizes = part.sizes().vec();
  sizes.insert(sizes.begin(), num_ranks);
  return at::empty(sizes, part.options());
}

// The parts [B, S/N, F] of a gather, each in its place; with one row (B), they are the whole.
at::Tensor places_of(const at::Tensor& own, int rank, int num_ranks) {
  at::Tensor parts = empty_parts(own, num_ranks);
  parts[rank].copy_(own);
  return parts;
}

// [B, S, F] of parts [N, B, S/N, F].
at::Tensor in_order(const at::Tensor& parts) {
  return parts.transpose(0, 1).reshape({parts.size(1), parts.size(0) * parts.size(2), parts.size(3)});
}

// In rank order, so that every run gives the same bits.
at::Tensor sum_of(const std::vector<at::Tensor>& summands) {
  static const auto op = ops::find_operator<decltype(ops::composite::sum_of_parts)>("titan::sum_of_parts");
  return op.call(summands);
}

// [Note: order of sends]
// Each pair of ranks exchanges one message each way. A backend may queue all of a rank's messages on one
// stream (NCCL does), where a message that waits for its peer blocks the later ones. So there are N rounds,
// the same on all ranks, and each round pairs the ranks for one exchange.

// The other ranks, in the order of the rounds. In one of the rounds a rank is its own peer.
std::vector<int> peers_of(const dist::Group& group) {
  std::vector<int> peers;
  for (int round = 0; round < group.size(); ++round) {
    const int peer = (round - group.rank() + group.size()) % group.size();
    if (peer != group.rank()) peers.push_back(peer);
  }
  return peers;
}

class ReceivedParts final : public ops::SequenceExchange::Gather {
 public:
  ReceivedParts(dist::Group& group, const at::Tensor& own, dist::Label label, Traffic& traffic)
      : group_(group),
        own_(own),
        parts_(places_of(own, group.rank(), group.size())),
        peers_(peers_of(group)) {
    for (const int peer : peers_)
      exchanges_.push_back(group.exchange(own_.view(-1), peer, parts_[peer].view(-1), peer, label));
    traffic.calls += 1;
    traffic.bytes += nbytes(own) * (group.size() - 1);
  }

  // Waits for the parts in the order of the requests.
  int next() override {
    const size_t step = step_++;
    if (step == 0) return group_.rank();
    if (step <= peers_.size()) {
      exchanges_[step - 1].received.wait();
      return peers_[step - 1];
    }
    for (dist::Exchange& exchange : exchanges_) exchange.sent.wait();
    return -1;
  }
  at::Tensor part(int rank) const override { return parts_[rank]; }
  at::Tensor whole() const override { return in_order(parts_); }

 private:
  dist::Group& group_;
  at::Tensor own_;    // until it is sent
  at::Tensor parts_;  // [N, ...]
  std::vector<int> peers_;
  std::vector<dist::Exchange> exchanges_;  // by round
  size_t step_ = 0;
};

class SentSummands final : public ops::SequenceExchange::Scatter {
 public:
  SentSummands(dist::Group& group, dist::Label label, Traffic& traffic)
      : group_(group),
        label_(label),
        traffic_(traffic),
        ranks_(peers_of(group)),
        exchanges_(static_cast<size_t>(group.size())) {
    ranks_.push_back(group.rank());
  }

  int next() override { return given_ == ranks_.size() ? -1 : ranks_[given_]; }

  void give(const at::Tensor& summand) override {
    const int rank = ranks_[given_++];
    if (!parts_.defined()) parts_ = empty_parts(summand, group_.size());
    if (rank == group_.rank()) {
      own_ = summand;
      return;
    }
    exchanges_[static_cast<size_t>(rank)] =
        group_.exchange(summand.contiguous().view(-1), rank, parts_[rank].view(-1), rank, label_);
    traffic_.bytes += nbytes(summand);
  }

  at::Tensor finish() override {
    TITAN_INTERNAL_ASSERT(given_ == ranks_.size(), "a scatter is missing summands");
    traffic_.calls += 1;
    std::vector<at::Tensor> summands;
    for (int rank = 0; rank < group_.size(); ++rank) {
      exchanges_[static_cast<size_t>(rank)].wait();  // this rank's own is empty
      summands.push_back(rank == group_.rank() ? own_ : parts_[rank]);
    }
    return sum_of(summands);
  }

 private:
  dist::Group& group_;
  dist::Label label_;
  Traffic& traffic_;
  at::Tensor own_, parts_;
  std::vector<int> ranks_;                 // in the order of the rounds, this rank last
  std::vector<dist::Exchange> exchanges_;  // by rank
  size_t given_ = 0;
};

class SendReceiveExchange final : public ops::SequenceExchange {
 public:
  /// `module`: interned, for records of calls. `way`: Traffic::way.
  SendReceiveExchange(std::shared_ptr<dist::Group> group, const char* module, std::string way,
                      bool chooses_by_size)
      : group_(std::move(group)), module_(module), chooses_by_size_(chooses_by_size) {
    traffic_->way = std::move(way);
  }

  int count() const override { return group_->size(); }
  bool chooses_by_size() const override { return chooses_by_size_; }
  const void* carrier() const override { return group_.get(); }
  std::unique_ptr<Gather> gather(const at::Tensor& part) const override {
    return std::make_unique<ReceivedParts>(*group_, part, dist::Label{"tp::gather parts", module_},
                                           *traffic_);
  }
  std::unique_ptr<Scatter> scatter() const override {
    return std::make_unique<SentSummands>(*group_, dist::Label{"tp::scatter summands", module_}, *traffic_);
  }
  std::shared_ptr<const Traffic> traffic() const { return traffic_; }

 private:
  std::shared_ptr<dist::Group> group_;
  const char* module_;
  bool chooses_by_size_;
  std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();
};

class CollectiveExchange final : public ops::SequenceExchange {
 public:
  /// `module`: interned, for records of calls.
  CollectiveExchange(std::shared_ptr<const TpGroup> group, const char* module)
      : group_(std::move(group)), module_(module) {
    traffic_->way = "at once, in Float8 where the products take it";
  }

  int count() const override { return group_->count(); }
  const void* carrier() const override { return group_.get(); }
  bool at_once() const override { return true; }
  at::Tensor gather_whole(const at::Tensor& part) const override {
    traffic_->calls += 1;
    traffic_->bytes += nbytes(part) * (count() - 1);
    return group_->gather(part, /*dim=*/1, /*whole=*/-1, {"tp::gather", module_});
  }
  at::Tensor scatter_whole(const at::Tensor& summand) const override {
    traffic_->calls += 1;
    traffic_->bytes += nbytes(summand) / count() * (count() - 1);
    return group_->reduce_scatter(summand, /*dim=*/1, {"tp::reduce_scatter", module_});
  }
  std::shared_ptr<const Traffic> traffic() const { return traffic_; }

 private:
  // Never called, because this exchange is one collective.
  std::unique_ptr<Gather> gather(const at::Tensor& /*part*/) const override {
    TITAN_INTERNAL_ASSERT(false, "a collective exchange was asked for single parts");
    return nullptr;
  }
  std::unique_ptr<Scatter> scatter() const override {
    TITAN_INTERNAL_ASSERT(false, "a collective exchange was asked for single parts");
    return nullptr;
  }

  std::shared_ptr<const TpGroup> group_;
  const char* module_;
  std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();
};

}  // namespace

// [Note: order of accesses to shared memory]
//
// *Piece*: a rank's memory that its peers read and write. *Queue*: where a rank's copies and barriers run,
// one after the other (dist::SymmetricMemory). *Computation*: the work of the current stream. *Exchange*: one
// gather or one scatter; all ranks make the same ones in the same order, one at a time. Each rank's queue
// runs:
//
//   gather   write own part to own piece | barrier A | read every peer's part           | barrier B
//   scatter  write each summand to the   | barrier A | (the computation sums up its own | barrier B
//            piece of its rank           |           |  piece, having waited for A)     |
//
// 1. Nothing is read before it is written. A write is before its rank's A, a read is after the reader's A,
//    and no queue passes A before all ranks reach it.
// 2. Nothing is overwritten before it is read. The queue's reads are before its rank's B. The computation's
//    sum is requested before B, and each request of the queue waits for all work that the computation has
//    been given before it. The next exchange writes after the writer's B, which no queue passes before all
//    ranks reach it. So one piece serves all exchanges, of any kind and size.
// 3. The computation sees the data that arrived, because it waits for a moment after the read, or after A.
//    The queue sees the computation's parts and summands by the rule in 2. Tensors that the queue reads or
//    fills are freed only after the computation has waited for a moment after their use, so the allocator
//    can't reuse their memory too early.
// 4. No rank waits forever. The queue waits only for earlier computation, and the computation only for
//    moments that are in the queue already: in the order of a rank's requests, none waits for a later one.
//    Barriers have the same order on all ranks. So even a device that runs one thing after the other (CUDA
//    with one connection) finishes.
//
// The unit tests check 1 to 3 with logical clocks, and 4 with ranks that run each request when it is made.
//
// Gathers read from the peers' pieces, because the parts exist before the readers come. Scatters write to
// them, because only one rank needs a summand. Rank r's peers are r+1, r+2, ..., so that at each step all
// ranks have different peers.

namespace {

using Moment = dist::SymmetricMemory::Moment;

// The peer of `memory`'s rank at a step; the rank itself at steps 0 and N.
int peer_at(const dist::SymmetricMemory& memory, int step) { return (memory.rank() + step) % memory.size(); }

// Reserves the pieces for one exchange.
class Turn {
 public:
  explicit Turn(bool& taken) : taken_(taken) {
    TITAN_INTERNAL_ASSERT(!taken, "an exchange of sequence parts begins before the last one has ended");
    taken_ = true;
  }
  ~Turn() { taken_ = false; }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  bool& taken_;
};

// If an error ends an exchange early, its tensors must live until the queue has finished with them.
void wait_quietly(dist::SymmetricMemory& memory) {
  try {
    memory.wait(memory.now());
  } catch (const std::exception&) {
    // The device has failed; the error in flight reports it.
  }
}

class ReadParts final : public ops::SequenceExchange::Gather {
 public:
  ReadParts(PeerPieces& pieces, const at::Tensor& own, Traffic& traffic)
      : turn_(pieces.taken),
        memory_(*pieces.memory),
        own_(own),
        parts_(places_of(own, memory_.rank(), memory_.size())) {
    memory_.reserve(nbytes(own));
    memory_.write(memory_.rank(), 0, own);
    memory_.barrier();  // A
    for (int step = 1; step < memory_.size(); ++step) {
      const int peer = peer_at(memory_, step);
      memory_.read(parts_[peer], peer, 0);
      arrived_.push_back(memory_.now());
    }
    memory_.barrier();  // B
    traffic.calls += 1;
    traffic.bytes += nbytes(own) * (memory_.size() - 1);
  }
  ~ReadParts() override {
    if (step_ < memory_.size()) wait_quietly(memory_);
  }

  int next() override {
    if (step_ == memory_.size()) return -1;
    const int step = step_++;
    if (step > 0) memory_.wait(arrived_[static_cast<size_t>(step - 1)]);
    return peer_at(memory_, step);
  }
  at::Tensor part(int rank) const override { return parts_[rank]; }
  at::Tensor whole() const override { return in_order(parts_); }

 private:
  Turn turn_;
  dist::SymmetricMemory& memory_;
  at::Tensor own_;               // until the queue has read it
  at::Tensor parts_;             // [N, ...]
  std::vector<Moment> arrived_;  // per step, from step 1 on
  int step_ = 0;
};

class WrittenSummands final : public ops::SequenceExchange::Scatter {
 public:
  WrittenSummands(PeerPieces& pieces, Traffic& traffic)
      : turn_(pieces.taken), memory_(*pieces.memory), traffic_(traffic) {}
  ~WrittenSummands() override {
    if (!summands_.empty()) wait_quietly(memory_);
  }

  int next() override { return given_ == memory_.size() ? -1 : peer_at(memory_, given_ + 1); }

  void give(const at::Tensor& summand) override {
    const int rank = next();
    if (given_++ == 0) make_room(summand);
    if (rank == memory_.rank()) {
      own_ = summand;
      return;
    }
    summands_.push_back(summand.contiguous());
    memory_.write(rank, memory_.rank() * stride_, summands_.back());
    traffic_.bytes += nbytes(summand);
    if (given_ + 1 < memory_.size()) return;
    // Here, not in finish(), so that the queue doesn't wait for computation in between.
    memory_.barrier();  // A
    arrived_ = memory_.now();
  }

  at::Tensor finish() override {
    TITAN_INTERNAL_ASSERT(given_ == memory_.size(), "a scatter is missing summands");
    memory_.wait(arrived_);
    std::vector<at::Tensor> summands;
    for (int rank = 0; rank < memory_.size(); ++rank)
      summands.push_back(
          rank == memory_.rank() ? own_ : memory_.mine(rank * stride_, own_.sizes(), own_.scalar_type()));
    const at::Tensor sum = sum_of(summands);
    memory_.barrier();  // B
    summands_.clear();
    traffic_.calls += 1;
    return sum;
  }

 private:
  // Reserves a place for every rank's summand in each piece.
  void make_room(const at::Tensor& summand) {
    constexpr int64_t alignment = dist::SymmetricMemory::kAlignment;
    stride_ = (nbytes(summand) + alignment - 1) / alignment * alignment;
    memory_.reserve(stride_ * memory_.size());
  }

  Turn turn_;
  dist::SymmetricMemory& memory_;
  Traffic& traffic_;
  int64_t stride_ = 0;
  at::Tensor own_;
  std::vector<at::Tensor> summands_;  // being written to the peers
  Moment arrived_ = 0;
  int given_ = 0;
};

// ---- the choice of a transport

template <class Exchange>
CountedExchange counted(std::shared_ptr<const Exchange> exchange) {
  return {exchange, exchange->traffic()};
}

void log_choice(const std::string& text) {
  log::info_rank0(str("asynchronous tensor parallelism: parts travel ", text));
}

// The transport for --print-plan, where no real ranks exist to ask.
std::string way_of_plan(OverlapTransport transport) {
  constexpr const char* kWays[] = {"sent and received, or through symmetric memory over NVLink",
                                   "through symmetric memory", "sent and received", "at once"};
  return kWays[static_cast<size_t>(transport)];
}

}  // namespace

PeerMemoryExchange::PeerMemoryExchange(std::shared_ptr<PeerPieces> pieces, bool chooses_by_size)
    : pieces_(std::move(pieces)), chooses_by_size_(chooses_by_size) {
  TITAN_CHECK(count() > 1,
              "an exchange through symmetric memory needs two or more ranks, but the group has one");
  traffic_->way = "through symmetric memory";
}

std::unique_ptr<ops::SequenceExchange::Gather> PeerMemoryExchange::gather(const at::Tensor& part) const {
  return std::make_unique<ReadParts>(*pieces_, part, *traffic_);
}

std::unique_ptr<ops::SequenceExchange::Scatter> PeerMemoryExchange::scatter() const {
  return std::make_unique<WrittenSummands>(*pieces_, *traffic_);
}

MakeExchange collective_exchange(std::shared_ptr<const TpGroup> group) {
  return [group = std::move(group)](const char* module) {
    return counted(std::make_shared<const CollectiveExchange>(group, module));
  };
}

MakeExchange choose_exchange(const DeviceMesh& axis, OverlapTransport transport) {
  const auto group = axis.group();
  const bool by_size = transport == OverlapTransport::Auto;
  const auto sends = [&](const std::string& way) -> MakeExchange {
    return [group, way, by_size](const char* module) {
      return counted(std::make_shared<const SendReceiveExchange>(group, module, way, by_size));
    };
  };
  if (group->size() == 1 || group->backend_name() == "fake") return sends(way_of_plan(transport));
  if (transport == OverlapTransport::SendReceive) {
    log_choice("by sends and receives, as the settings say");
    return sends(way_of_plan(transport));
  }
  const std::string why = why_no_peer_memory(axis);
  if (!why.empty() && transport == OverlapTransport::SymmetricMemory)
    throw ConfigError("parallelism.async_tensor_parallel_transport = \"symmetric_memory\": " + why);
  if (!why.empty()) {
    log_choice(str("by sends and receives, as ", why));
    return sends(way_of_plan(OverlapTransport::SendReceive));
  }
  log_choice("through symmetric memory");
  const auto pieces = std::make_shared<PeerPieces>(PeerPieces{make_peer_memory(axis)});
  // The copies aren't calls of a group, so no record needs the module's name.
  return [pieces, by_size](const char* /*module*/) {
    return counted(std::make_shared<const PeerMemoryExchange>(pieces, by_size));
  };
}

}  // namespace titan::tp
