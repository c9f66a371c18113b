#pragma once

// The data-parallel layouts that tests of a toy or a Llama run through.

#include <vector>

namespace titan::testing {

struct Layout {
  int replicate = 1;
  int shard = 1;
};

/// Layouts of all ranks: FSDP, DDP, and HSDP with 4 ranks.
inline std::vector<Layout> layouts(int world_size) {
  std::vector<Layout> all{{1, world_size}};
  if (world_size > 1) all.push_back({world_size, 1});
  if (world_size == 4) all.push_back({2, 2});
  return all;
}

}  // namespace titan::testing
