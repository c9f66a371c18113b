#include "parallel/tensor/split_params.h"

#include <algorithm>

namespace titan::tp {

const PartOfParam* SplitParams::find(std::string_view name) const {
  const auto found =
      std::find_if(parts_.begin(), parts_.end(), [&](const PartOfParam& p) { return p.name == name; });
  return found == parts_.end() ? nullptr : &*found;
}

DTensor SplitParams::within_whole(DTensor data, const PartOfParam& part) const {
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

const SplitParams* split_params(const nn::HookHost& host) {
  return dynamic_cast<const SplitParams*>(host.param_parts.get());
}

}  // namespace titan::tp
