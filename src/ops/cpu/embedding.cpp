#include <torch/library.h>

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>

#include "ops/cpu/dtype.h"
#include "ops/cpu/simd.h"
#include "ops/operators.h"

namespace titan::ops {

namespace {

template <class T>
struct TokenGradients {
  const T* grad;
  const int64_t* tokens;
  int64_t count, size;
};

// Adds the columns [begin, end) of every token's gradient to its row, in token order.
template <class T>
TITAN_CPU_CLONES void add_columns(simd::Scalar<T>* out, TokenGradients<T> in, int64_t begin, int64_t end) {
  constexpr int64_t kWidth = simd::kWidth<T>;
  for (int64_t token = 0; token < in.count; ++token) {
    simd::Scalar<T>* row = out + in.tokens[token] * in.size;
    const T* from = in.grad + token * in.size;
    for (int64_t i = begin; i < end; i += kWidth)
      simd::store_up_to(row + i, simd::load_up_to(row + i, end - i) + simd::load_up_to(from + i, end - i),
                        end - i);
  }
}

// Threads divide the columns, not the tokens: no two write to one row, and each row sums in token order for
// any number of threads.
at::Tensor embedding_backward_cpu(const at::Tensor& grad, const at::Tensor& tokens, int64_t num_embeddings) {
  if (!cpu::have_kernel(grad)) return composite::embedding_backward(grad, tokens, num_embeddings);
  constexpr int64_t kColumns = 64;
  const at::Tensor rows = grad.contiguous(), ids = tokens.contiguous();
  const int64_t size = grad.size(-1);
  at::Tensor out = at::zeros({num_embeddings, size}, grad.options().dtype(composite::accumulate_type(grad)));
  cpu::dispatch(grad, [&]<class T>(T*) {
    at::parallel_for(0, (size + kColumns - 1) / kColumns, 1, [&](int64_t begin, int64_t end) {
      add_columns<T>(out.mutable_data_ptr<simd::Scalar<T>>(),
                     {rows.const_data_ptr<T>(), ids.const_data_ptr<int64_t>(), ids.numel(), size},
                     begin * kColumns, std::min(end * kColumns, size));
    });
  });
  return out;
}

TORCH_LIBRARY_IMPL(titan, CPU, m) { m.impl("embedding_backward", embedding_backward_cpu); }

}  // namespace
}  // namespace titan::ops
