#pragma once

// Memory that the ranks of one host lend each other: each has a piece of the same size, in which the others
// read and write without its help. A GPU's is in the plugin (over NVLink); no other device has one.

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace titan::dist {

/// The pieces of a group's ranks, and a queue of copies that runs beside the computation, which is what the
/// current stream does. All ranks make the same calls of reserve() and barrier() in the same order.
class PeerMemory {
 public:
  /// Of the queue: behind everything that was asked for before it.
  using Moment = int64_t;
  /// Offsets into a piece, in bytes, are multiples of this.
  static constexpr int64_t kAlignment = 256;

  virtual ~PeerMemory() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Makes every rank's piece `bytes` large, if it is smaller. What was in it is lost then, and the host
  /// waits for all ranks. Throws Error where the ranks can't reach each other's memory.
  virtual void reserve(int64_t bytes) = 0;
  /// A tensor in this rank's own piece, until that grows.
  virtual at::Tensor mine(int64_t offset, at::IntArrayRef sizes, at::ScalarType dtype) = 0;

  // These return at once. Each is done after those asked for before it, and after what the computation had
  // been given by then. Tensors are contiguous, and live until the computation has waited for a later moment.

  virtual void read(const at::Tensor& target, int peer, int64_t offset) = 0;
  /// `peer` may be this rank.
  virtual void write(int peer, int64_t offset, const at::Tensor& source) = 0;
  /// Goes on when every rank's queue has come to it.
  virtual void barrier() = 0;

  virtual Moment now() = 0;
  /// What the computation is given from now on is done after `moment`. Doesn't block the host.
  virtual void wait(Moment moment) = 0;
};

}  // namespace titan::dist
