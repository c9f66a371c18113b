// ParamGroup's gather, from shards to compute parameters: start_gather issues the all-gather, finish_unshard
// waits for it. Weights in Float8 are cast first, with scales that all ranks agree on.

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/split_with_sizes_copy.h>
#include <torch/csrc/autograd/variable.h>

#include "dist/stream_clock.h"
#include "float8/cast.h"
#include "parallel/fsdp/param_group.h"
#include "tensor/memory.h"
#include "titan/core/error.h"
#include "titan/nn/layers.h"

namespace titan::fsdp {

int64_t Float8Weights::find(size_t slot) const {
  const auto found = std::find(slots.begin(), slots.end(), slot);
  return found == slots.end() ? -1 : found - slots.begin();
}

namespace {

// The elementwise maximum over the ranks of the shards and of the tensor-parallel parts. A NaN stays,
// although a reduction's maximum may lose it.
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

// The Float8 gather that all uses of a parameter share; none unless every use is a linear layer in Float8.
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
    const auto parts = how->parts ? how->parts : float8_.how.parts;  // from the first tensor-parallel weight
    float8_.how = *how;
    float8_.how.parts = parts;
    float8_.slots.push_back(i);
    dtypes[i] = how->dtype;
  }
  wire_ = WireLayout(layout_, dtypes);
}

// A weight that isn't split has the same magnitudes on all ranks of the axis, so one result serves all.
const ops::RankParts* ParamGroup::ranks_of_parts() const {
  for (const ParamGroup* group : context_->groups())
    if (group->float8_.how.parts) return group->float8_.how.parts.get();
  return nullptr;
}

bool ParamGroup::lacks_float8_scales() const {
  return !float8_.empty() && !deferred() &&
         (!float8_.scales.defined() || float8_.version != flat_shard_._version());
}

// Returns this group, or every group whose shards changed. Groups whose bytes are in use are left out,
// because running products would see the new scales too early. With tensor parallelism it always returns all:
// one reduction over that axis per group would wait in the gather stream for the gather before it, and the
// activations' collectives would wait for both.
std::vector<ParamGroup*> ParamGroup::due_for_scales(const ops::RankParts* parts) {
  if (!float8_.how.scales_at_once && !parts) return {this};
  std::vector<ParamGroup*> due;
  for (ParamGroup* group : context_->groups())
    if (group->lacks_float8_scales() && group->gather_group_->ranks() == gather_group_->ranks())
      due.push_back(group);
  return due;
}

// `reader` is the stream of the products.
void ParamGroup::refresh_float8_scales(const dist::Stream& reader) {
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
  const ops::ScaledMatrix made =
      float8::scale_and_inverse_of(largest, float8_.how.dtype, float8_.how.power_of_two_scales);
  reader.keep_alive(made.scale);
  reader.keep_alive(made.inverse);
  int64_t first = 0;
  for (ParamGroup* group : due) {
    const auto count = static_cast<int64_t>(group->float8_.slots.size());
    group->float8_.scales = made.scale.narrow(0, first, count);
    group->float8_.inverses = made.inverse.narrow(0, first, count);
    group->float8_.version = group->flat_shard_._version();
    first += count;
  }
}

// Casts this rank's chunks to the dtypes that they are sent in. `places`: where each slot's chunk goes.
void ParamGroup::encode_chunks(const std::vector<at::Tensor>& places) const {
  std::vector<at::Tensor> wide_places, wide_chunks, narrow_places, narrow_chunks;
  for (size_t i = 0; i < params_.size(); ++i) {
    const Slot& slot = layout_.slots()[i];
    const at::Tensor from = flat_shard_.narrow(0, slot.offset, slot.chunk_numel());
    if (float8_.find(i) >= 0) {  // all have scales, also empty chunks
      narrow_places.push_back(places[i].view(float8_.how.dtype));
      narrow_chunks.push_back(from.unsqueeze(0));
    } else if (from.numel() > 0) {
      wide_places.push_back(places[i].view(param_dtype_));
      wide_chunks.push_back(from);
    }
  }
  float8::cast_into_many(narrow_places, narrow_chunks, float8_.scales);
  if (!wide_places.empty()) at::_foreach_copy_(wide_places, wide_chunks);
}

