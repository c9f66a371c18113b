#pragma once

// The operations of src/ops/operators.cpp on a GPU: functions that launch the kernels in ops_kernels.cu, which doesn't
// use LibTorch. They return at once; device memory must stay valid until the stream has run the kernel.
//
// Tensors are contiguous, begin at a multiple of 16 bytes, and a row is a multiple of 16 bytes long. Kernels compute
// in fp32 and round once. None uses atomics, so two runs have equal bits.

#include <cstdint>

#include <cuda_runtime_api.h>

#include "cuda_plugin/source.h"

namespace titan::ops::cuda {

using titan::cuda::Source;

/// Rows x [rows, size] and a weight [size], all of one dtype. A row has at most kMaxNormBytes, because it is read once:
/// the threads of a block hold it.
constexpr int64_t kMaxNormBytes = 32768;
struct NormRows {
  const void *x = nullptr, *weight = nullptr;
  Source source = Source::Float;
  int64_t rows = 0, size = 0;
};
/// y: [rows, size], in x's dtype; rstd: fp32 [rows].
void launch_rms_norm(void* y, float* rstd, const NormRows& in, float eps, cudaStream_t stream);
/// The same of sum = x + added, both [rows, size], in x's dtype.
void launch_add_rms_norm(void* y, float* rstd, void* sum, const void* added, const NormRows& in, float eps,
                         cudaStream_t stream);

/// grad_x: [rows, size], in x's dtype; grad_weight: fp32 [size]; parts: memory for fp32 [num_parts, size].
struct NormGradients {
  void* grad_x = nullptr;
  float *grad_weight = nullptr, *parts = nullptr;
  int64_t num_parts = 0;  ///< thread blocks that sum the weight's gradient over their rows
};
/// How many thread blocks to launch for each multiprocessor, for rows of so many bytes: as many as it has registers for, which is one for the
/// longest rows, and at most three, which write few sums beside some thousands of rows and have enough reads on their way for a B200
/// (docs/gpu_performance.md).
constexpr int64_t norm_backward_blocks(int64_t row_bytes) {
  const int64_t fit = kMaxNormBytes / row_bytes;
  return fit < 3 ? fit : 3;
}
/// added: null, or [rows, size], in x's dtype, which is added to grad_x.
void launch_rms_norm_backward(const NormGradients& out, const void* grad, const void* added,
                              const NormRows& in, const float* rstd, cudaStream_t stream);

/// Up to two tensors of the same tokens, each x: [tokens, heads, size]; table: fp32 [table_rows, size] of (cos, sin).
/// Token t is at position positions[t % num_positions], or without positions at t % num_positions. A position outside the
/// table ends the kernel with an assertion.
struct Rotation {
  struct Heads {
    void* out = nullptr;
    const void* x = nullptr;
    int64_t heads = 0;
  };
  Heads first, second;  ///< `second` may have no heads
  Source source = Source::Float;
  int64_t tokens = 0, size = 0;
  const float* table = nullptr;
  int64_t table_rows = 0;
  const int64_t* positions = nullptr;
  int64_t num_positions = 0;
  bool inverse = false;
};
constexpr int64_t kMaxRotatedBytes = 4096;  ///< a head has no more
void launch_rotary(const Rotation& in, cudaStream_t stream);

/// silu(gate) * up for `count` elements.
struct GateAndUp {
  const void *gate = nullptr, *up = nullptr;
  Source source = Source::Float;
  int64_t count = 0;
};
void launch_swiglu(void* out, const GateAndUp& in, cudaStream_t stream);
/// out: null, or where swiglu's output is written, too.
struct SwigluGradients {
  void *grad_gate = nullptr, *grad_up = nullptr, *out = nullptr;
};
void launch_swiglu_backward(const SwigluGradients& to, const void* grad, const GateAndUp& in,
                            cudaStream_t stream);

/// Attention over some keys, which is added to that over others, `out`: both [batch, tokens, heads, size], their log-sum-exps
/// without the size. Features are adjacent, other strides are multiples of 16 bytes; those of the sums are free.
struct AttentionPart {
  struct Strides {
    int64_t batch = 0, token = 0, head = 0;  ///< in elements
  };
  float *out = nullptr, *log_sum_exp = nullptr;
  const void* part = nullptr;
  Source source = Source::Float;  ///< `part`'s
  const float* part_log_sum_exp = nullptr;
  int64_t batch = 0, tokens = 0, heads = 0, size = 0;
  Strides of_out, of_sums, of_part, of_part_sums;
};
constexpr int64_t kMaxHeadBytes = 4096;  ///< a head of `part` has no more
void launch_merge_attention(const AttentionPart& in, cudaStream_t stream);

/// The sum of `num_parts` tensors of `size` elements, in their order.
constexpr int kMaxParts = 16;
struct SumOfParts {
  void* out = nullptr;
  const void* parts[kMaxParts] = {};
  Source source = Source::Float;
  int64_t size = 0;
  int num_parts = 0;
};
void launch_sum_of_parts(const SumOfParts& in, cudaStream_t stream);

/// Logits [rows, columns], of the columns `first`.. of a vocabulary, and the rows' labels. A row whose label is
/// kIgnoredLabel has no loss, and its gradient is zero.
struct LogitRows {
  void* logits = nullptr;
  Source source = Source::Float;
  const int64_t* labels = nullptr;
  int64_t rows = 0, columns = 0, first = 0;
  int64_t ignored_label = 0;
};
/// losses: [rows]. If with_grad, replaces the logits by their gradient. The columns are the whole vocabulary; a label
/// outside it ends the kernel with an assertion. A thread block reads its row twice, the second time from the L2 cache: a multiprocessor has
/// registers for one block of a long row, so that no more rows than multiprocessors are in progress.
void launch_cross_entropy(double* losses, const LogitRows& in, bool with_grad, cudaStream_t stream);

/// log_sums: log(sum(exp(logit))) of each row; targets: the label's logit, 0 if it isn't in these columns.
void launch_vocabulary_stats(double* log_sums, double* targets, const LogitRows& in, cudaStream_t stream);

/// A row's gradient is by_softmax * softmax, plus by_target at the label, plus by_any everywhere; if the pointers are
/// null: 1, -1 and 0.
struct GradientFactors {
  const double *by_softmax = nullptr, *by_target = nullptr, *by_any = nullptr;
};
/// Replaces the logits by their gradient; log_sums are over the whole vocabulary.
void launch_vocabulary_grad(const LogitRows& in, const double* log_sums, const GradientFactors& factors,
                            cudaStream_t stream);

}  // namespace titan::ops::cuda
