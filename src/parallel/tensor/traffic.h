#pragma once

// What was moved among the ranks of the axis, counted for plan_rows().

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "parallel/tensor/tp_group.h"
#include "titan/ops/rank_parts.h"

namespace titan::tp {

struct Traffic {
  int64_t calls = 0;
  int64_t bytes = 0;       ///< received by this rank
  std::string way;         ///< of an exchange of parts, in words
  const char* phase = "";  ///< of a module's own gathers: the last call's
};

/// The ranks of the axis for one module, whose gathers are counted.
class CountedParts final : public ops::RankParts {
 public:
  /// `module`: interned, for labels.
  CountedParts(std::shared_ptr<const TpGroup> parts, std::shared_ptr<Traffic> traffic, const char* module)
      : parts_(std::move(parts)), traffic_(std::move(traffic)), module_(module) {}

  int index() const override { return parts_->index(); }
  int count() const override { return parts_->count(); }
  void all_gather(const at::Tensor& out, const at::Tensor& in, const char* phase) const override {
    traffic_->calls += 1;
    traffic_->phase = phase;
    traffic_->bytes += static_cast<int64_t>(in.nbytes()) * (count() - 1);
    parts_->group()->all_gather(out, in, {phase, module_}).wait();
  }

 private:
  std::shared_ptr<const TpGroup> parts_;
  std::shared_ptr<Traffic> traffic_;
  const char* module_;
};

}  // namespace titan::tp
