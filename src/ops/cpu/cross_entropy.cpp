// The loss head's operators on a CPU: the fused cross-entropy of whole rows of logits, and the statistics and
// gradients of a part of the vocabulary.

#include <limits>

#include <torch/library.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include "ops/cpu/simd.h"
#include "ops/operators.h"
#include "titan/ops/loss.h"

namespace titan::ops {

namespace {

using simd::Scalar;
using simd::Vector;

// Rows of logits whose columns start at `first` of the vocabulary. It is passed by value, because a store to
// a row can't alias a copy, so the loops keep sizes in registers.
template <class T>
struct LogitRows {
  T* logits;
  const int64_t* labels;
  int64_t count, size, first;

  TITAN_INLINE T* row(int64_t i) const { return logits + i * size; }
  /// The column of the row's label; -1 if another part has it.
  TITAN_INLINE int64_t target(int64_t i) const {
    const int64_t column = labels[i] - first;
    return column >= 0 && column < size ? column : -1;
  }
  /// Zeroes the row and returns true if its label is ignored.
  TITAN_INLINE bool clear_ignored(int64_t i) const {
    if (labels[i] != kIgnoredLabel) return false;
    std::memset(static_cast<void*>(row(i)), 0, static_cast<size_t>(size) * sizeof(T));
    return true;
  }
};

// log(sum(exp(x))) of a row.
template <class T>
TITAN_INLINE double log_sum_exp(const T* x, int64_t size) {
  constexpr int64_t kWidth = simd::kWidth<T>;
  const T lowest = std::numeric_limits<T>::lowest();
  Vector<T> best = simd::broadcast<Vector<T>>(static_cast<Scalar<T>>(lowest));
  for (int64_t i = 0; i < size; i += kWidth) {
    const Vector<T> v = simd::load_up_to(x + i, size - i, lowest);
    best = v > best ? v : best;
  }
  const Scalar<T> top = simd::largest(best);
  Vector<T> total{};
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) total += simd::exp(simd::load(x + i) - top);
  Scalar<T> sum = simd::sum(total);
  for (; i < size; ++i) sum += std::exp(static_cast<Scalar<T>>(x[i]) - top);
  return static_cast<double>(top) + std::log(static_cast<double>(sum));
}

// Replaces a row by softmax - onehot.
template <class T>
TITAN_INLINE void to_gradient(T* logits, int64_t size, int64_t target, double log_sum) {
  const auto shift = static_cast<Scalar<T>>(log_sum);
  const auto target_logit = target >= 0 ? static_cast<Scalar<T>>(logits[target]) : Scalar<T>{};
  for (int64_t i = 0; i < size; i += simd::kWidth<T>)
    simd::store_up_to(logits + i, simd::exp(simd::load_up_to(logits + i, size - i) - shift), size - i);
  if (target >= 0) logits[target] = static_cast<T>(std::exp(target_logit - shift) - 1);
}

// Fills losses[row]. If with_grad, replaces each row by its gradient.
template <class T>
TITAN_CPU_CLONES void cross_entropy_rows(LogitRows<T> rows, double* losses, bool with_grad) {
  for (int64_t i = 0; i < rows.count; ++i) {
    losses[i] = 0;
    if (rows.labels[i] == kIgnoredLabel) {
      if (with_grad) rows.clear_ignored(i);
      continue;
    }
    const double log_sum = log_sum_exp(rows.row(i), rows.size);
    losses[i] = log_sum - static_cast<double>(static_cast<Scalar<T>>(rows.row(i)[rows.labels[i]]));
    if (with_grad) to_gradient(rows.row(i), rows.size, rows.labels[i], log_sum);
  }
}

template <class T>
TITAN_CPU_CLONES void statistics_rows(LogitRows<const T> rows, double* log_sums, double* targets) {
  for (int64_t i = 0; i < rows.count; ++i) {
    const int64_t target = rows.target(i);
    log_sums[i] =
        rows.size > 0 ? log_sum_exp(rows.row(i), rows.size) : -std::numeric_limits<double>::infinity();
    targets[i] = target >= 0 ? static_cast<double>(static_cast<Scalar<T>>(rows.row(i)[target])) : 0;
  }
}

template <class T>
TITAN_CPU_CLONES void gradient_rows(LogitRows<T> rows, const double* log_sums) {
  for (int64_t i = 0; i < rows.count; ++i)
    if (!rows.clear_ignored(i)) to_gradient(rows.row(i), rows.size, rows.target(i), log_sums[i]);
}

// Factors of a token's gradient, which is by_softmax * softmax, plus by_target at the label, plus by_any
// everywhere.
struct Factors {
  const double *by_softmax, *by_target, *by_any;
};

template <class T>
TITAN_CPU_CLONES void weighted_gradient_rows(LogitRows<T> rows, const double* log_sums, Factors factors) {
  for (int64_t i = 0; i < rows.count; ++i) {
    if (rows.clear_ignored(i)) continue;
    T* logits = rows.row(i);
    const int64_t target = rows.target(i);
    const auto shift = static_cast<Scalar<T>>(log_sums[i]),
               scale = static_cast<Scalar<T>>(factors.by_softmax[i]),
               any = static_cast<Scalar<T>>(factors.by_any[i]);
    const auto target_logit = target >= 0 ? static_cast<Scalar<T>>(logits[target]) : Scalar<T>{};
    for (int64_t j = 0; j < rows.size; j += simd::kWidth<T>) {
      const int64_t left = rows.size - j;
      simd::store_up_to(logits + j, simd::exp(simd::load_up_to(logits + j, left) - shift) * scale + any,
                        left);
    }
    if (target >= 0)
      logits[target] = static_cast<T>(scale * std::exp(target_logit - shift) + any +
                                      static_cast<Scalar<T>>(factors.by_target[i]));
  }
}

/// Calls visit(rows, number of the first row) for ranges of rows, in parallel.
template <class T, class Visit>
void for_each_range(T* logits, const at::Tensor& shape, const at::Tensor& labels, int64_t first,
                    const Visit& visit) {
  const int64_t size = shape.size(1);
  const auto* targets = labels.const_data_ptr<int64_t>();
  at::parallel_for(0, shape.size(0), 1 + 8192 / (size + 1), [&](int64_t begin, int64_t end) {
    visit(LogitRows<T>{logits + begin * size, targets + begin, end - begin, size, first}, begin);
  });
}

bool have_rows_kernel(const at::Tensor& logits) { return cpu::have_kernel(logits) && logits.is_contiguous(); }

void check_labels(const at::Tensor& labels, int64_t vocab_size) {
  const auto* label = labels.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < labels.numel(); ++row)
    TITAN_CHECK((label[row] >= 0 && label[row] < vocab_size) || label[row] == kIgnoredLabel, "label ",
                label[row], " isn't in a vocabulary of ", vocab_size, "; ", kIgnoredLabel,
                " marks ignored tokens");
}

