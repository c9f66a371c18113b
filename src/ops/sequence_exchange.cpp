#include "titan/ops/sequence_exchange.h"

#include "titan/core/error.h"

namespace titan::ops {

at::Tensor SequenceExchange::gather_whole(const at::Tensor& /*part*/) const {
  TITAN_INTERNAL_ASSERT(false, "an exchange of parts was asked for the whole");
  return {};
}

at::Tensor SequenceExchange::scatter_whole(const at::Tensor& /*summand*/) const {
  TITAN_INTERNAL_ASSERT(false, "an exchange of parts was asked for the whole");
  return {};
}

}  // namespace titan::ops
