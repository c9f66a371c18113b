#pragma once

// Tensor, sequence and loss parallelism (Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing
// activation recomputation in large transformer models", 2022). A plan says how each module is cut.
//
//   titan::parallelize(model, mesh["tp"], {
//       {"layers.*.mlp", PrepareInput{ActivationLayout::shard(1), ActivationLayout::replicate()}},
//       {"layers.*.mlp.up", Colwise{.input = ActivationLayout::replicate()}},
//       {"layers.*.mlp.down", Rowwise{.output = ActivationLayout::shard(1)}},
//       {"layers.*.norm", SequenceParallel{}},
//   });

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <variant>
#include <vector>

#include "titan/dist/device_mesh.h"
#include "titan/nn/hooks.h"

namespace titan {

/// The layout over the ranks of the axis of an activation and, just as important, of its gradient:
///
///                value                      gradient
///   Shard(dim)   equal parts along dim      parts
///   Replicate    whole on every rank        a summand on each
///   Invariant    whole on every rank        whole on every rank
///   Partial      a summand on each          whole on every rank
struct ActivationLayout {
  enum class Kind { Shard, Replicate, Invariant, Partial };
  Kind kind = Kind::Invariant;
  int64_t dim = 0;  ///< for Shard; negative values count from the end

  static ActivationLayout shard(int64_t dim) { return {Kind::Shard, dim}; }
  static ActivationLayout replicate() { return {Kind::Replicate, 0}; }
  static ActivationLayout invariant() { return {Kind::Invariant, 0}; }
  static ActivationLayout partial() { return {Kind::Partial, 0}; }
  friend bool operator==(const ActivationLayout&, const ActivationLayout&) = default;
};
std::ostream& operator<<(std::ostream& out, const ActivationLayout& layout);

/// Each rank computes a part of the output features: the weight is cut by rows [out/N, in]. The input is
/// converted to Replicate first. A loss head (nn::LinearCrossEntropy) is cut by vocabulary; its loss is whole
/// on every rank. With an `output` other than Shard(-1) its logits are gathered, for the loss chunk by chunk.
struct Colwise {
  ActivationLayout input = ActivationLayout::invariant();
  ActivationLayout output = ActivationLayout::shard(-1);
  bool overlap = false;  ///< with input Shard(1): multiply each part when it has arrived
};

/// Each rank multiplies its part of the input features: the weight is cut by columns [out, in/N], and the
/// summands are converted to `output`. An nn::Embedding is cut by vocabulary: tokens of other ranks give
/// zeros.
struct Rowwise {
  ActivationLayout input = ActivationLayout::shard(-1);
  ActivationLayout output = ActivationLayout::invariant();
  bool overlap = false;  ///< with output Shard(1): send each part of the sequence when it is computed
};

/// The module keeps its parameters whole and sees a part of the tokens (Shard(1), or another layout that
/// makes its parameters' gradients summands, such as a Replicate input). The gradients of all parameters at
/// and below it are summed over the axis in the backward, before clipping.
struct SequenceParallel {};

/// [Note: overlap] A layer with `overlap` must be an nn::Linear without bias, called with [batch, sequence,
/// in]. Colwise layers that nn::linears() calls together on one input gather it once.

/// Converts floating-point arguments of a call before forward. `tensors` are their numbers among the
/// floating-point arguments, from 0.
struct PrepareInput {
  ActivationLayout from;
  ActivationLayout to = ActivationLayout::replicate();
  std::vector<size_t> tensors = {0};
};

/// Converts floating-point results after forward.
struct PrepareOutput {
  ActivationLayout from;
  ActivationLayout to;
  std::vector<size_t> tensors = {0};
};

using ParallelStyle = std::variant<Colwise, Rowwise, SequenceParallel, PrepareInput, PrepareOutput>;

struct PlanEntry {
  /// Dotted name below the root; "*" and "?" match within one component; "" is the root.
  std::string modules;
  ParallelStyle style;
};
using TensorPlan = std::vector<PlanEntry>;

/// How the parts of overlapped products are sent.
enum class OverlapTransport {
  /// Through symmetric memory if all ranks can share it, else by sends and receives. GPUs multiply whole sequences where parts would be too small
  /// to gain by it ([Note: products in parts, by size]).
  Auto,
  SymmetricMemory,  ///< throws ConfigError with the reason if that is impossible
  SendReceive,
  /// In one collective: nothing overlaps, but parts are sent in the products' dtype (Float8).
  AtOnce,
};

/// Permanently cuts the parameters of the plan's modules down to this rank's parts, and hooks the conversions
/// around their calls. `axis` is a mesh of one axis; with size 1 nothing changes. Call it before fully_shard,
/// which then shards the parts; deferred parameters stay deferred. Parameters outside the plan stay whole on
/// all ranks and must get whole gradients.
///
/// A pipeline stage takes the plan of the whole model (nn::LayerSequence); entries for modules of other
/// stages do nothing.
///
/// Throws ConfigError that names all entries that match no module, match one that can't be called through
/// nn::Ref, or need a slot that is taken, and conversions that don't exist (Replicate -> Invariant, Invariant
/// -> Partial, ...).
void parallelize(const nn::AnyRef& root, const DeviceMesh& axis, const TensorPlan& plan,
                 OverlapTransport transport = OverlapTransport::Auto);

/// Settings for a model's own plan.
struct TensorParallelOptions {
  bool sequence_parallel = true;  ///< between products, each rank keeps a part of the sequence
  bool loss_parallel = true;      ///< false: the loss is computed from gathered logits
  bool overlap = false;           ///< compute products while their parts are sent; needs sequence_parallel
  OverlapTransport transport = OverlapTransport::Auto;  ///< for overlap
};

/// One module of the plan as it ran, for `titan train --print-plan`.
struct PlanRow {
  std::string module;
  std::string style;           ///< "Rowwise", or for several entries "SequenceParallel, PrepareInput"
  std::string weight;          ///< placements of the module's parameters; "" if they are whole
  std::string activation;      ///< "in Shard(1) -> Replicate; out Partial -> Shard(1)"
  std::string collectives;     ///< forward / backward: "all-gather / reduce-scatter"
  std::string transport;       ///< transport of collectives "in products": "sent and received"
  int64_t calls = 0;           ///< moves of activations and statistics, with and without communication
  int64_t bytes = 0;           ///< received by this rank in these calls since parallelize()
  int64_t gradient_bytes = 0;  ///< received each time gradients (of norms) are summed over the axis
};
/// Rows for the modules below `root` that parallelize() hooked or cut, in module order. If several overlapped
/// products share one input, the first one's row has their exchange.
std::vector<PlanRow> plan_rows(const nn::AnyRef& root);

}  // namespace titan
