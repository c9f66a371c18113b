#pragma once

// Parts of a sequence travel through memory that the ranks read and write in each other's place.

#include <memory>

#include "parallel/tensor/traffic.h"
#include "titan/dist/peer_memory.h"
#include "titan/ops/sequence_exchange.h"

namespace titan::tp {

class PeerMemoryExchange final : public ops::SequenceExchange {
 public:
  /// Of at least two ranks.
  explicit PeerMemoryExchange(std::unique_ptr<dist::PeerMemory> memory);

  int count() const override { return memory_->size(); }
  // One exchange at a time: the next begins when the object of the last is gone.
  std::unique_ptr<Gather> gather(const at::Tensor& part, const char* module) const override;
  std::unique_ptr<Scatter> scatter(const char* module) const override;
  std::shared_ptr<const Traffic> traffic() const { return traffic_; }

 private:
  std::unique_ptr<dist::PeerMemory> memory_;
  std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();
  mutable bool taken_ = false;
};

}  // namespace titan::tp
