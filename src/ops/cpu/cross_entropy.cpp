#include <limits>

#include <torch/library.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include "ops/cpu/dtype.h"
#include "ops/cpu/simd.h"
#include "ops/operators.h"
#include "titan/ops/loss.h"

namespace titan::ops {

namespace {

using simd::Scalar;
using simd::Vector;

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

// logits - log_sum, exponentiated in place.
template <class T>
TITAN_INLINE void to_probabilities(T* logits, int64_t size, double log_sum) {
  const auto shift = static_cast<Scalar<T>>(log_sum);
  for (int64_t i = 0; i < size; i += simd::kWidth<T>)
    simd::store_up_to(logits + i, simd::exp(simd::load_up_to(logits + i, size - i) - shift), size - i);
}

// Fills losses[row]; with_grad turns each row into softmax - onehot, or zeros where the label doesn't count.
template <class T>
TITAN_CPU_CLONES void cross_entropy_rows(double* losses, T* logits, const int64_t* labels, int64_t rows,
                                         int64_t size, bool with_grad) {
  for (int64_t row = 0; row < rows; ++row, logits += size) {
    losses[row] = 0;
    if (labels[row] == kIgnoredLabel) {
      if (with_grad) std::memset(static_cast<void*>(logits), 0, static_cast<size_t>(size) * sizeof(T));
      continue;
    }
    const double log_sum = log_sum_exp(logits, size);
    const auto target = static_cast<Scalar<T>>(logits[labels[row]]);
    losses[row] = log_sum - static_cast<double>(target);
    if (!with_grad) continue;
    to_probabilities(logits, size, log_sum);
    logits[labels[row]] = static_cast<T>(std::exp(target - static_cast<Scalar<T>>(log_sum)) - 1);
  }
}

// A part's columns start at `first` of the vocabulary.
template <class T>
TITAN_CPU_CLONES void part_stats_rows(double* log_sums, double* targets, const T* logits,
                                      const int64_t* labels, int64_t rows, int64_t size, int64_t first) {
  for (int64_t row = 0; row < rows; ++row, logits += size) {
    const int64_t column = labels[row] - first;
    const bool own = column >= 0 && column < size;
    log_sums[row] = size > 0 ? log_sum_exp(logits, size) : -std::numeric_limits<double>::infinity();
    targets[row] = own ? static_cast<double>(static_cast<Scalar<T>>(logits[column])) : 0;
  }
}

template <class T>
TITAN_CPU_CLONES void part_grad_rows(T* logits, const int64_t* labels, const double* log_sums, int64_t rows,
                                     int64_t size, int64_t first) {
  for (int64_t row = 0; row < rows; ++row, logits += size) {
    if (labels[row] == kIgnoredLabel) {
      std::memset(static_cast<void*>(logits), 0, static_cast<size_t>(size) * sizeof(T));
      continue;
    }
    const int64_t column = labels[row] - first;
    const bool own = column >= 0 && column < size;
    const auto target = own ? static_cast<Scalar<T>>(logits[column]) : Scalar<T>{};
    to_probabilities(logits, size, log_sums[row]);
    if (own) logits[column] = static_cast<T>(std::exp(target - static_cast<Scalar<T>>(log_sums[row])) - 1);
  }
}

int64_t rows_per_task(int64_t size) { return 1 + 8192 / (size + 1); }

void check_labels(const int64_t* labels, int64_t rows, int64_t vocab_size) {
  for (int64_t row = 0; row < rows; ++row)
    TITAN_CHECK((labels[row] >= 0 && labels[row] < vocab_size) || labels[row] == kIgnoredLabel, "label ",
                labels[row], " isn't in a vocabulary of ", vocab_size, "; ", kIgnoredLabel,
                " marks tokens that don't count");
}

at::Tensor cross_entropy_cpu(at::Tensor& logits, const at::Tensor& labels, bool with_grad) {
  const at::Tensor targets = labels.contiguous();
  const int64_t rows = logits.size(0), size = logits.size(1);
  check_labels(targets.const_data_ptr<int64_t>(), rows, size);
  if (!cpu::have_kernel(logits) || !logits.is_contiguous())
    return composite::cross_entropy_(logits, labels, with_grad);
  std::vector<double> losses(static_cast<size_t>(rows));
  cpu::dispatch(logits, [&]<class T>(T*) {
    at::parallel_for(0, rows, rows_per_task(size), [&](int64_t begin, int64_t end) {
      cross_entropy_rows<T>(losses.data() + begin, logits.mutable_data_ptr<T>() + begin * size,
                            targets.const_data_ptr<int64_t>() + begin, end - begin, size, with_grad);
    });
  });
  double total = 0;
  for (const double loss : losses) total += loss;
  return at::scalar_tensor(total, at::TensorOptions().dtype(at::kDouble));
}

at::Tensor vocabulary_stats_cpu(const at::Tensor& logits, const at::Tensor& labels, int64_t first) {
  if (!cpu::have_kernel(logits) || !logits.is_contiguous())
    return composite::vocabulary_stats(logits, labels, first);
  const int64_t rows = logits.size(0), size = logits.size(1);
  const at::Tensor targets = labels.contiguous();
  at::Tensor stats = at::empty({2, rows}, logits.options().dtype(at::kDouble));
  auto* out = stats.mutable_data_ptr<double>();
  cpu::dispatch(logits, [&]<class T>(T*) {
    at::parallel_for(0, rows, rows_per_task(size), [&](int64_t begin, int64_t end) {
      part_stats_rows<T>(out + begin, out + rows + begin, logits.const_data_ptr<T>() + begin * size,
                         targets.const_data_ptr<int64_t>() + begin, end - begin, size, first);
    });
  });
  return stats;
}

void vocabulary_grad_cpu(at::Tensor& logits, const at::Tensor& labels, int64_t first,
                         const at::Tensor& log_sum) {
  if (!cpu::have_kernel(logits) || !logits.is_contiguous())
    return composite::vocabulary_grad_(logits, labels, first, log_sum);
  const int64_t rows = logits.size(0), size = logits.size(1);
  const at::Tensor targets = labels.contiguous(), sums = log_sum.contiguous();
  cpu::dispatch(logits, [&]<class T>(T*) {
    at::parallel_for(0, rows, rows_per_task(size), [&](int64_t begin, int64_t end) {
      part_grad_rows<T>(logits.mutable_data_ptr<T>() + begin * size,
                        targets.const_data_ptr<int64_t>() + begin, sums.const_data_ptr<double>() + begin,
                        end - begin, size, first);
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
