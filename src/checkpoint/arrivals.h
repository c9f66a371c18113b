#pragma once

// Which ranks have come how far, in the job's store: whoever waited in vain for a rank that passes on what
// others say finds out there which of them it was.

#include <cstdint>
#include <string>
#include <vector>

#include "titan/dist/world.h"

namespace titan::checkpoint::detail {

class Arrivals {
 public:
  /// `name`: the same on all ranks, and nobody else's.
  Arrivals(const dist::World& world, std::string name);

  /// This rank is at its call number `call`. Doesn't throw.
  void tell(int64_t call) const;
  /// Those of the ranks first ... last - 1 that aren't there yet. Empty where the store doesn't answer.
  std::vector<int> missing(int first, int last, int64_t call) const;

 private:
  std::string key_of(int rank) const;

  dist::World world_;
  std::string name_;
};

}  // namespace titan::checkpoint::detail
