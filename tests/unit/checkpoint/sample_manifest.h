#pragma once

// A manifest with one of everything.

#include <memory>
#include <string>

#include "titan/checkpoint/manifest.h"

namespace titan::checkpoint::testing {

inline Manifest sample_manifest() {
  const auto sharded = std::make_shared<const TensorLayout>(
      TensorLayout{{{.name = "pp", .size = 2, .stride = 2, .only = 1},
                    {.name = "fsdp", .size = 2, .stride = 1, .dim = 0}}});
  const auto whole = std::make_shared<const TensorLayout>();
  Manifest manifest{.run_id = "0123456789abcdef0123456789abcdef",
                    .step = 500,
                    .library = "titan 0.1.0, torch 2.11.0",
                    .num_threads = 2,
                    .finite = false,
                    .config = "[job]\ndescription = \"a \\ b\"\n",
                    .texts = {{"dataloader", "{\"lanes\":[1,2]}"}, {"train_state", ""}},
                    .table = {},
                    .files = {}};
  manifest.table =
      StateTable({{.name = "model.w", .dtype = at::kBFloat16, .shape = {7, 3}, .layout = sharded},
                  {.name = "model.v", .dtype = at::kFloat, .shape = {8}, .layout = sharded},
                  {.name = "optimizer.step", .dtype = at::kFloat, .shape = {}, .layout = whole}},
                 4);
  for (int64_t rank = 0; rank < 4; ++rank)
    manifest.files.push_back({.num_bytes = 1000 + rank, .header_digest = digest_of(std::to_string(rank))});
  return manifest;
}

}  // namespace titan::checkpoint::testing
