#include "host_sum.h"

#include <algorithm>
#include <array>
#include <type_traits>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "titan/core/error.h"

// The loops are plain; the compiler makes them as wide as the processor at hand. Not under sanitizers, whose
// run time isn't up when the loader chooses a clone.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define TITAN_WIDE \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), optimize("O3")))
#else
#define TITAN_WIDE
#endif

namespace titan::dist {
namespace {

// By bits, so that the loops vectorize. NaN stays NaN, whose mantissa could be rounded to infinity.
inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}
inline float from_bfloat16(uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
}

TITAN_WIDE void sum_float(float* acc, const float* part, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += part[i];
}
TITAN_WIDE void sum_double(double* acc, const double* part, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += part[i];
}
TITAN_WIDE void sum_bfloat16(float* acc, const uint16_t* part, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += from_bfloat16(part[i]);
}
TITAN_WIDE void widen_bfloat16(float* acc, const uint16_t* part, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = from_bfloat16(part[i]);
}
TITAN_WIDE void round_bfloat16(uint16_t* target, const float* acc, int64_t n) {
  for (int64_t i = 0; i < n; ++i) target[i] = to_bfloat16(acc[i]);
}

void sum(float* acc, const float* part, int64_t n) { sum_float(acc, part, n); }
void sum(double* acc, const double* part, int64_t n) { sum_double(acc, part, n); }
void sum(float* acc, const c10::BFloat16* part, int64_t n) {
  sum_bfloat16(acc, reinterpret_cast<const uint16_t*>(part), n);
}
template <class Acc, class T>
void sum(Acc* acc, const T* part, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += static_cast<Acc>(part[i]);
}

template <class Acc, class T>
void widen(Acc* acc, const T* part, int64_t n) {
  if constexpr (std::is_same_v<T, c10::BFloat16>)
    widen_bfloat16(acc, reinterpret_cast<const uint16_t*>(part), n);
  else
    std::copy(part, part + n, acc);
}

template <class Acc, class T>
void round_to(T* target, const Acc* acc, int64_t n) {
  if constexpr (std::is_same_v<T, c10::BFloat16>)
    round_bfloat16(reinterpret_cast<uint16_t*>(target), acc, n);
  else
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

}  // namespace

std::unique_ptr<Reducer> make_reducer(c10::ScalarType dtype, ReduceOp op) {
  switch (dtype) {
    case c10::kFloat:
      return std::make_unique<TypedReducer<float, float>>(op);
    case c10::kDouble:
      return std::make_unique<TypedReducer<double, double>>(op);
    case c10::kBFloat16:
      return std::make_unique<TypedReducer<c10::BFloat16, float>>(op);
    case c10::kHalf:
      return std::make_unique<TypedReducer<c10::Half, float>>(op);
    case c10::kLong:
      return std::make_unique<TypedReducer<int64_t, int64_t>>(op);
    case c10::kInt:
      return std::make_unique<TypedReducer<int32_t, int32_t>>(op);
    case c10::kShort:
      return std::make_unique<TypedReducer<int16_t, int16_t>>(op);
    case c10::kByte:
      return std::make_unique<TypedReducer<uint8_t, uint8_t>>(op);
    case c10::kChar:
      return std::make_unique<TypedReducer<int8_t, int8_t>>(op);
    case c10::kBool:
      return std::make_unique<TypedReducer<uint8_t, uint8_t>>(op == ReduceOp::Sum ? ReduceOp::Max : op);
    default:
      throw Error(titan::str("ranks of one host can't reduce ", dtype));
  }
}

bool can_reduce(c10::ScalarType dtype) {
  constexpr std::array known = {c10::kFloat, c10::kDouble, c10::kBFloat16, c10::kHalf, c10::kLong,
                                c10::kInt,   c10::kShort,  c10::kByte,     c10::kChar, c10::kBool};
  return std::find(known.begin(), known.end(), dtype) != known.end();
}

}  // namespace titan::dist
