#include "parallel/fsdp/float8_weights.h"

#include <algorithm>

#include <ATen/ops/empty.h>

#include "parallel/fsdp/param_group.h"
#include "titan/core/error.h"
#include "titan/float8/cast.h"
#include "titan/nn/linear.h"

namespace titan::fsdp {

int64_t Float8Weights::find(size_t slot) const {
  const auto found = std::find(slots.begin(), slots.end(), slot);
  return found == slots.end() ? -1 : found - slots.begin();
}

at::Tensor largest_of_ranks(const at::Tensor& amaxes, dist::Group& shards, const ops::RankParts* parts,
                            const char* name) {
  at::Tensor all = at::empty({shards.size(), amaxes.numel()}, amaxes.options());
  shards.all_gather(all.view(-1), amaxes, {"fsdp::float8_scales", name}).wait();
  at::Tensor largest = all.amax(0);
  if (!parts) return largest;
  all = at::empty({parts->count(), amaxes.numel()}, amaxes.options());
  parts->all_gather(all, largest, ops::kScalesPhase);
  return all.amax(0);
}

namespace {

// How all uses of a parameter multiply it; none where one of them is no linear layer in Float8.
std::optional<float8::WeightGather> gather_of(const ManagedParam& param) {
  std::optional<float8::WeightGather> how;
  for (const ManagedParam::Use& use : param.uses) {
    const auto* linear = dynamic_cast<const nn::LinearImpl*>(use.host);
    how = linear && use.name == "weight" ? float8::weight_gather(*linear->products()) : std::nullopt;
    if (!how) return std::nullopt;
  }
  return how;
}

}  // namespace

void ParamGroup::find_float8_weights() {
  std::vector<at::ScalarType> dtypes(params_.size(), param_dtype_);
  const bool wanted = layout_.num_ranks() > 1;
  for (size_t i = 0; wanted && i < params_.size(); ++i) {
    const auto how = gather_of(params_[i]);
    if (!how || params_[i].compute.numel() == 0) continue;
    TITAN_CHECK(!options_.cpu_offload,
                "fully_shard: weights that are gathered in Float8 can't be offloaded to the host");
    const auto parts = how->parts ? how->parts : float8_.how.parts;  // of the group's first that is cut
    float8_.how = *how;
    float8_.how.parts = parts;
    float8_.slots.push_back(i);
    dtypes[i] = how->dtype;
  }
  wire_ = WireLayout(layout_, dtypes);
}

// A weight that isn't cut has the same magnitudes on all ranks of the axis, so one answer serves for all.
const ops::RankParts* ParamGroup::ranks_of_parts() const {
  for (const ParamGroup* group : context_->groups())
    if (group->float8_.how.parts) return group->float8_.how.parts.get();
  return nullptr;
}

bool ParamGroup::lacks_float8_scales() const {
  return !float8_.empty() && !deferred() &&
         (!float8_.scales.defined() || float8_.version != flat_shard_._version());
}

// This group, or all that were written; never one whose bytes are in use: its products would read the new
// scales before they are there. With tensor parallelism always all: a reduction over that axis for each group
// would stand in the gather stream behind the gather before it, and the activations' collectives behind both.
std::vector<ParamGroup*> ParamGroup::due_for_scales(const ops::RankParts* parts) {
  if (!float8_.how.scales_at_once && !parts) return {this};
  std::vector<ParamGroup*> due;
  for (ParamGroup* group : context_->groups())
    if (group->lacks_float8_scales() && group->gather_group_->ranks() == gather_group_->ranks())
      due.push_back(group);
  return due;
}

void ParamGroup::refresh_float8_scales() {
  if (!lacks_float8_scales()) return;
  const ops::RankParts* parts = ranks_of_parts();
  const std::vector<ParamGroup*> due = due_for_scales(parts);
  std::vector<at::Tensor> chunks;
  for (const ParamGroup* group : due)
    for (const size_t slot : group->float8_.slots) {
      const Slot& layout = group->layout_.slots()[slot];
      chunks.push_back(group->flat_shard_.narrow(0, layout.offset, layout.chunk_numel()));
    }
  const at::Tensor largest = largest_of_ranks(float8::amax_many(chunks), *gather_group_, parts, name_);
  const at::Tensor scales = float8::scale_of(largest, float8_.how.dtype, float8_.how.power_of_two_scales);
  int64_t first = 0;
  for (ParamGroup* group : due) {
    const auto count = static_cast<int64_t>(group->float8_.slots.size());
    group->float8_.scales = scales.narrow(0, first, count);
    group->float8_.version = group->flat_shard_._version();
    first += count;
  }
}

// This rank's part where parameters travel in different dtypes.
at::Tensor ParamGroup::encode_part(const at::Tensor& place) const {
  for (size_t i = 0; i < params_.size(); ++i) {
    const Slot& slot = layout_.slots()[i];
    if (slot.chunk_numel() == 0) continue;
    const at::Tensor from = flat_shard_.narrow(0, slot.offset, slot.chunk_numel());
    const at::Tensor to = place.narrow(0, wire_.offset(i), wire_.chunk(i));
    const int64_t narrow = float8_.find(i);
    if (narrow < 0) {
      to.view(param_dtype_).copy_(from);
    } else {
      const at::Tensor data =
          float8::cast(from.unsqueeze(0), float8_.scales[narrow], float8_.how.dtype, /*transposed=*/false);
      to.copy_(data.view(at::kByte).view(-1));
    }
  }
  return place;
}

ops::Operand ParamGroup::float8_weight(size_t slot) const {
  TITAN_CHECK(state_ == State::Gathered, "the weight '", params_[slot].fqn, "' of '", name_,
              "' was used outside its module: it isn't gathered");
  const at::Tensor& compute = params_[slot].compute;
  const int64_t place = wire_.offset(slot) * layout_.num_ranks();
  const at::Tensor bytes = full_.view(at::kByte).narrow(0, place, compute.numel());
  ops::Operand weight;
  weight.dtype = param_dtype_;
  weight.along_rows = {bytes.view(float8_.how.dtype).view(compute.sizes()),
                       float8_.scales[float8_.find(slot)]};
  return weight;
}

ops::Operand GatheredWeight::weight() const {
  const auto group = group_.lock();
  TITAN_CHECK(group, "a weight that was gathered in Float8 is used after its model's shards are gone");
  return group->float8_weight(slot_);
}

}  // namespace titan::fsdp
