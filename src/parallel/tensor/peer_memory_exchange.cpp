// [Note: order of accesses to shared memory]
//
// *Piece*: a rank's memory that its peers read and write. *Queue*: where a rank's copies and barriers run,
// one after the other (dist::SymmetricMemory). *Computation*: what the current stream does. *Exchange*: one
// gather or one scatter; all ranks make the same ones in the same order, one at a time. In each rank's queue:
//
//   gather   write own part to own piece | barrier A | read every peer's part           | barrier B
//   scatter  write each summand to the   | barrier A | (the computation sums up its own | barrier B
//            piece of its rank           |           |  piece, having waited for A)     |
//
// 1. Nothing is read before it is written. A write stands before its rank's A, a read after the reader's A,
//    and no queue passes A before all have come to it.
// 2. Nothing is overwritten before it is read. The queue reads before its rank's B. The computation's sum was
//    given to it before B was asked for, and the queue does nothing before what the computation had by then.
//    The next exchange writes after the writer's B, which no queue passes before all have come to it. So one
//    piece serves all exchanges, of whatever kind and size.
// 3. The computation sees what arrived: it waits for a moment after the read, or after A. The queue sees
//    what the computation made, a part or a summand, by the rule of 2; and neither the tensors it reads nor
//    those it fills go before the computation has waited for a moment after them, so the allocator hands
//    their memory to nobody who would run before.
// 4. No rank waits forever. The queue waits for computation that was there before, and the computation for
//    moments that are in the queue already: in the order in which a rank asks for things, none waits for a
//    later one. Barriers come in the same order on all ranks. So even a device that does strictly one thing
//    after the other (CUDA with one connection) comes to the end.
//
// The unit tests hold 1 to 3 by logical clocks, and 4 by ranks that do each thing when it is asked for.
//
// Pieces are read in gathers, written in scatters: a gather's part is there before its readers come, and a
// summand is wanted by one rank only. Rank r meets r+1, r+2, ...: at each step all meet different ones.

#include "parallel/tensor/exchanges.h"

#include <exception>
#include <vector>

#include <ATen/ops/empty.h>

#include "titan/core/error.h"

namespace titan::tp {

namespace {

using Moment = dist::SymmetricMemory::Moment;

int64_t buffer_bytes(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

// The peer of `memory`'s rank at a step; the rank itself at steps 0 and N.
int peer_at(const dist::SymmetricMemory& memory, int step) { return (memory.rank() + step) % memory.size(); }

// Holds the pieces for one exchange.
class Turn {
 public:
  explicit Turn(bool& taken) : taken_(taken) {
    TITAN_INTERNAL_ASSERT(!taken, "an exchange of sequence parts begins before the last one's end");
    taken_ = true;
  }
  ~Turn() { taken_ = false; }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  bool& taken_;
};

// If an error ends an exchange early, its tensors must live until the queue is done with them.
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
      : turn_(pieces.taken), memory_(*pieces.memory), own_(own) {
    std::vector<int64_t> sizes = own.sizes().vec();
    sizes.insert(sizes.begin(), memory_.size());
    parts_ = at::empty(sizes, own.options());
    memory_.reserve(buffer_bytes(own));
    memory_.write(memory_.rank(), 0, own);
    memory_.barrier();  // A
    for (int step = 1; step < memory_.size(); ++step) {
      const int peer = peer_at(memory_, step);
      memory_.read(parts_[peer], peer, 0);
      arrived_.push_back(memory_.now());
    }
    memory_.barrier();  // B
    traffic.calls += 1;
    traffic.bytes += buffer_bytes(own) * (memory_.size() - 1);
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
  at::Tensor part(int rank) const override { return rank == memory_.rank() ? own_ : parts_[rank]; }

 private:
  Turn turn_;
  dist::SymmetricMemory& memory_;
  at::Tensor own_;
  at::Tensor parts_;             // [N, ...]; this rank's stays empty
  std::vector<Moment> arrived_;  // by step, from 1 on
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
    traffic_.bytes += buffer_bytes(summand);
    if (given_ + 1 < memory_.size()) return;
    // Here, not in finish(): the queue needn't wait for what is computed meanwhile.
    memory_.barrier();  // A
    arrived_ = memory_.now();
  }

  at::Tensor finish() override {
    TITAN_INTERNAL_ASSERT(given_ == memory_.size(), "a scatter that misses summands");
    memory_.wait(arrived_);
    RankSum sum;
    for (int rank = 0; rank < memory_.size(); ++rank)
      sum.add(rank == memory_.rank() ? own_ : memory_.mine(rank * stride_, own_.sizes(), own_.scalar_type()));
    memory_.barrier();  // B
    summands_.clear();
    traffic_.calls += 1;
    return sum.result();
  }

 private:
  // A place for every rank's summand in each piece.
  void make_room(const at::Tensor& summand) {
    constexpr int64_t alignment = dist::SymmetricMemory::kAlignment;
    stride_ = (buffer_bytes(summand) + alignment - 1) / alignment * alignment;
    memory_.reserve(stride_ * memory_.size());
  }

  Turn turn_;
  dist::SymmetricMemory& memory_;
  Traffic& traffic_;
  int64_t stride_ = 0;
  at::Tensor own_;
  std::vector<at::Tensor> summands_;  // on their way
  Moment arrived_ = 0;
  int given_ = 0;
};

}  // namespace

PeerMemoryExchange::PeerMemoryExchange(std::shared_ptr<PeerPieces> pieces) : pieces_(std::move(pieces)) {
  TITAN_CHECK(count() > 1, "an exchange through symmetric memory needs two or more ranks; the group has one");
  traffic_->way = "through symmetric memory";
}

std::unique_ptr<ops::SequenceExchange::Gather> PeerMemoryExchange::gather(const at::Tensor& part) const {
  return std::make_unique<ReadParts>(*pieces_, part, *traffic_);
}

std::unique_ptr<ops::SequenceExchange::Scatter> PeerMemoryExchange::scatter() const {
  return std::make_unique<WrittenSummands>(*pieces_, *traffic_);
}

}  // namespace titan::tp
