#pragma once

// Who failed first: when a rank is lost, its neighbours notice, then theirs, and each only knows of the one
// before.

#include <functional>
#include <string>

#include "titan/dist/world.h"

namespace titan::dist {

/// Tells the other ranks, through the job's store, that this one fails with `message`. Returns what the first
/// rank to do so said ("rank 2: ..."), "" where that is this rank; where the store is gone, that rank 0
/// probably is too. Doesn't throw. `let_go` is called once that is told or can't be: it ends what others wait
/// for, so that they fail too, and look; it doesn't throw either. Then rank 0, which keeps the store, waits
/// two seconds at most for them to tell.
std::string tell_failure(const World& world, const std::string& message, const std::function<void()>& let_go);

}  // namespace titan::dist
