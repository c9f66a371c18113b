#include <torch/library.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "ops/cpu/dtype.h"
#include "ops/cpu/simd.h"
#include "ops/operators.h"

namespace titan::ops {

namespace {

using simd::Doubles;
using simd::Floats;
using simd::Vector;

TITAN_INLINE Floats swap_pairs(Floats v) { return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6); }
TITAN_INLINE Doubles swap_pairs(Doubles v) { return __builtin_shufflevector(v, v, 1, 0, 3, 2); }

// The factors of one position, in the layout that rotate_heads reads.
template <class S>
class PairFactors {
 public:
  explicit PairFactors(int64_t size) : cos_(static_cast<size_t>(size)), sin_(static_cast<size_t>(size)) {}
  void set(const S* row, bool inverse) {
    for (size_t i = 0; i + 1 < cos_.size(); i += 2) {
      const S sine = inverse ? -row[i + 1] : row[i + 1];
      cos_[i] = cos_[i + 1] = row[i];
      sin_[i] = -sine;
      sin_[i + 1] = sine;
    }
  }
  TITAN_INLINE int64_t size() const { return static_cast<int64_t>(cos_.size()); }
  TITAN_INLINE const S* cos() const { return cos_.data(); }
  TITAN_INLINE const S* sin() const { return sin_.data(); }

 private:
  std::vector<S> cos_, sin_;
};

// `cos` holds (c, c) for each pair, `sin` (-s, s): out = x * cos + swapped(x) * sin.
template <class T>
TITAN_CPU_CLONES void rotate_heads(T* out, const T* x, int64_t heads,
                                   const PairFactors<simd::Scalar<T>>& factors) {
  constexpr int64_t kWidth = simd::kWidth<T>;
  const simd::Scalar<T>*cos = factors.cos(), *sin = factors.sin();
  const int64_t size = factors.size();
  for (int64_t head = 0; head < heads; ++head, x += size, out += size) {
    for (int64_t i = 0; i < size; i += kWidth) {
      const Vector<T> v = simd::load_up_to(x + i, size - i);
      const Vector<T> c = simd::load_up_to(cos + i, size - i), s = simd::load_up_to(sin + i, size - i);
      simd::store_up_to(out + i, v * c + swap_pairs(v) * s, size - i);
    }
  }
}

at::Tensor rotary_cpu(const at::Tensor& x, const at::Tensor& table,
                      const std::optional<at::Tensor>& positions, bool inverse) {
  if (!cpu::have_kernel(x)) return composite::rotary(x, table, positions, inverse);
  const at::Tensor in = x.contiguous(), rows = table.to(composite::accumulate_type(x)).contiguous();
  const at::Tensor at_positions =
      positions ? positions->expand({x.size(0), x.size(1)}).contiguous() : at::Tensor();
  const int64_t tokens = x.size(0) * x.size(1), seq_len = x.size(1), heads = x.size(2), size = x.size(3),
                table_rows = table.size(0);
  const int64_t* position_of = positions ? at_positions.const_data_ptr<int64_t>() : nullptr;
  at::Tensor out = at::empty(x.sizes(), x.options());
  cpu::dispatch(x, [&]<class T>(T*) {
    const auto* table_data = rows.const_data_ptr<simd::Scalar<T>>();
    at::parallel_for(0, tokens, 1 + 16384 / (heads * size + 1), [&](int64_t begin, int64_t end) {
      PairFactors<simd::Scalar<T>> factors(size);
      for (int64_t token = begin; token < end; ++token) {
        const int64_t position = position_of ? position_of[token] : token % seq_len;
        TITAN_CHECK(position >= 0 && position < table_rows, "rotary: position ", position,
                    " isn't in the table of ", table_rows);
        factors.set(table_data + position * size, inverse);
        const int64_t first = token * heads * size;
        rotate_heads<T>(out.mutable_data_ptr<T>() + first, in.const_data_ptr<T>() + first, heads, factors);
      }
    });
  });
  return out;
}

TORCH_LIBRARY_IMPL(titan, CPU, m) { m.impl("rotary", rotary_cpu); }

}  // namespace
}  // namespace titan::ops
