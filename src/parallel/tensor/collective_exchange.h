#pragma once

// Parts of a sequence travel in one collective for all.

#include <memory>

#include "parallel/tensor/tp_group.h"
#include "parallel/tensor/traffic.h"
#include "titan/ops/sequence_exchange.h"

namespace titan::tp {

class CollectiveExchange final : public ops::SequenceExchange {
 public:
  /// `module`: interned, for records of calls.
  CollectiveExchange(std::shared_ptr<const TpGroup> group, const char* module);

  int count() const override { return group_->count(); }
  const void* carrier() const override { return group_.get(); }
  bool at_once() const override { return true; }
  at::Tensor gather_whole(const at::Tensor& part) const override;
  at::Tensor scatter_whole(const at::Tensor& summand) const override;
  std::shared_ptr<const Traffic> traffic() const { return traffic_; }

 private:
  // Of parts: nobody asks.
  std::unique_ptr<Gather> gather(const at::Tensor& part) const override;
  std::unique_ptr<Scatter> scatter() const override;

  std::shared_ptr<const TpGroup> group_;
  const char* module_;
  std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();
};

}  // namespace titan::tp
