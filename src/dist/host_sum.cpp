#include "dist/host_sum.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "titan/core/error.h"

// Plain loops, which the compiler clones for several vector widths. Not under sanitizers, whose runtime isn't
// ready when the loader chooses a clone.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define TITAN_WIDE \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), optimize("O3")))
#else
#define TITAN_WIDE
#endif

namespace titan::dist {
namespace {

// Rounds bits, so that the loops vectorize. NaN is handled apart: rounding its mantissa could give infinity.
inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}
inline float from_bfloat16(uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
}

TITAN_WIDE void sum(float* acc, const float* part, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += part[i];
}
TITAN_WIDE void sum(double* acc, const double* part, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += part[i];
}
TITAN_WIDE void sum(float* acc, const c10::BFloat16* part, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += from_bfloat16(part[i].x);
}
TITAN_WIDE void widen(float* acc, const c10::BFloat16* part, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = from_bfloat16(part[i].x);
}
TITAN_WIDE void round_to(c10::BFloat16* target, const float* acc, int64_t n) {
  for (int64_t i = 0; i < n; ++i) target[i].x = to_bfloat16(acc[i]);
}

template <class Acc, class T>
void sum(Acc* acc, const T* part, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += static_cast<Acc>(part[i]);
}
template <class Acc, class T>
void widen(Acc* acc, const T* part, int64_t n) {
  std::copy(part, part + n, acc);
}
template <class T, class Acc>
void round_to(T* target, const Acc* acc, int64_t n) {
  std::copy(acc, acc + n, target);
}

template <class T, class Acc>
class TypedReducer final : public Reducer {
 public:
  explicit TypedReducer(ReduceOp op) : op_(op), acc_(kCapacity) {}

  void begin(const void* part, int64_t n) override { widen(acc_.data(), static_cast<const T*>(part), n); }
  void add(const void* part, int64_t n) override {
    const T* values = static_cast<const T*>(part);
    Acc* acc = acc_.data();
    if (op_ == ReduceOp::Sum) return sum(acc, values, n);
    // A NaN wins: a maximum of losses must not hide one.
    const auto replaces = [max = op_ == ReduceOp::Max](Acc value, Acc old) {
      return (max ? value > old : value < old) || value != value;
    };
    for (int64_t i = 0; i < n; ++i) {
      const Acc value = static_cast<Acc>(values[i]);
      if (replaces(value, acc[i])) acc[i] = value;
    }
  }
  void store(void* target, int64_t n) override { round_to(static_cast<T*>(target), acc_.data(), n); }

 private:
  ReduceOp op_;
  std::vector<Acc> acc_;
};

template <class T, class Acc>
std::unique_ptr<Reducer> make_typed(ReduceOp op) {
  return std::make_unique<TypedReducer<T, Acc>>(op);
}
std::unique_ptr<Reducer> make_of_bools(ReduceOp op) {
  return make_typed<uint8_t, uint8_t>(op == ReduceOp::Sum ? ReduceOp::Max : op);
}

struct ReducerOfType {
  c10::ScalarType dtype;
  std::unique_ptr<Reducer> (*make)(ReduceOp op);
};
constexpr ReducerOfType kReducers[] = {{c10::kFloat, make_typed<float, float>},
                                       {c10::kDouble, make_typed<double, double>},
                                       {c10::kBFloat16, make_typed<c10::BFloat16, float>},
                                       {c10::kHalf, make_typed<c10::Half, float>},
                                       {c10::kLong, make_typed<int64_t, int64_t>},
                                       {c10::kInt, make_typed<int32_t, int32_t>},
                                       {c10::kShort, make_typed<int16_t, int16_t>},
                                       {c10::kByte, make_typed<uint8_t, uint8_t>},
                                       {c10::kChar, make_typed<int8_t, int8_t>},
                                       {c10::kBool, make_of_bools}};

const ReducerOfType* find_reducer(c10::ScalarType dtype) {
  const auto* found = std::ranges::find(kReducers, dtype, &ReducerOfType::dtype);
  return found == std::end(kReducers) ? nullptr : found;
}

}  // namespace

bool can_reduce(c10::ScalarType dtype) { return find_reducer(dtype) != nullptr; }

std::unique_ptr<Reducer> make_reducer(c10::ScalarType dtype, ReduceOp op) {
  const ReducerOfType* reducer = find_reducer(dtype);
  if (!reducer) throw Error(titan::str("ranks of one host can't reduce ", dtype));
  return reducer->make(op);
}

}  // namespace titan::dist
