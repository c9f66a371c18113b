#pragma once

// Groups whose ranks are on one host: collectives copy straight from the memory of the others
// (host_channel.h).

#include <c10/util/intrusive_ptr.h>

#include "titan/dist/device_backend.h"

namespace titan::dist {

/// Collective. `sockets` (gloo, of the same ranks) carries send and receive. Null, on all ranks alike, where
/// the kernel or a container keeps the ranks from reading each other's memory.
c10::intrusive_ptr<c10d::Backend> make_host_group(const GroupSpec& spec,
                                                  c10::intrusive_ptr<c10d::Backend> sockets);

}  // namespace titan::dist
