#pragma once

// Parts of a sequence travel by sends and receives, which every backend has.

#include <memory>

#include "parallel/tensor/conversion.h"
#include "titan/dist/collectives.h"
#include "titan/ops/sequence_exchange.h"

namespace titan::tp {

/// [Note: order of sends]
/// Each pair of ranks exchanges one message each way. A backend may queue all of a rank's messages on one
/// stream (NCCL does), where a message that waits for its peer holds up those behind it. So all ranks go
/// through the same N rounds, in each of which they meet in disjoint pairs; in a pair the lower rank sends
/// first and the higher one receives first.

/// Whom `rank` of `size` meets in a round, itself in one of them.
inline int peer_in_round(int rank, int size, int round) { return ((round - rank) % size + size) % size; }

class SendReceiveExchange final : public ops::SequenceExchange {
 public:
  /// `module`: interned, for records of calls. `way`: Traffic::way.
  SendReceiveExchange(std::shared_ptr<dist::Group> group, const char* module, std::string way)
      : group_(std::move(group)), module_(module) {
    traffic_->way = std::move(way);
  }

  int count() const override { return group_->size(); }
  const void* carrier() const override { return group_.get(); }
  std::unique_ptr<Gather> gather(const at::Tensor& part) const override;
  std::unique_ptr<Scatter> scatter() const override;
  std::shared_ptr<const Traffic> traffic() const { return traffic_; }

 private:
  std::shared_ptr<dist::Group> group_;
  const char* module_;
  std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();
};

}  // namespace titan::tp
