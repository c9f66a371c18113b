#include "parallel/context/ring_exchange.h"

namespace titan::context {

// Even ranks send first, odd ones receive first. A backend that runs its calls one behind the other (NCCL)
// would stand still if all of them sent; this way, in a ring of any size, somebody is at the other end.
void RingExchange::start(const at::Tensor& send, const at::Tensor& receive, dist::Label label) {
  const int rank = group_->rank(), size = group_->size();
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  if (rank % 2 == 0) sent_ = group_->send(send, next, label);
  received_ = group_->receive(receive, previous, label);
  if (rank % 2 != 0) sent_ = group_->send(send, next, label);
}

void RingExchange::wait() {
  received_.wait();
  sent_.wait();
}

}  // namespace titan::context