ops::Operand ParamGroup::float8_weight(size_t slot) const {
  TITAN_CHECK(state_ == State::Gathered, "the weight '", params_[slot].fqn, "' of '", name_,
              "' was used outside its module: it isn't gathered");
  const at::Tensor& compute = params_[slot].compute;
  const int64_t place = wire_.offset(slot) * layout_.num_ranks();
  const at::Tensor bytes = full_.view(at::kByte).narrow(0, place, compute.numel());
  ops::Operand weight;
  weight.dtype = param_dtype_;
  const int64_t i = float8_.find(slot);
  weight.along_rows = {bytes.view(float8_.how.dtype).view(compute.sizes()), float8_.scales[i],
                       float8_.inverses[i]};
  return weight;
}

// Caches of derived values, such as scales, check a parameter's version. A gather writes its memory without
// LibTorch noticing, so the versions are raised here.
void ParamGroup::bump_compute_versions() {
  if (announced_version_ == flat_shard_._version()) return;
  announced_version_ = flat_shard_._version();
  for (const ManagedParam& param : params_) {
    param.compute.unsafeGetTensorImpl()->bump_version();
    // The parameter may be a view. LibTorch would consider the group's node outdated and replace it by a
    // node of the view.
    auto* view = torch::autograd::impl::get_view_autograd_meta(param.compute);
    if (view && view->has_bw_view()) view->set_attr_version(static_cast<uint32_t>(param.compute._version()));
  }
}

void ParamGroup::start_unshard() {
  bump_compute_versions();
  if (state_ == State::Gathered && (!stale() || holds_whole_parameters())) return;
  if (state_ == State::Gathering && !stale()) return;
  cancel_unshard();
  TITAN_CHECK(!deferred(), "the parameters of '", name_,
              "' have no values yet: call titan::materialize(model, seed) before the first forward");
  at::NoGradGuard no_grad;
  reshard();
  // A part kept for a backward that didn't use it (embeddings don't read their weight) may be outdated.
  if (kept_part_.defined() && stale())
    context_->pool.release(std::exchange(kept_part_, {}), context_->gather_stream);  // a gather may read it
  gathered_version_ = flat_shard_._version();
  if (!holds_whole_parameters()) {
    start_gather();
    return context_->count_gathered(1);
  }
  bind_compute_params(flat_shard_);
  state_ = State::Gathered;
}

void ParamGroup::start_gather() {
  const dist::Stream compute = compute_stream();
  context_->gather_stream.wait(compute);  // the optimizer may have written the shards there
  dist::StreamGuard on_gather_stream(context_->gather_stream);
  dist::Group* group = kept_part_.defined() ? small_gather_group_.get() : gather_group_.get();
  gathering_parts_ = group ? group->size() : 1;
  const int64_t numel = wire_.part() * layout_.num_ranks();
  const int64_t part = numel / gathering_parts_;
  if (!kept_part_.defined()) refresh_float8_scales(compute);
  if (gathers_in_place()) return start_gather_in_place();
  packed_ = context_->pool.acquire(numel, wire_.dtype(), context_->gather_stream);
  const at::Tensor mine = part_for_gather(packed_.narrow(0, group ? group->rank() * part : 0, part));
  gather_work_ = group ? group->all_gather(packed_, mine, {"fsdp::all_gather", name_}) : dist::Work();
  state_ = State::Gathering;
}

// A backend that takes several calls at once gathers each parameter to its place: nothing is copied afterwards.
bool ParamGroup::gathers_in_place() const {
  return gather_group_ && !kept_part_.defined() && !options_.cpu_offload &&
         gather_group_->has_batches(device_);
}

