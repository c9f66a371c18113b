#pragma once

// The exchanges of a split module's activations and gradients, and their sums in rank order.

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

/// A sum over ranks, added in rank order: every run has the same bits.
/// 16-bit summands are added in fp32.
class RankSum {
 public:
  void add(const at::Tensor& summand) {
    if (sum_.defined()) {
      sum_.add_(summand);
      return;
    }
    dtype_ = summand.scalar_type();
    sum_ = summand.element_size() < 4 ? summand.to(at::kFloat) : summand.clone();
  }
  /// In the summands' dtype.
  at::Tensor result() const { return sum_.to(dtype_); }

 private:
  at::ScalarType dtype_ = at::kFloat;
  at::Tensor sum_;
};

// Parts of a sequence travel by sends and receives, which every backend has.

/// [Note: order of sends]
/// Each pair of ranks exchanges one message each way. A backend may queue all of a rank's messages on one
/// stream (NCCL does), where a message that waits for its peer holds up the later ones. So all ranks go
/// through the same N rounds, in each of which they meet in disjoint pairs; in a pair the lower rank sends
/// first and the higher one receives first.

/// The rank that `rank` of `size` meets in a round; itself in one of them.
inline int peer_in_round(int rank, int size, int round) { return ((round - rank) % size + size) % size; }

// Parts of a sequence travel through memory that the ranks of an axis share.

/// The state that all modules' exchanges share.
struct PeerPieces {
  std::unique_ptr<dist::SymmetricMemory> memory;
  bool taken = false;  ///< by an exchange that is under way
};

class PeerMemoryExchange final : public ops::SequenceExchange {
 public:
  /// For a group of at least two ranks.
  explicit PeerMemoryExchange(std::shared_ptr<PeerPieces> pieces);

  int count() const override { return pieces_->memory->size(); }
  const void* carrier() const override { return pieces_.get(); }
  // One exchange at a time: the next one can begin when the last one's object is destroyed.
  std::unique_ptr<Gather> gather(const at::Tensor& part) const override;
  std::unique_ptr<Scatter> scatter() const override;
  std::shared_ptr<const Traffic> traffic() const { return traffic_; }

 private:
  std::shared_ptr<PeerPieces> pieces_;
  std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();
};

// Chooses the transport for parts of overlapped products: shared memory where all ranks of the axis reach it,
// otherwise sends and receives.

struct CountedExchange {
  std::shared_ptr<const ops::SequenceExchange> exchange;
  std::shared_ptr<const Traffic> traffic;
};

/// The reason why the ranks of `group` can't all share memory, the same text on each; empty if they can.
/// Collective.
std::string why_not_all_share(dist::Group& group, const dist::DeviceBackend& devices);

/// Makes the exchanges of modules, all with one transport. `module`: its name, interned.
using MakeExchange = std::function<CountedExchange(const char* module)>;

/// Collective over `axis`. Rank 0 logs the choice. Throws ConfigError on all ranks if symmetric memory was
/// asked for and isn't available.
MakeExchange choose_exchange(const DeviceMesh& axis, OverlapTransport transport = OverlapTransport::Auto);

/// For OverlapTransport::AtOnce.
MakeExchange collective_exchange(std::shared_ptr<const TpGroup> group);

}  // namespace titan::tp
