#pragma once

#include "titan/dist/collectives.h"

namespace titan::context {

/// Hands a tensor to the next rank of a group while it takes one from the rank before. One at a time.
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

}  // namespace titan::context