void ParamGroup::start_gather_in_place() {
  at::Tensor full =
      context_->pool.acquire(wire_.part() * layout_.num_ranks(), wire_.dtype(), context_->gather_stream);
  std::vector<at::Tensor> wholes, places, chunks;
  for (size_t i = 0; i < params_.size(); ++i) {
    const int64_t chunk = wire_.chunk(i);
    wholes.push_back(full.narrow(0, wire_.offset(i) * layout_.num_ranks(), chunk * layout_.num_ranks()));
    places.push_back(wholes[i].narrow(0, gather_group_->rank() * chunk, chunk));
    chunks.push_back(flat_shard_.narrow(0, layout_.slots()[i].offset, layout_.slots()[i].chunk_numel()));
  }
  // The shards aren't registered: then a call's source wouldn't be, and its destination would.
  const bool sends_shards = float8_.empty() && dtype_ == param_dtype_ && !context_->pool.is_registered();
  if (!float8_.empty()) {
    encode_chunks(places);
  } else if (!sends_shards) {
    at::_foreach_copy_(places, chunks);
  }
  std::vector<at::Tensor> to, from;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (wholes[i].numel() == 0) continue;
    to.push_back(wholes[i]);
    from.push_back(sends_shards ? chunks[i] : places[i]);
  }
  if (!to.empty()) gather_work_ = gather_group_->all_gather(to, from, {"fsdp::all_gather", name_});
  full_ = std::move(full);
  state_ = State::Gathering;
}

// This rank's part, on the device and in the dtype that is sent. `place` is its place in the gathered buffer.
at::Tensor ParamGroup::part_for_gather(const at::Tensor& place) {
  if (kept_part_.defined()) return kept_part_;
  if (!float8_.empty()) {
    std::vector<at::Tensor> places;
    for (size_t i = 0; i < params_.size(); ++i)
      places.push_back(place.narrow(0, wire_.offset(i), wire_.chunk(i)));
    encode_chunks(places);
    return place;
  }
  if (!options_.cpu_offload) return dtype_ == param_dtype_ ? flat_shard_ : place.copy_(flat_shard_);
  if (dtype_ == param_dtype_) return place.copy_(flat_shard_, /*non_blocking=*/true);
  // Cast on the device: a copy that also casts would cast on the host and block.
  at::Tensor arrived = context_->pool.acquire(place.numel(), dtype_, context_->gather_stream);
  arrived.copy_(flat_shard_, /*non_blocking=*/true);
  place.copy_(arrived);
  context_->pool.release(std::move(arrived), context_->gather_stream);
  return place;
}

void ParamGroup::wait_for_gather() {
  dist::StreamGuard on_gather_stream(context_->gather_stream);
  gather_work_.wait();
}

void ParamGroup::cancel_unshard() {
  if (state_ != State::Gathering) return;
  wait_for_gather();
  context_->pool.release(std::exchange(packed_.defined() ? packed_ : full_, {}), context_->gather_stream);
  state_ = State::Sharded;
  context_->count_gathered(-1);
}

void ParamGroup::finish_unshard() {
  if (state_ != State::Gathering) return;
  at::NoGradGuard no_grad;
  wait_for_gather();
  {
    const dist::PeerWait waiting("all_gather");
    compute_stream().wait(context_->gather_stream);
  }
  if (packed_.defined() && layout_.num_ranks() == 1) {  // the part is the whole
    full_ = std::exchange(packed_, {});
  } else if (packed_.defined()) {
    full_ = context_->pool.acquire(packed_.numel(), wire_.dtype(), compute_stream());
    unpack_gathered();
    context_->pool.release(std::exchange(packed_, {}), compute_stream());
  }
  if (kept_part_.defined()) context_->pool.release(std::exchange(kept_part_, {}), compute_stream());
  bind_compute_params(full_);
  state_ = State::Gathered;
}

