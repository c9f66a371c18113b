#pragma once

// A group: the parameters that one fully_shard call gathers and reduces together ([Note: FSDP tensors] in
// shard_layout.h).

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "float8/products.h"
#include "parallel/fsdp/comm_context.h"
#include "parallel/fsdp/gradient_collector.h"
#include "parallel/fsdp/shard_layout.h"
#include "tensor/memory.h"
#include "titan/dist/collectives.h"
#include "titan/nn/hooks.h"
#include "titan/ops/linear.h"
#include "titan/parallel/fsdp.h"
#include "titan/tensor/dtensor.h"

namespace titan::fsdp {

/// The weights of a group that are gathered in Float8, and their scales.
struct Float8Weights {
  std::vector<size_t> slots;
  float8::WeightGather how;  ///< the same for all, because there is one recipe
  at::Tensor scales;         ///< [slots], computed from the shards' version `version`
  at::Tensor inverses;       ///< 1 / scales
  uint32_t version = 0;

  bool empty() const { return slots.empty(); }
  /// The index of `slot` in `slots`, or -1.
  int64_t find(size_t slot) const;
};

/// A parameter to be put into a group, with the modules that own it and its name in each. A tied parameter
/// has several uses.
struct ManagedParam {
  struct Use {
    nn::HookHost* host = nullptr;  ///< null for a module of LibTorch inside a hookable one
    std::string name;              ///< within its module
  };
  at::Tensor compute;
  std::vector<Use> uses;
  std::string fqn;  ///< below the wrapped module, for messages
  /// Tensor-parallel axis over which its gradients are summands.
  std::optional<DeviceMesh> summand_axis = std::nullopt;
};

class ParamGroup : public nn::ParamOwner, public std::enable_shared_from_this<ParamGroup> {
 public:
  /// Replaces the parameters' memory by shards. All `params` have one dtype and device.
  static std::shared_ptr<ParamGroup> create(std::vector<ManagedParam> params, const FsdpOptions& options);
  ~ParamGroup() override;

  // ---- gathering
  /// Starts the gather unless the parameters are gathered or being gathered.
  void start_unshard();
  /// Waits for it and gives the compute parameters their memory.
  void finish_unshard();
  /// Cancels an unused gather.
  void cancel_unshard();
  /// Frees the compute parameters' memory if it is a gathered copy.
  void reshard();
  /// Follows the policy after a forward: reshard, keep, or keep a part on a smaller mesh.
  void after_forward();

  // ---- prefetching: other groups, instead of the next `options().prefetch`
  using Groups = std::vector<std::weak_ptr<ParamGroup>>;
  void set_forward_prefetch(Groups next) { forward_prefetch_ = std::move(next); }
  void set_backward_prefetch(Groups next) { backward_prefetch_ = std::move(next); }
  const std::optional<Groups>& forward_prefetch() const { return forward_prefetch_; }
  const std::optional<Groups>& backward_prefetch() const { return backward_prefetch_; }

  // ---- reducing
  /// Adds scale * grad to the gradient that this backward has collected for a slot. `grad` has the whole
  /// parameter's shape; `scale` is a scalar tensor, or undefined for 1.
  void take_grad(size_t slot, const at::Tensor& grad, const at::Tensor& scale);
  /// The same for a product, which writes to the collected gradients itself if it can.
  void take_grad(size_t slot, const ops::WeightGrad& grad);
  void take_grad(size_t slot, const ops::DueGradient& grad) { take_grad(slot, grad.compute(), {}); }
  /// Lends memory for a slot's gradient, and takes it back with scale * its values added ([Note: lent
  /// gradients]).
  std::vector<at::Tensor> lend_grad(size_t slot, at::ScalarType dtype) {
    return gradients_.lend(slot, dtype);
  }
  void take_lent_grad(size_t slot, const std::vector<at::Tensor>& blocks, const at::Tensor& scale);
  /// The queue of delayed weight gradients; null if they are computed at once.
  DelayedGradients* delayed() const { return context_ ? context_->delayed() : nullptr; }
  GradientCollector& gradients() { return gradients_; }
  /// For a schedule: no more gradients come in this step.
  void gradients_complete() {
    if (context_) context_->complete(*this);
  }
  /// Whether a collective of the group is running.
  bool communicates() const { return gather_work_.pending() || gradients_.communicates(); }

