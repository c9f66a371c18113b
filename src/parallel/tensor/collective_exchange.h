#pragma once

// Parts of a sequence travel in one collective for all.

#include <memory>

#include "parallel/tensor/tp_group.h"
#include "parallel/tensor/traffic.h"
#include "titan/ops/sequence_exchange.h"

namespace titan::tp {

class CollectiveExchange final : public ops::SequenceExchange {
 public:
  explicit CollectiveExchange(std::shared_ptr<const TpGroup> group);

  int count() const override { return group_->count(); }
  bool at_once() const override { return true; }
  at::Tensor gather_whole(const at::Tensor& part, const char* module) const override;
  at::Tensor scatter_whole(const at::Tensor& summand, const char* module) const override;
  std::shared_ptr<const Traffic> traffic() const { return traffic_; }

 private:
  // Of parts: nobody asks.
  std::unique_ptr<Gather> gather(const at::Tensor& part, const char* module) const override;
  std::unique_ptr<Scatter> scatter(const char* module) const override;

  std::shared_ptr<const TpGroup> group_;
  std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();
};

}  // namespace titan::tp
