#pragma once

// Collects and reduces a group's gradients, and keeps shards in host memory (FsdpOptions::cpu_offload).

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "dist/stream.h"
#include "parallel/fsdp/comm_context.h"
#include "parallel/fsdp/shard_layout.h"
#include "titan/dist/collectives.h"
#include "titan/nn/hooks.h"
#include "titan/ops/linear.h"
#include "titan/parallel/fsdp.h"

namespace titan::fsdp {

/// [Note: host shards]
/// The flat shard and the flat gradient are in host memory, pinned so that copies overlap the computation.
/// A gather begins by copying the shard to the device, on the gather stream; a reduction ends by copying the
/// sums to the host, on the reduce stream. With one rank on the shard axis, the gather is only this copy.
/// Optimizer, clipping and checkpoint see CPU tensors and never use the device. The host waits for both
/// streams when the backward ends (or, without a backward, when the forward ends), because it may write the
/// shards and read the gradients from then on.
///
/// This code doesn't depend on a GPU. The tests use a CPU as the device, whose "device memory" is other host
/// memory.

/// Flat tensors in host memory, pinned if `device` is a GPU: zeros, or uninitialized.
at::Tensor host_zeros(int64_t numel, at::ScalarType dtype, at::Device device);
at::Tensor host_empty(int64_t numel, at::ScalarType dtype, at::Device device);

/// Like fully_shard, but also allows cpu_offload on a CPU.
void fully_shard_beside_any_device(std::initializer_list<nn::AnyRef> modules, const FsdpOptions& options);

// The gradient side of a group: collects whole gradients as they arrive, reduces them, and adds the result to
// the shards' gradients.

/// [Note: gradient path]
/// collected [N * S_trainable] (reduce dtype)  --reduce-scatter over the shard axis-->  [S_trainable]
///   --all-reduce over the replicate axis, last micro-batch only-->
///   --all-reduce of summands over tensor-parallel ranks (norms' gradients with sequence parallelism)-->
///   += flat gradient [S_trainable] (the shards' dtype)
/// Over NCCL, `collected` has the parameters' whole gradients one after another, and one call scatters them all; else it
/// is packed ([Note: FSDP tensors]). With one rank on the shard axis nothing is scattered; with one rank in total the gradients are collected
/// in the flat gradient. If that is in host memory ([Note: host shards]), the last step is a copy, or a copy
/// and a sum on the host.
///
/// [Note: lent gradients]
/// The loss head sums its weight's gradient in the forward, and only the backward adds it. So that a gradient
/// of the vocabulary's size exists only once, the head sums in the gradient's place in the collected (or
/// flat) gradient, which begins in the forward then. In a packed `collected` the place is one block of rows for
/// each rank of the shard axis. The place isn't lent where it holds a gradient already, where it has another dtype,
/// while it is lent (GPipe runs all forwards first), and where many ranks make small blocks, whose products
/// would be slow; then the head gets a buffer of the pool. If the place is needed before the loan ends, the
/// lent values move to buffers of the pool.
class GradientCollector {
 public:
  struct Config {
    at::ScalarType grad_dtype = at::kFloat;    ///< dtype of the shards and their gradients
    at::ScalarType reduce_dtype = at::kFloat;  ///< dtype of collected gradients and of their reduction
    at::Device device = at::kCPU;
    bool reduce_every_micro_batch = true;
    bool to_host = false;                          ///< the shards and their gradients are in host memory
    std::shared_ptr<dist::Group> shard_group;      ///< null: one rank
    std::shared_ptr<dist::Group> replicate_group;  ///< null: one rank
    std::shared_ptr<dist::Group> summand_group;    ///< null: no gradient is a summand
    size_t num_summands = 0;  ///< number of slots, the first ones, whose gradients are summands
  };

  /// `layout` and `shards` outlive the collector.
  GradientCollector(const ShardLayout& layout, const std::vector<at::Tensor>& shards)
      : layout_(layout), shards_(shards) {}
  void configure(Config config) { config_ = std::move(config); }
  void join(CommContext& context, const char* module) {
    context_ = &context;
    module_ = module;
    by_parameter_ = config_.shard_group && config_.shard_group->has_batches(config_.device);
  }
  void add_groups_to(dist::RegisteredMemory& memory) const;
  void leave();

