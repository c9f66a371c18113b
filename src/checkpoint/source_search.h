#pragma once

// Which ranks' pieces have elements of a box: a walk over the axes that goes to the positions that meet it,
// and to no other.

#include <cstdint>
#include <vector>

#include "titan/checkpoint/state_table.h"

namespace titan::checkpoint::detail {

/// Piece `index` of `num_pieces` of a part: rows by chunk_of, may be empty. A scalar is one piece.
Box piece_of(Box part, int64_t num_pieces, int64_t index);

/// StateTable::sources_of, of a tensor whose layout was checked.
std::vector<Source> search_sources(const StateTensor& tensor, const Box& wanted, int64_t world_size,
                                   int64_t num_pieces, int64_t first_writer);

}  // namespace titan::checkpoint::detail
