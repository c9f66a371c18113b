#pragma once

// fully_shard: per-parameter sharding as in FSDP2. Each call makes one group, with one all-gather before use
// and one reduce-scatter after. Parameters are sharded on dim 0 over the mesh's last axis and replicated over
// the axis before it (HSDP). DDP is (replicate N, shard 1), and one rank is N = 1, with the same engine.
//
// Apply it bottom-up, layers first and the root last: a group owns the parameters below its modules that no
// earlier call took.
//
//   const titan::FsdpOptions options{.mesh = mesh["dp_shard"], .param_dtype = at::kBFloat16};
//   for (auto& layer : model->layers) titan::fully_shard(layer, options);
//   titan::fully_shard(model, options);

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/dist/device_mesh.h"
#include "titan/nn/hooks.h"

namespace titan {

/// Whether the gathered parameters are freed between forward and backward.
struct ReshardAfterForward {
  enum class Kind {
    Default,  ///< Always, but Never for the outermost module's own group (its backward comes first)
    Always,
    Never,
    /// Keep them sharded over `size` neighboring ranks, a divisor of the shard axis: the backward's gather is
    /// smaller and faster.
    ToSize,
  };
  Kind kind = Kind::Default;
  int size = 0;

  static ReshardAfterForward always() { return {Kind::Always, 0}; }
  static ReshardAfterForward never() { return {Kind::Never, 0}; }
  static ReshardAfterForward to_size(int size) { return {Kind::ToSize, size}; }
};

struct FsdpOptions {
  DeviceMesh mesh;                             ///< one axis (shard) or two (replicate, shard)
  std::optional<at::ScalarType> param_dtype;   ///< for gathering and computing; default: the parameter's own
  std::optional<at::ScalarType> reduce_dtype;  ///< for reducing gradients; default: param_dtype
  std::optional<at::ScalarType> output_dtype;  ///< floating-point outputs are cast to it
  bool cast_forward_inputs = true;             ///< floating-point inputs are cast to param_dtype
  ReshardAfterForward reshard_after_forward;
  /// false: keep whole gradients until the last micro-batch; their memory is logged.
  bool reduce_every_micro_batch = true;
  bool cpu_offload = false;  ///< keep shards in pinned host memory; GPUs only
  /// Register communication buffers and gradients with NCCL, for all groups below one root; NCCL and GPUs only, without
  /// cpu_offload. Idle buffers then stay.
  bool register_buffers = false;
  /// How many of the following groups are gathered while this one computes, in the forward and in the backward.
  /// Each holds its parameters that much longer. 0: none. Not used by pipelines, whose schedules gather whole stages.
  int prefetch = 1;
};

/// Gathered copies follow the shards: every write to a shard by a LibTorch operation or a collective raises
/// its version counter, and the next use gathers again. Writes through data_ptr() or a detached tensor
/// (.data(), variable_data()) aren't noticed.
void fully_shard(const nn::AnyRef& module, const FsdpOptions& options);
void fully_shard(std::initializer_list<nn::AnyRef> modules, const FsdpOptions& options);

/// Replaces `FsdpOptions::prefetch` for one group: while the forward of `module` computes, the groups of `next` are
/// gathered, in this order, also in the first step, when the order of the forward isn't known. An empty list:
/// nothing is gathered ahead. All modules were given to fully_shard, below one root. All ranks make the same call.
void set_forward_prefetch(const nn::AnyRef& module, const std::vector<nn::AnyRef>& next);
/// The same for the backward, which always gathers in its own order: it gathers ahead up to the last of `next`.
void set_backward_prefetch(const nn::AnyRef& module, const std::vector<nn::AnyRef>& next);

/// Tells all groups below `root` whether the coming backward is the last of its optimizer step (default:
/// true).
void set_last_micro_batch(const nn::AnyRef& root, bool last);
/// Drops gradients that were collected but not reduced, after a step that was abandoned between two
/// micro-batches; the optimizer zeroes the shards' gradients. All ranks make the same call.
void discard_gradients(const nn::AnyRef& root);

/// Numbers for tests and logs, summed over the groups below `root`.
struct FsdpStats {
  int64_t groups = 0;
  int64_t gathered_groups = 0;      ///< groups whose parameters are gathered, or being gathered, right now
  int64_t max_gathered_groups = 0;  ///< high-water mark since the last call
  /// Since construction. Constant from the third step on, except on a GPU whose buffers aren't registered: there they go back
  /// to LibTorch's allocator in each step.
  int64_t communication_buffer_allocations = 0;
  int64_t sharded_bytes = 0;
  int64_t kept_gradient_bytes = 0;  ///< whole gradients kept between micro-batches; 0 if each is reduced
};
FsdpStats fsdp_stats(const nn::AnyRef& root);

}  // namespace titan
