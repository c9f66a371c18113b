#pragma once

// Parts of a sequence travel by sends and receives, which every backend has.

#include <memory>

#include "parallel/tensor/conversion.h"
#include "titan/dist/collectives.h"
#include "titan/ops/sequence_exchange.h"

namespace titan::tp {

/// [Note: order of sends]
/// Each pair of ranks exchanges one message each way. Where a backend queues a pair's messages on one stream
/// (NCCL), two sends that wait for each other's receive would never end: the lower rank of a pair sends
/// first, the higher one receives first.
class SendReceiveExchange final : public ops::SequenceExchange {
 public:
  /// `module`: interned, for labels.
  SendReceiveExchange(std::shared_ptr<dist::Group> group, const char* module)
      : group_(std::move(group)), module_(module) {}

  int count() const override { return group_->size(); }
  std::unique_ptr<Gather> gather(const at::Tensor& part) const override;
  std::unique_ptr<Scatter> scatter() const override;
  std::shared_ptr<const Traffic> traffic() const { return traffic_; }

 private:
  std::shared_ptr<dist::Group> group_;
  const char* module_;
  std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();
};

}  // namespace titan::tp
