#pragma once

// The record that parallelize() keeps of a module's own parameters.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/tensor/conversion.h"
#include "titan/dist/device_mesh.h"
#include "titan/nn/hooks.h"
#include "titan/tensor/dtensor.h"

namespace titan::tp {

struct PartOfParam {
  std::string name;  ///< within the module
  Placement placement;
  std::vector<int64_t> global_shape;
  bool gradient_is_summand = false;
};

class SplitParams final : public nn::ParamParts {
 public:
  /// `style`: a literal, the name of the plan's style that cut the module.
  SplitParams(DeviceMesh axis, const char* style) : axis_(std::move(axis)), style_(style) {}

  void add(PartOfParam part) { parts_.push_back(std::move(part)); }
  /// Null for a parameter outside the plan: whole, with whole gradients.
  const PartOfParam* find(std::string_view name) const {
    const auto found =
        std::find_if(parts_.begin(), parts_.end(), [&](const PartOfParam& p) { return p.name == name; });
    return found == parts_.end() ? nullptr : &*found;
  }
  const std::vector<PartOfParam>& parts() const { return parts_; }
  const DeviceMesh& axis() const { return axis_; }
  const char* style() const { return style_; }
  /// Layouts of the activations, for plan_rows(): "in Replicate; out Shard(-1)".
  void set_layouts(std::string layouts) { layouts_ = std::move(layouts); }
  const std::string& layouts() const { return layouts_; }
  /// Traffic of the exchange that the module's product is part of; null: none is. `collectives`: a literal,
  /// what it comes to, forward / backward.
  void set_exchanged(std::shared_ptr<const Traffic> exchanged, const char* collectives) {
    exchanged_ = std::move(exchanged);
    exchanged_collectives_ = collectives;
  }
  const std::shared_ptr<const Traffic>& exchanged() const { return exchanged_; }
  const char* exchanged_collectives() const { return exchanged_collectives_; }
  /// Traffic of the module's own gathers, as a loss head's.
  const std::shared_ptr<Traffic>& traffic() const { return traffic_; }

  /// `data` describes this rank's part of the parameter as if it were a tensor of its own: the same elements
  /// as a part of the whole, on a mesh that has this axis too. The axis cuts first, the others cut its parts.
  DTensor within_whole(DTensor data, const PartOfParam& part) const {
    data.mesh = data.mesh.joined(axis_);
    // Layers were split before their parts were sharded.
    data.cut_order = {data.mesh.num_axes() - 1};
    for (int axis = 0; axis + 1 < data.mesh.num_axes(); ++axis) data.cut_order.push_back(axis);
    data.placements.push_back(part.placement);
    data.global_shape = part.global_shape;
    if (!part.placement.is_shard()) return data;
    const auto dim = static_cast<size_t>(part.placement.dim);
    data.box.offset[dim] += chunk_of(part.global_shape[dim], axis_.size(), axis_.rank()).offset;
    return data;
  }

 private:
  DeviceMesh axis_;
  const char* style_;
  std::vector<PartOfParam> parts_;
  std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();
  std::string layouts_;
  std::shared_ptr<const Traffic> exchanged_;
  const char* exchanged_collectives_ = "";
};

/// Null for a module outside the plan, or null.
inline const SplitParams* split_params(const nn::HookHost* host) {
  return host ? dynamic_cast<const SplitParams*>(host->param_parts.get()) : nullptr;
}

}  // namespace titan::tp
