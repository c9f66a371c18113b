#pragma once

// Parts of a sequence travel through memory that the ranks read and write in each other's place.

#include <memory>

#include "parallel/tensor/traffic.h"
#include "titan/dist/peer_memory.h"
#include "titan/ops/sequence_exchange.h"

namespace titan::tp {

/// What all modules' exchanges share.
struct PeerPieces {
  std::unique_ptr<dist::PeerMemory> memory;
  bool taken = false;  ///< by an exchange that is under way
};

class PeerMemoryExchange final : public ops::SequenceExchange {
 public:
  /// Of at least two ranks.
  explicit PeerMemoryExchange(std::shared_ptr<PeerPieces> pieces);

  int count() const override { return pieces_->memory->size(); }
  const void* carrier() const override { return pieces_.get(); }
  // One exchange at a time: the next begins when the object of the last is gone.
  std::unique_ptr<Gather> gather(const at::Tensor& part) const override;
  std::unique_ptr<Scatter> scatter() const override;
  std::shared_ptr<const Traffic> traffic() const { return traffic_; }

 private:
  std::shared_ptr<PeerPieces> pieces_;
  std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();
};

}  // namespace titan::tp
