#pragma once

// What is said of a saved tensor without reading it.

#include <cstdint>
#include <string>

#include "titan/checkpoint/state_table.h"

namespace titan::cli {

/// "float32"
std::string dtype_text(at::ScalarType dtype);
int64_t num_elements(const checkpoint::StateTensor& tensor);
int64_t num_bytes(const checkpoint::StateTensor& tensor);
/// "dim 0 by fsdp 4, dim 1 by tp 2; on pp 1 alone; 2 copies"
std::string layout_text(const checkpoint::StateTensor& tensor, int64_t world_size);
/// The axes of which any layout speaks, the outermost first: "pp 2, fsdp 4, tp 2".
std::string mesh_text(const checkpoint::StateTable& table);

}  // namespace titan::cli
