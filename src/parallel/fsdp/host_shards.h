#pragma once

// Shards in host memory beside the device that computes (FsdpOptions::cpu_offload).

#include <cstdint>
#include <initializer_list>

#include <ATen/core/Tensor.h>

#include "titan/nn/any_ref.h"
#include "titan/parallel/fsdp.h"

namespace titan::fsdp {

/// [Note: host shards]
/// The flat shard and the flat gradient lie in host memory, pinned so that copies run beside the computation.
/// A gather begins by copying the shard into its place on the device, on the gather stream; a reduction ends
/// by copying the sums to the host, on the reduce stream. With one rank on the shard axis the copy is all of
/// the gather. Optimizer, clipping and checkpoint see tensors of the CPU and never the device; the host waits
/// for both streams when the backward ends (and, without one, when the forward does), as it may write the
/// shards and read the gradients from then on.
///
/// Nothing of this asks whether the device is a GPU: beside a CPU "device" memory is other memory of the
/// host, which is how it is tested.

/// A flat tensor in host memory: pinned where `device` is a GPU. Zeros, or uninitialized.
at::Tensor host_zeros(int64_t numel, at::ScalarType dtype, at::Device device);
at::Tensor host_empty(int64_t numel, at::ScalarType dtype, at::Device device);

/// fully_shard, which also takes cpu_offload on a CPU.
void fully_shard_beside_any_device(std::initializer_list<nn::AnyRef> modules, const FsdpOptions& options);

}  // namespace titan::fsdp
