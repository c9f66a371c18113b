#include "parallel/tensor/collective_exchange.h"

#include "titan/core/error.h"

namespace titan::tp {

CollectiveExchange::CollectiveExchange(std::shared_ptr<const TpGroup> group, const char* module)
    : group_(std::move(group)), module_(module) {
  traffic_->way = "at once, in Float8 where the products take it";
}

at::Tensor CollectiveExchange::gather_whole(const at::Tensor& part) const {
  traffic_->calls += 1;
  traffic_->bytes += static_cast<int64_t>(part.nbytes()) * (count() - 1);
  return group_->gather(part, /*dim=*/1, /*whole=*/-1, {"tp::gather", module_});
}

at::Tensor CollectiveExchange::scatter_whole(const at::Tensor& summand) const {
  traffic_->calls += 1;
  traffic_->bytes += static_cast<int64_t>(summand.nbytes()) / count() * (count() - 1);
  return group_->reduce_scatter(summand, /*dim=*/1, {"tp::reduce_scatter", module_});
}

std::unique_ptr<ops::SequenceExchange::Gather> CollectiveExchange::gather(const at::Tensor& /*part*/) const {
  TITAN_INTERNAL_ASSERT(false, "an exchange at once was asked for parts");
  return nullptr;
}

std::unique_ptr<ops::SequenceExchange::Scatter> CollectiveExchange::scatter() const {
  TITAN_INTERNAL_ASSERT(false, "an exchange at once was asked for parts");
  return nullptr;
}

}  // namespace titan::tp
