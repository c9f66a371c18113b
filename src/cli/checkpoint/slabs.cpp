#include "cli/checkpoint/slabs.h"

#include <ATen/ops/empty.h>

namespace titan::cli {

at::Tensor read_slab(const checkpoint::SavedState& state, const std::string& name, const Box& box) {
  at::Tensor slab = at::empty(box.length, at::dtype(state.tensor(name).dtype));
  state.read(name, box, slab);
  return slab;
}

}  // namespace titan::cli