at::Tensor cross_entropy_cpu(at::Tensor& logits, const at::Tensor& labels, bool with_grad) {
  const at::Tensor targets = labels.contiguous();
  check_labels(targets, logits.size(1));
  if (!have_rows_kernel(logits)) return composite::cross_entropy_(logits, labels, with_grad);
  std::vector<double> losses(static_cast<size_t>(logits.size(0)));
  cpu::dispatch(logits, [&]<class T>(T*) {
    for_each_range(logits.mutable_data_ptr<T>(), logits, targets, 0, [&](const auto& rows, int64_t begin) {
      cross_entropy_rows<T>(rows, losses.data() + begin, with_grad);
    });
  });
  double total = 0;
  for (const double loss : losses) total += loss;
  return at::scalar_tensor(total, at::TensorOptions().dtype(at::kDouble));
}

at::Tensor vocabulary_stats_cpu(const at::Tensor& logits, const at::Tensor& labels, int64_t first) {
  if (!have_rows_kernel(logits)) return composite::vocabulary_stats(logits, labels, first);
  const at::Tensor targets = labels.contiguous();
  at::Tensor stats = at::empty({2, logits.size(0)}, logits.options().dtype(at::kDouble));
  auto* out = stats.mutable_data_ptr<double>();
  cpu::dispatch(logits, [&]<class T>(T*) {
    for_each_range(logits.const_data_ptr<T>(), logits, targets, first, [&](const auto& rows, int64_t begin) {
      statistics_rows<T>(rows, out + begin, out + logits.size(0) + begin);
    });
  });
  return stats;
}

void vocabulary_grad_cpu(at::Tensor& logits, const at::Tensor& labels, int64_t first,
                         const at::Tensor& log_sum, const std::optional<at::Tensor>& factors) {
  if (!have_rows_kernel(logits)) return composite::vocabulary_grad_(logits, labels, first, log_sum, factors);
  const at::Tensor targets = labels.contiguous(), sums = log_sum.contiguous(),
                   factors_3N = factors ? factors->contiguous() : at::Tensor();
  const auto* sum = sums.const_data_ptr<double>();
  const auto* factor = factors ? factors_3N.const_data_ptr<double>() : nullptr;
  const int64_t count = logits.size(0);
  cpu::dispatch(logits, [&]<class T>(T*) {
    for_each_range(logits.mutable_data_ptr<T>(), logits, targets, first,
                   [&](const auto& rows, int64_t begin) {
                     if (!factor) return gradient_rows<T>(rows, sum + begin);
                     const double* mine = factor + begin;
                     weighted_gradient_rows<T>(rows, sum + begin, {mine, mine + count, mine + 2 * count});
                   });
  });
}

TORCH_LIBRARY_IMPL(titan, CPU, m) {
  m.impl("cross_entropy_", cross_entropy_cpu);
  m.impl("vocabulary_stats", vocabulary_stats_cpu);
  m.impl("vocabulary_grad_", vocabulary_grad_cpu);
}

}  // namespace
}  // namespace titan::ops
