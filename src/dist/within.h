#pragma once

#include <chrono>
#include <functional>

namespace titan::checkpoint::detail {

/// Runs `call` on a thread of its own. True when it is done within `limit`; throws what it throws. False: it
/// isn't, and the thread is left to itself, so `call` has to own whatever it uses.
bool within(std::chrono::milliseconds limit, std::function<void()> call);

}  // namespace titan::checkpoint::detail
