#include "parallel/tensor/split_params.h"

#include <algorithm>

#include <torch/nn/module.h>

#include "parallel/interned.h"
#include "parallel/tensor/conversion.h"
#include "tensor/memory.h"
#include "titan/core/error.h"

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

namespace {

bool same_way(const PartOfParam& a, const PartOfParam& b) {
  return a.placement == b.placement && a.gradient_is_summand == b.gradient_is_summand;
}

std::string described(const PartOfParam& part) {
  return str(part.placement, part.gradient_is_summand ? " with summed gradients" : "");
}

}  // namespace

ParamCutter::ParamCutter(DeviceMesh axis, std::shared_ptr<const TpGroup> group,
                         const std::vector<NamedModule>& modules)
    : axis_(std::move(axis)), group_(std::move(group)) {
  for (const NamedModule& named : modules) {
    const auto* host = dynamic_cast<const nn::HookHost*>(named.module);
    const SplitParams* split = host ? split_params(*host) : nullptr;
    if (!split) continue;
    for (const auto& param : named.module->named_parameters(/*recurse=*/false))
      if (const PartOfParam* part = split->find(param.key()))
        cut_.try_emplace(param.value().unsafeGetTensorImpl(), Cut{*part, named.name});
  }
}

PartOfParam ParamCutter::cut(nn::HookHost& host, const std::string& name, const at::Tensor& tensor,
                             const nn::ParamSplit& param) {
  PartOfParam part{param.name, param.dim < 0 ? Placement::replicate() : Placement::shard(param.dim),
                   tensor.sizes().vec(), param.gradient_is_summand};
  const auto [known, is_new] = cut_.try_emplace(tensor.unsafeGetTensorImpl(), Cut{part, name});
  if (is_new) {
    if (part.gradient_is_summand) sum_gradient(host, tensor, group_, interned(name));
    if (part.placement.is_shard()) shrink(tensor, param.dim);
    return part;
  }
  const Cut& other = known->second;
  if (!same_way(other.part, part))
    throw ConfigError(str("parallelize: modules '", other.module, "' and '", name, "' share parameter '",
                          param.name, "' but are cut differently: ", described(other.part), " and ",
                          described(part)));
  part.global_shape = other.part.global_shape;
  return part;
}

void ParamCutter::shrink(const at::Tensor& tensor, int64_t dim) const {
  at::NoGradGuard no_grad;
  const Chunk mine = chunk_of(tensor.size(dim), axis_.size(), axis_.rank());
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes[static_cast<size_t>(dim)] = mine.length;
  const at::Tensor part =
      is_deferred(tensor)
          ? deferred_tensor(sizes, tensor.options())
          : tensor.detach().narrow(dim, mine.offset, mine.length).clone(at::MemoryFormat::Contiguous);
  at::Tensor(tensor).set_data(part);
}

void ParamCutter::check_users(const std::vector<NamedModule>& modules,
                              std::vector<std::string>& problems) const {
  for (const NamedModule& named : modules) {
    const auto* host = dynamic_cast<const nn::HookHost*>(named.module);
    const SplitParams* split = host ? split_params(*host) : nullptr;
    for (const auto& param : named.module->named_parameters(/*recurse=*/false)) {
      const auto cut = cut_.find(param.value().unsafeGetTensorImpl());
      if (cut == cut_.end() || (split && split->find(param.key()))) continue;
      problems.push_back(str("parallelize: module '", named.name, "' shares its parameter '", param.key(),
                             "' with '", cut->second.module, "', which the plan cuts (",
                             described(cut->second.part), "); it needs an entry of its own"));
    }
  }
}

}  // namespace titan::tp
