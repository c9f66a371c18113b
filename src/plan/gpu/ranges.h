#pragma once

// Where in the model a planned device is given work: the named ranges that modules and collectives open for traces.

#include <cstdint>
#include <string>

namespace titan::plan {

/// Follows the ranges of all threads while it lives.
class RangeWatch {
 public:
  RangeWatch();
  ~RangeWatch();
  RangeWatch(const RangeWatch&) = delete;
  RangeWatch& operator=(const RangeWatch&) = delete;

 private:
  uint64_t handle_;
};

/// This thread's innermost range that isn't a collective's: "layers.3.attention", "layers.3 backward"; "" outside of all.
std::string current_module();
/// The collective that this thread launches: "all_gather fsdp::all_gather layers.3"; "" if there is none.
std::string current_call();

}  // namespace titan::plan
