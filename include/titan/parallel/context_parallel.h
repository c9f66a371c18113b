#pragma once

// Context parallelism: the tokens of a sequence are spread over the ranks of a mesh axis, so that each rank
// has only its share of a long sequence's activations. Everything is local to a token except attention, where
// each rank's queries need the keys of all ranks: by a ring (Liu et al., "Ring Attention with Blockwise
// Transformers", 2023), or by gathering the keys. docs/context_parallel.md explains both.
//
//   const auto mesh = titan::DeviceMesh::create(world, {{"dp_shard", -1}, {"cp", 2}});
//   titan::context_parallel(model, mesh["cp"]);
//   titan::fully_shard(model, {.mesh = mesh.flatten({"dp_shard", "cp"}, "fsdp")});

#include <cstdint>
#include <memory>
#include <string>

#include "titan/dist/device_mesh.h"
#include "titan/nn/hooks.h"
#include "titan/parallel/parallelism.h"

namespace titan {

/// The tokens that a rank holds.
enum class ContextLoadBalancer {
  /// A chunk from the front and its counterpart from the back, so that with a causal mask every rank has the
  /// same work. The length of a sequence must be a multiple of twice the number of ranks.
  HeadTail,
  None,  ///< contiguous parts; the last rank has most of the work, and the others wait for it
};

/// How a ring moves keys and values.
enum class ContextRotateMethod {
  AllGather,  ///< one all-gather during the rank's own block; holds one layer's keys of the whole sequence
  AllToAll,   ///< hop by hop between neighbors, each during the previous block; holds the keys of two ranks
  /// The same, copied by copy engines from the memory of GPUs that NVLink connects. Gradients travel so, too.
  SymmetricMemory,
};

enum class ContextAttention {
  Ring,  ///< block by block, merged by their log-sum-exp; gradients of keys travel hop by hop
  /// Keys and values of the whole sequence at once, in order: fewer, larger kernels and collectives, for
  /// short sequences on fast links.
  AllGatherKv,
};

struct ContextParallelOptions {
  ContextLoadBalancer load_balancer = ContextLoadBalancer::HeadTail;
  ContextRotateMethod rotate_method = ContextRotateMethod::AllGather;
  ContextAttention attention = ContextAttention::Ring;
};

/// Spreads the sequences in calls of `root` over `axis`, a mesh of one axis; with size 1 nothing changes.
/// From now on
/// - a call of `root` takes whole sequences, the same on all ranks of the axis. Its int64 arguments [B, S]
///   (tokens, labels; positions as [B, S] or [1, S]) are cut down to this rank's tokens; others are
///   unchanged. Throws Error if S isn't divisible or differs between arguments;
/// - a pipeline stage's hidden states (nn::LayerSequence) have only this rank's tokens already and aren't
///   cut;
/// - modules below `root` see S / ranks tokens, and `root` returns results for this rank's tokens: a loss is
///   this rank's share of the sum, and gradients of parameters are this rank's summands (fully_shard's mesh
///   includes the axis, and sums them);
/// - every nn::AttentionUser below `root` attends over all ranks' tokens, and every nn::PositionUser uses a
///   token's position in the whole sequence unless the caller passes positions.
///
/// The length of sequences may differ between calls. All ranks of the axis make the same calls, forward and
/// backward. Modules must not add or drop tokens before they attend. It can be combined with parallelize
/// (each rank then has some of the heads; call parallelize first if its plan converts the inputs of `root`
/// itself), fully_shard and checkpoint_activations. Throws Error if nothing below `root` attends, and for a
/// second call; ConfigError on all ranks if symmetric memory was asked for and they can't share any.
void context_parallel(const nn::AnyRef& root, const DeviceMesh& axis,
                      const ContextParallelOptions& options = {});

/// Whether context_parallel was called on `root` or on a module below it.
bool is_context_parallel(const nn::AnyRef& root);

/// context_parallel() with these options, for ParallelPlan::parallelisms.
Parallelism context_parallelism(const ContextParallelOptions& options = {});

/// The keys in [parallelism] that begin with "context_parallel_".
struct ContextParallelSettings {
  int64_t degree = 1;
  std::string load_balancer = "headtail";   ///< or "None", for contiguous parts
  std::string rotate_method = "allgather";  ///< or "alltoall", "symmetric_memory"
  std::string attention = "ring";           ///< or "allgather_kv"

  ContextParallelOptions options() const;
};
void describe(config::Table<ContextParallelSettings>& table);

/// The registry's entry "context".
std::shared_ptr<const ParallelismSpec> context_parallelism_spec();

}  // namespace titan