// From part-major (each rank's chunks of all parameters) to parameter-major (each parameter whole).
void ParamGroup::unpack_gathered() {
  const int64_t parts = gathering_parts_, chunks = layout_.num_ranks() / parts;
  const int64_t part_numel = wire_.part() * chunks;
  if (!device_.is_cpu()) {
    std::vector<at::Tensor> targets;
    std::vector<int64_t> sizes;
    const auto take = [&](int64_t full_begin, int64_t numel) {
      if (numel == 0) return;
      sizes.push_back(numel * chunks);
      targets.push_back(full_.narrow(0, full_begin, numel * layout_.num_ranks()).view({parts, -1}));
    };
    for (size_t i = 0; i < layout_.slots().size(); ++i) {
      const int64_t full_offset = wire_.offset(i) * layout_.num_ranks();
      take(full_offset, wire_.chunk(i));
      // The padding after each chunk moves to the end of the region, so that the parameter itself is
      // contiguous.
      take(full_offset + wire_.chunk(i) * layout_.num_ranks(),
           wire_.end(i) - wire_.offset(i) - wire_.chunk(i));
    }
    const at::Tensor packed = packed_.view({parts, part_numel});
    // It copies a table from the host's memory, which a launch of a graph would read again.
    if (!dist::Stream::current(device_).is_recorded())
      return at::split_with_sizes_copy_out(targets, packed, sizes, 1);
    for (size_t i = 0, from = 0; i < targets.size(); from += static_cast<size_t>(sizes[i++]))
      targets[i].copy_(packed.narrow(1, static_cast<int64_t>(from), sizes[i]));
    return;
  }
  const auto element = static_cast<int64_t>(full_.element_size());
  const char* from = static_cast<const char*>(packed_.const_data_ptr());
  char* to = static_cast<char*>(full_.mutable_data_ptr());
  const auto num_slots = static_cast<int64_t>(layout_.slots().size());
  at::parallel_for(0, parts * num_slots, 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t part = piece / num_slots;
      const auto slot = static_cast<size_t>(piece % num_slots);
      const int64_t numel = wire_.chunk(slot) * chunks, offset = wire_.offset(slot);
      // Parts of a slot follow each other without padding, so that a whole parameter is contiguous.
      std::memcpy(to + (offset * layout_.num_ranks() + part * numel) * element,
                  from + (part * part_numel + offset * chunks) * element,
                  static_cast<size_t>(numel * element));
    }
  });
}

void ParamGroup::bind_compute_params(const at::Tensor& full) {
  const auto element = static_cast<int64_t>(full.element_size());
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].compute.numel() == 0 || float8_.find(i) >= 0) continue;
    if (param_storage::bytes(params_[i].compute) > 0) param_storage::free(params_[i].compute);
    param_storage::bind(params_[i].compute, full, wire_.offset(i) * layout_.num_ranks() * element);
  }
}

void ParamGroup::reshard() {
  if (holds_whole_parameters()) return;
  cancel_unshard();
  if (state_ != State::Gathered) return;
  for (const ManagedParam& param : params_) param_storage::free(param.compute);
  context_->pool.release(std::exchange(full_, {}), compute_stream());
  state_ = State::Sharded;
  context_->count_gathered(-1);
}

void ParamGroup::after_forward() {
  using Kind = ReshardAfterForward::Kind;
  const Kind kind = options_.reshard_after_forward.kind;
  if (kind == Kind::Never || (kind == Kind::Default && is_root_)) return;
  if (kind == Kind::ToSize && at::GradMode::is_enabled()) keep_part_of_gathered();
  reshard();
}

void ParamGroup::keep_part_of_gathered() {
  if (!small_gather_group_ || state_ != State::Gathered || !backward_reads_parameters_) return;
  at::NoGradGuard no_grad;
  const int64_t parts = small_gather_group_->size(), chunks = layout_.num_ranks() / parts;
  const int64_t mine = small_gather_group_->rank();
  kept_part_ = context_->pool.acquire(wire_.part() * chunks, wire_.dtype(), compute_stream());
  for (size_t i = 0; i < layout_.slots().size(); ++i) {
    const int64_t numel = wire_.chunk(i) * chunks;
    kept_part_.narrow(0, wire_.offset(i) * chunks, numel)
        .copy_(full_.narrow(0, wire_.offset(i) * layout_.num_ranks() + mine * numel, numel));
  }
}

}  // namespace titan::fsdp
