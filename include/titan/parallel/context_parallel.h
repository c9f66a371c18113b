#pragma once

// Context parallelism: the tokens of a sequence are spread over the ranks of a mesh axis, so that activations
// of a long sequence are divided by its size. Everything is local to a token except attention, where each
// rank's queries need the keys of all ranks: by a ring (Liu et al., "Ring Attention with Blockwise
// Transformers", 2023), or by gathering the keys. docs/context_parallel.md shows how.

#include <cstdint>
#include <memory>
#include <string>

#include "titan/dist/device_mesh.h"
#include "titan/nn/hooks.h"
#include "titan/parallel/parallelism.h"

namespace titan {

/// The tokens that a rank holds.
enum class ContextLoadBalancer {
  /// A chunk from the front and its counterpart from the back: with a causal mask every rank has the same
  /// work. The sequence has to be a multiple of twice the ranks.
  HeadTail,
  None,  ///< contiguous parts; the last rank has most of the work, and the others wait for it
};

/// How a ring's forward moves keys and values.
enum class ContextRotateMethod {
  AllGather,  ///< one all-gather during the rank's own block; holds one layer's keys of the whole sequence
  AllToAll,   ///< hop by hop between neighbors, each during the block before it; holds the keys of two ranks
};

enum class ContextAttention {
  Ring,         ///< block by block, merged by their log-sum-exp; gradients of keys travel hop by hop
  AllGatherKv,  ///< keys and values of the whole sequence at once, in order: fewer, larger kernels and
                ///< collectives. For short sequences on fast links
};

struct ContextParallelOptions {
  ContextLoadBalancer load_balancer = ContextLoadBalancer::HeadTail;
  ContextRotateMethod rotate_method = ContextRotateMethod::AllGather;
  ContextAttention attention = ContextAttention::Ring;
};

/// Spreads the sequences that `root` is called with over `axis` (a mesh of one axis; of size 1 nothing
/// changes). From now on
/// - a call of `root` takes whole sequences, the same on all ranks of the axis: its int64 arguments [B, S]
///   (tokens, labels; positions as [B, S] or [1, S]) are cut down to this rank's tokens, all others are left
///   as they are. Throws Error when S doesn't divide, or differs from one argument to the next;
/// - a pipeline stage's hidden states (nn::LayerSequence) are of this rank's tokens, and aren't cut;
/// - modules below it see S / ranks tokens, and what `root` returns is of this rank's tokens: a loss is this
///   rank's share of the sum, gradients of parameters are this rank's summands (fully_shard's mesh includes
///   the axis, and sums them);
/// - every nn::AttentionUser below it attends over all ranks' tokens, and every nn::PositionUser takes a
///   token's position in the whole sequence where the caller gives none.
///
/// Sequences of different calls may differ in length. All ranks of the axis make the same calls, forward and
/// backward. Modules neither add tokens nor drop any before they attend. Goes with parallelize (the heads are
/// then a rank's own; it comes first where its plan converts the inputs of `root` itself), fully_shard and
/// checkpoint_activations. Throws Error when nothing below `root` attends, or for a second call.
void context_parallel(const nn::AnyRef& root, const DeviceMesh& axis,
                      const ContextParallelOptions& options = {});

/// Whether context_parallel spreads the sequences of `root` or of a module below it.
bool is_context_parallel(const nn::AnyRef& root);

/// context_parallel() with these options, for ParallelPlan::parallelisms.
Parallelism context_parallelism(const ContextParallelOptions& options = {});

/// The keys of [parallelism] that begin with "context_parallel_".
struct ContextParallelSettings {
  int64_t degree = 1;
  std::string load_balancer = "headtail";   ///< or "None": contiguous parts
  std::string rotate_method = "allgather";  ///< or "alltoall"
  std::string attention = "ring";           ///< or "allgather_kv"

  ContextParallelOptions options() const;
};
void describe(config::Table<ContextParallelSettings>& table);

/// The registry's entry "context".
std::shared_ptr<const ParallelismSpec> context_parallelism_spec();

}  // namespace titan