  /// Adds grad * scale; `scale` is a scalar tensor, or undefined for 1.
  void add(size_t slot, const at::Tensor& grad, const at::Tensor& scale);
  /// Adds a product that writes to the collected gradients itself. Returns false, and leaves the gradient to add(), if it
  /// can't, if they aren't on a GPU, or where they are in blocks.
  bool put(size_t slot, const ops::WeightGrad& grad);
  /// ops::GradSink's lend() and accept_lent() for a slot ([Note: lent gradients]).
  std::vector<at::Tensor> lend(size_t slot, at::ScalarType dtype);
  void add_lent(size_t slot, const std::vector<at::Tensor>& blocks, const at::Tensor& scale);
  /// Starts reducing the collected gradients; false if there is nothing to wait for.
  bool start_reduce(bool last_micro_batch);
  /// Runs the next step of the reduction; true when the shards' gradients are complete.
  bool advance_reduce();
  /// Bytes of whole gradients kept between micro-batches; 0 if each micro-batch is reduced.
  int64_t kept_bytes() const;
  /// Whether gradients of earlier micro-batches wait for the last one's reduction.
  bool owes_reduction() const { return owes_reduction_; }
  bool communicates() const { return work_.pending(); }
  /// Drops collected gradients that weren't reduced, and waits for running collectives.
  void discard();

 private:
  enum class Phase { Idle, Scattering, AllReducing, SummingSummands };

  bool local() const {
    return !config_.shard_group && !config_.replicate_group && !config_.summand_group && !config_.to_host;
  }
  /// Whether flat_grad_ can serve as a buffer: it has the same memory and dtype, and holds no gradient, nor
  /// one that is being reduced.
  bool flat_grad_serves() const {
    return config_.reduce_dtype == config_.grad_dtype && !config_.to_host && phase_ == Phase::Idle &&
           no_grad_yet();
  }
  at::Tensor place_by_parameter(size_t slot) const;
  bool has_own_grad(size_t slot) const;
  void make_flat_grad();
  bool no_grad_yet() const;
  bool all_grads_ours() const;
  void set_empty_grads();
  void set_grads();
  void open_collected();
  void zero_padding();
  void write(const at::Tensor& packed, size_t slot, const at::Tensor& grad, const at::Tensor& scale,
             bool first) const;
  void start_scatter();
  void zero_missing();
  bool can_lend_place(size_t slot, at::ScalarType dtype) const;
  void move_loan();
  void after_scatter();
  void sum_summands();
  void accumulate(const at::Tensor& reduced);
  void release(at::Tensor& buffer);

  const ShardLayout& layout_;
  const std::vector<at::Tensor>& shards_;
  Config config_;
  CommContext* context_ = nullptr;
  const char* module_ = "";
  /// Whether collected_ has each parameter's gradient whole, for a reduce-scatter of its own: all of them are one call
  /// where the backend takes several.
  bool by_parameter_ = false;

  at::Tensor flat_grad_;                // [S_trainable], grad_dtype; made at the first backward, kept
  std::vector<at::Tensor> grad_parts_;  // each shard's part of flat_grad_
  // [N * S_trainable], reduce_dtype, packed, or by_parameter_; flat_grad_ itself where nothing is scattered or cast
  at::Tensor collected_;
  std::vector<bool> written_;     // per slot: collected_ holds a gradient
  std::vector<at::Tensor> lent_;  // blocks of a slot's place, until they are taken back or moved
  size_t lent_slot_ = 0;
  at::Tensor scattering_;  // input of the running reduce-scatter
  at::Tensor reduced_;     // [S_trainable], reduce_dtype
  at::Tensor arrived_;     // to_host: sums of another micro-batch, in host memory
  at::Tensor partial_;     // sums of earlier micro-batches, not yet reduced over the replicas
  Phase phase_ = Phase::Idle;
  bool last_micro_batch_ = true;
  bool owes_reduction_ = false;
  dist::Work work_;
};

}  // namespace titan::fsdp
