#pragma once

// How parallelize() cut a module's own parameters.

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

  /// Null for a parameter outside the plan, which is whole and has whole gradients.
  const PartOfParam* find(std::string_view name) const {
    const auto found =
        std::find_if(parts.begin(), parts.end(), [&](const PartOfParam& p) { return p.name == name; });
    return found == parts.end() ? nullptr : &*found;
  }
  /// `data` describes this rank's part of the parameter as an independent tensor. Returns the same elements
  /// as part of the whole parameter, on a mesh with this axis added. This axis cuts first, the others cut its
  /// parts.
  DTensor within_whole(DTensor data, const PartOfParam& part) const {
    data.mesh = data.mesh.joined(axis);
    // Parameters were split before their parts were sharded.
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
  const char* style;  ///< a literal: the plan's style that cut the module
  std::vector<PartOfParam> parts;
  std::shared_ptr<Traffic> traffic = std::make_shared<Traffic>();  ///< the module's own gathers
  std::string layouts;  ///< activation layouts, for plan_rows(): "in Replicate; out Shard(-1)"
  /// The traffic of the exchange that overlaps the module's product; null without overlap.
  std::shared_ptr<const Traffic> exchanged;
  const char* exchanged_collectives = "";  ///< a literal: its collectives, forward / backward
};

/// Null for a module outside the plan, or null.
inline const SplitParams* split_params(const nn::HookHost* host) {
  return host ? dynamic_cast<const SplitParams*>(host->param_parts.get()) : nullptr;
}

}  // namespace titan::tp
