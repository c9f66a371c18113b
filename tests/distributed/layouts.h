#pragma once

// The data-parallel layouts for tests of a toy or a Llama.

#include <vector>

namespace titan::testing {

struct DataLayout {
  int replicate = 1;
  int shard = 1;
};

/// Layouts over all ranks: FSDP, DDP, and with 4 ranks HSDP.
inline std::vector<DataLayout> layouts(int world_size) {
  std::vector<DataLayout> all{{1, world_size}};
  if (world_size > 1) all.push_back({world_size, 1});
  if (world_size == 4) all.push_back({2, 2});
  return all;
}

}  // namespace titan::testing
