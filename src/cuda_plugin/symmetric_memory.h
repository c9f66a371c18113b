#pragma once

// dist::PeerMemory of GPUs: LibTorch's symmetric memory, on a stream of its own.

#include <memory>
#include <string>

#include "titan/dist/device_backend.h"
#include "titan/dist/peer_memory.h"

namespace titan::dist {

/// The current device, for its peers: "<host> <bus id>".
std::string symmetric_memory_address();

/// Why the current device can't share memory with the one of that address; empty: it can.
std::string why_no_symmetric_memory(const std::string& address);

/// Of the current device. Allocates nothing yet.
std::unique_ptr<PeerMemory> make_symmetric_memory(const GroupSpec& spec);

}  // namespace titan::dist
