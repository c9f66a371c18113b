#pragma once

#include <memory>
#include <string>

#include "dist/device_backend.h"

namespace titan::dist {

std::unique_ptr<SymmetricMemory> make_cuda_symmetric_memory(const GroupSpec& spec);

/// DeviceBackend::device_address() of the current GPU.
std::string gpu_address();
/// DeviceBackend::why_no_symmetric_memory().
std::string why_not_reachable(const std::string& address);

}  // namespace titan::dist
