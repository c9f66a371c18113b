#pragma once

// The exchanges of a split module's activations and gradients.

#include <functional>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "dist/device_backend.h"
#include "parallel/tensor/conversion.h"
#include "titan/dist/collectives.h"
#include "titan/dist/device_mesh.h"
#include "titan/ops/linear.h"
#include "titan/parallel/tensor_parallel.h"

namespace titan::tp {

// The exchange through memory that the ranks of an axis share.

/// The state that all modules' exchanges share.
struct PeerPieces {
  std::unique_ptr<dist::SymmetricMemory> memory;
  bool taken = false;  ///< an exchange is using the pieces
};

class PeerMemoryExchange final : public ops::SequenceExchange {
 public:
  /// For a group of at least two ranks.
  explicit PeerMemoryExchange(std::shared_ptr<PeerPieces> pieces, bool chooses_by_size = false);

  int count() const override { return pieces_->memory->size(); }
  bool chooses_by_size() const override { return chooses_by_size_; }
  const void* carrier() const override { return pieces_.get(); }
  // One exchange at a time: the next can begin once the last one's object is destroyed.
  std::unique_ptr<Gather> gather(const at::Tensor& part) const override;
  std::unique_ptr<Scatter> scatter() const override;
  std::shared_ptr<const Traffic> traffic() const { return traffic_; }

 private:
  std::shared_ptr<PeerPieces> pieces_;
  bool chooses_by_size_;
  std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();
};

// Chooses the transport for parts of overlapped products: shared memory if all ranks of the axis can share
// it, otherwise sends and receives.

struct CountedExchange {
  std::shared_ptr<const ops::SequenceExchange> exchange;
  std::shared_ptr<const Traffic> traffic;
};

/// Makes a module's exchange; all have the same transport. `module` is its interned name.
using MakeExchange = std::function<CountedExchange(const char* module)>;

/// Collective over `axis`. Rank 0 logs the choice. Throws ConfigError on all ranks if symmetric memory was
/// asked for and isn't available.
MakeExchange choose_exchange(const DeviceMesh& axis, OverlapTransport transport = OverlapTransport::Auto);

/// For OverlapTransport::AtOnce.
MakeExchange collective_exchange(std::shared_ptr<const TpGroup> group);

}  // namespace titan::tp
