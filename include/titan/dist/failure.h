#pragma once

// Who failed first: when a rank is lost, its neighbours notice, then theirs, and each only knows of the one
// before.

#include <string>

#include "titan/dist/world.h"

namespace titan::dist {

/// Tells the other ranks, through the job's store, that this one fails with `message`. Returns what the first
/// rank to do so said ("rank 2: ..."), "" where that is this rank, or where the store is gone with rank 0.
/// Doesn't throw, and doesn't wait for any rank but the store's.
std::string tell_failure(const World& world, const std::string& message);

}  // namespace titan::dist
