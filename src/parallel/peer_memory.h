#pragma once

// Device memory that the ranks of an axis share (dist::SymmetricMemory), for every parallelism that copies through it.

#include <memory>
#include <string>

#include "dist/device_backend.h"
#include "titan/dist/collectives.h"
#include "titan/dist/device_mesh.h"

namespace titan {

/// The reason why the ranks of `group` can't all share memory, the same text on each; empty if they can.
/// Collective.
std::string why_not_all_share(dist::Group& group, const dist::DeviceBackend& devices);

/// The same for the ranks of an axis and their own devices.
std::string why_no_peer_memory(const DeviceMesh& axis);

/// For an axis whose ranks can all share memory. Each call makes memory of its own; all ranks make the same calls.
std::unique_ptr<dist::SymmetricMemory> make_peer_memory(const DeviceMesh& axis);

}  // namespace titan
