#include "nccl/reduce.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "runtime/virtual_gpu.h"

namespace virtual_gpu {
namespace {

struct BFloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
};
struct Half {
  _Float16 value;
  operator float() const { return static_cast<float>(value); }
};

template <class T, class Sum>
T narrow(Sum sum) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    uint32_t wide;
    std::memcpy(&wide, &sum, 4);
    if ((wide & 0x7fffffff) > 0x7f800000) return {0x7fc0};
    return {static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)};  // to nearest, ties to even
  } else if constexpr (std::is_same_v<T, Half>) {
    return {static_cast<_Float16>(sum)};
  } else {
    return static_cast<T>(sum);
  }
}

template <class Sum>
Sum combine(Sum a, Sum b, ncclRedOp_t op) {
  switch (op) {
    case ncclProd:
      return static_cast<Sum>(a * b);
    case ncclMax:
      return std::max(a, b);
    case ncclMin:
      return std::min(a, b);
    default:
      return static_cast<Sum>(a + b);
  }
}

template <class T, class Sum = T>
void reduce_as(Reduction reduction, const char* const* sources, int num_sources, char* to, size_t count) {
  auto* result = reinterpret_cast<T*>(to);
  for (size_t i = 0; i < count; ++i) {
    Sum sum{};
    for (int source = 0; source < num_sources; ++source) {
      auto value = static_cast<Sum>(reinterpret_cast<const T*>(sources[source])[i]);
      if (reduction.op >= ncclNumOps) value = static_cast<Sum>(value * reduction.factor);
      sum = source == 0 ? value : combine(sum, value, reduction.op);
    }
    if (reduction.op == ncclAvg) sum = static_cast<Sum>(sum / num_sources);
    result[i] = narrow<T>(sum);
  }
}

}  // namespace

size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 4;
  }
}

void reduce(ncclDataType_t type, Reduction r, const char* const* sources, int num_sources, char* to,
            size_t count) {
  switch (type) {
    case ncclInt8:
      return reduce_as<int8_t>(r, sources, num_sources, to, count);
    case ncclUint8:
      return reduce_as<uint8_t>(r, sources, num_sources, to, count);
    case ncclInt32:
      return reduce_as<int32_t>(r, sources, num_sources, to, count);
    case ncclUint32:
      return reduce_as<uint32_t>(r, sources, num_sources, to, count);
    case ncclInt64:
      return reduce_as<int64_t>(r, sources, num_sources, to, count);
    case ncclUint64:
      return reduce_as<uint64_t>(r, sources, num_sources, to, count);
    case ncclFloat32:
      return reduce_as<float>(r, sources, num_sources, to, count);
    case ncclFloat64:
      return reduce_as<double>(r, sources, num_sources, to, count);
    case ncclBfloat16:
      return reduce_as<BFloat16, float>(r, sources, num_sources, to, count);
    case ncclFloat16:
      return reduce_as<Half, float>(r, sources, num_sources, to, count);
    default:
      not_supported("a reduction of NCCL's data type " + std::to_string(type),
                    "Add it to tests/virtual_gpu/nccl/reduce.cpp.");
  }
}

double scalar_from(ncclDataType_t type, const void* value) {
  switch (type) {
    case ncclFloat64:
      return *static_cast<const double*>(value);
    case ncclFloat32:
      return *static_cast<const float*>(value);
    case ncclBfloat16:
      return *static_cast<const BFloat16*>(value);
    case ncclFloat16:
      return *static_cast<const Half*>(value);
    default:
      not_supported("a factor of NCCL's data type " + std::to_string(type),
                    "Factors are floating-point numbers.");
  }
}

}  // namespace virtual_gpu
