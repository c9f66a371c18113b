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
#include "titan/nn/layers.h"
#include "titan/tensor/dtensor.h"

namespace titan::tp {

struct PartOfParam {
  std::string name;  ///< within the module
  Placement placement;
  std::vector<int64_t> global_shape;
  bool gradient_is_summand = false;
};

struct SplitParams final : nn::ParamParts {
  SplitParams(DeviceMesh axis, const char* style) : axis(std::move(axis)), style(style) {}

  /// Null for a parameter outside the plan: whole, with whole gradients.
  const PartOfParam* find(std::string_view name) const {
    const auto found =
        std::find_if(parts.begin(), parts.end(), [&](const PartOfParam& p) { return p.name == name; });
    return found == parts.end() ? nullptr : &*found;
  }
  /// `data` describes this rank's part of the parameter as if it were a tensor of its own: the same elements
  /// as a part of the whole, on a mesh that has this axis too. The axis cuts first, the others cut its parts.
  DTensor within_whole(DTensor data, const PartOfParam& part) const {
    data.mesh = data.mesh.joined(axis);
    // Layers were split before their parts were sharded.
    data.cut_order = {data.mesh.num_axes() - 1};
    for (int i = 0; i + 1 < data.mesh.num_axes(); ++i) data.cut_order.push_back(i);
    data.placements.push_back(part.placement);
    data.global_shape = part.global_shape;
    if (!part.placement.is_shard()) return data;
    const auto dim = static_cast<size_t>(part.placement.dim);
    data.box.offset[dim] += chunk_of(part.global_shape[dim], axis.size(), axis.rank()).offset;
    return data;
  }

  DeviceMesh axis;
  const char* style;  ///< a literal, the name of the plan's style that cut the module
  std::vector<PartOfParam> parts;
  std::shared_ptr<Traffic> traffic = std::make_shared<Traffic>();  ///< of its own gathers, as a loss head's
  std::string layouts;  ///< of the activations, for plan_rows(): "in Replicate; out Shard(-1)"
  /// The traffic of the exchange that the module's product is part of; null: none is.
  std::shared_ptr<const Traffic> exchanged;
  const char* exchanged_collectives = "";  ///< a literal, what it comes to, forward / backward
};

/// Null for a module outside the plan, or null.
inline const SplitParams* split_params(const nn::HookHost* host) {
  return host ? dynamic_cast<const SplitParams*>(host->param_parts.get()) : nullptr;
}

}  // namespace titan::tp