  // ---- used by other classes
  /// `context` is owned by the modules' states, which own this group too.
  void join(CommContext& context, const std::string& name);
  /// Called when the context is destroyed.
  void leave();
  bool belongs_to(const CommContext& context) const { return context_ == &context; }
  const char* name() const { return name_; }
  /// For the outermost module's group, whose "Default" policy keeps the parameters gathered.
  void make_root() { is_root_ = true; }
  /// Allocates the shards if they have no memory, and zeroes only the padding; true if it allocated.
  bool allocate_shards();
  bool deferred() const { return is_deferred(flat_shard_); }
  size_t num_params() const { return params_.size(); }
  const ManagedParam& param(size_t slot) const { return params_[slot]; }
  /// The leaf that the optimizer writes, with mesh, placements and box.
  DTensor shard(size_t slot) const;
  /// The slot of a compute parameter, or -1.
  int64_t find(const at::Tensor& compute) const;
  bool gathered() const { return state_ == State::Gathered; }
  bool backward_reads_parameters() const { return backward_reads_parameters_; }
  /// Whether the compute parameters are the shards (one rank, dtype and device), so there is nothing to free.
  bool holds_whole_parameters() const {
    return layout_.num_ranks() == 1 && dtype_ == param_dtype_ && !options_.cpu_offload;
  }
  dist::Stream compute_stream() const { return dist::Stream::current(device_); }
  /// Records the stream that this forward, and so its backward, computes on. Gradients are collected there.
  void remember_stream() { forward_stream_ = compute_stream(); }
  int64_t sharded_bytes() const {
    return layout_.shard_numel() * static_cast<int64_t>(c10::elementSize(dtype_));
  }
  /// A weight gathered in Float8; valid while the group is gathered.
  ops::Operand float8_weight(size_t slot) const;
  const FsdpOptions& options() const { return options_; }
  at::ScalarType param_dtype() const { return param_dtype_; }

 private:
  enum class State { Sharded, Gathering, Gathered };

  ParamGroup(std::vector<ManagedParam> params, const FsdpOptions& options);
  void make_shards();
  void take_initial_values();
  void empty_compute_params();
  void connect_gradients();

  /// Whether the shards were written after the last gather. Every write, by the optimizer, a checkpoint or a
  /// user, raises their version counter.
  bool stale() const { return gathered_version_ != flat_shard_._version(); }
  void bump_compute_versions();
  void start_gather();
  at::Tensor part_for_gather(const at::Tensor& place);
  void encode_chunks(const std::vector<at::Tensor>& places) const;
  bool gathers_in_place() const;
  void start_gather_in_place();
  void refresh_float8_scales(const dist::Stream& reader);
  bool lacks_float8_scales() const;
  const ops::RankParts* ranks_of_parts() const;
  std::vector<ParamGroup*> due_for_scales(const ops::RankParts* parts);
  void find_float8_weights();
  void register_buffers();
  void wait_for_gather();
  /// Continues on the stream that gradients are collected on, which reads these tensors.
  dist::StreamGuard on_forward_stream(at::TensorList read) const;
  void unpack_gathered();
  void bind_compute_params(const at::Tensor& full);
  void keep_part_of_gathered();

  FsdpOptions options_;
  at::ScalarType dtype_;        // the shards' dtype
  at::ScalarType param_dtype_;  // the compute parameters' dtype
  at::Device device_;  // the compute parameters' device; with cpu_offload the shards are in host memory
  bool is_root_ = false;
  bool backward_reads_parameters_ = true;
  std::vector<ManagedParam> params_;
  int shard_rank_ = 0;
  ShardLayout layout_;
  WireLayout wire_;
  std::shared_ptr<dist::Group> gather_group_;        // null: one rank
  std::shared_ptr<dist::Group> small_gather_group_;  // for ReshardAfterForward::to_size; null: unused

  at::Tensor flat_shard_;           // [S], dtype_
  std::vector<at::Tensor> shards_;  // leaves: parts of flat_shard_
  GradientCollector gradients_;
  Float8Weights float8_;  // empty: all are gathered in param_dtype_

  State state_ = State::Sharded;
  uint32_t gathered_version_ = 0;   // flat_shard_'s version when it was gathered last
  uint32_t announced_version_ = 0;  // flat_shard_'s version that the compute parameters' versions stand for
  at::Tensor packed_;               // [parts, n]: result of the running gather, unless that is full_
  at::Tensor full_;                 // gathered memory of all compute parameters
  at::Tensor kept_part_;            // to_size: this rank's part between forward and backward
  int gathering_parts_ = 1;
  bool takes_batches_ = false;  // whether gather_group_ takes several calls at once
  dist::Work gather_work_;
  dist::Stream forward_stream_;
  std::optional<Groups> forward_prefetch_, backward_prefetch_;
  CommContext* context_ = nullptr;
  const char* name_ = "";
};

}  // namespace titan::fsdp
