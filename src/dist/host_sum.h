#pragma once

// Sums (maxima, minima) of parts that arrive one after another, in a fixed order: acc = part 0, acc += part
// 1, ... 16-bit numbers are accumulated in fp32 and rounded once.

#include <cstdint>
#include <memory>

#include <c10/core/ScalarType.h>

#include "titan/dist/collectives.h"

namespace titan::dist {

/// Reduces stretches of at most kCapacity elements. Holds its scratch memory.
class Reducer {
 public:
  static constexpr int64_t kCapacity = 32 * 1024;  ///< elements: a part stays in the cache until it is added

  virtual ~Reducer() = default;
  /// Takes the first part, n <= kCapacity.
  virtual void begin(const void* part, int64_t n) = 0;
  virtual void add(const void* part, int64_t n) = 0;
  virtual void store(void* target, int64_t n) = 0;
};

bool can_reduce(c10::ScalarType dtype);

/// Throws Error for a type that can't be reduced.
std::unique_ptr<Reducer> make_reducer(c10::ScalarType dtype, ReduceOp op);

}  // namespace titan::dist
