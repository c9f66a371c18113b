#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "parallel/scratch.h"
#include "titan/dist/collectives.h"
#include "titan/parallel/context_parallel.h"

namespace titan::context {

/// Sends a tensor to the next rank of a group while receiving one from the previous rank. One at a time.
class RingExchange {
 public:
  explicit RingExchange(std::shared_ptr<dist::Group> group) : group_(std::move(group)) {}

  /// `send` mustn't be written to, nor `receive` used, before wait(). Both contiguous, of the same size.
  void start(const at::Tensor& send, const at::Tensor& receive, dist::Label label);
  void wait();

 private:
  std::shared_ptr<dist::Group> group_;
  dist::Work sent_, received_;
};

// Keys and values on their way between ranks.

/// k, v [B, S, K, E] of one rank (or, added up, their gradients).
struct KeyValues {
  at::Tensor k, v;
  static KeyValues of_packed(const at::Tensor& packed) { return {packed.select(0, 0), packed.select(0, 1)}; }
  /// Copies both into one tensor [2, B, S, K, E] from `memory`: a message.
  at::Tensor pack(Scratch& memory) const;
};

/// Rotates the keys and values of all ranks through this one. At hop i they are those of rank (r - i) mod N.
class KeyValueRotation {
 public:
  virtual ~KeyValueRotation() = default;
  virtual void start(const KeyValues& own, dist::Label label) = 0;
  /// In order i = 1 .. N-1; waits for what is under way and starts what comes next. Valid until the next
  /// call.
  virtual KeyValues hop(int i) = 0;
};

std::unique_ptr<KeyValueRotation> make_rotation(std::shared_ptr<dist::Group> group,
                                                ContextRotateMethod method);

/// Sums the contributions of all ranks to the gradients of each rank's keys and values. The sums travel
/// around the ring one hop after the keys: rank r's contribution at hop i belongs to rank (r - i) mod N, and
/// so does the sum that it receives from rank r - 1, which added to it at hop i - 1. Transfers run during the
/// computation of the next hop. Sums are in fp32 (in float64 for float64).
class GradientRing {
 public:
  explicit GradientRing(std::shared_ptr<dist::Group> group) : exchange_(std::move(group)) {}

  /// Zeros for the contributions of the first hop, to gradients of keys like `k`; and those of the next.
  KeyValues start(const at::Tensor& k, at::ScalarType dtype, dist::Label label);
  KeyValues next();
  /// Passes on the sum so far, with this hop's contributions or (`contributed` false) without.
  void pass_on(bool contributed);
  /// The gradients of this rank's own keys, after the last hop. Valid until the next start().
  KeyValues finish();

 private:
  Scratch buffers_[3];
  RingExchange exchange_;
  dist::Label label_;
  at::Tensor contributions_, received_, sending_;  // packed
  bool first_ = true;
};

}  // namespace titan::context
