#pragma once

// Devices that count what they are given instead of computing (src/plan/gpu). For the library they are GPUs.

#include <c10/core/Device.h>

#include "dist/device_backend.h"

namespace titan::dist {

class PlannedDevices : public DeviceBackend {};

/// From now on these are the process's devices, in place of those of the CUDA plugin. Throws Error if that is open. `devices` lives as
/// long as the process.
void use_planned_devices(PlannedDevices& devices);

/// Whether tensors on the device have no memory that could be read or written.
bool is_planned(c10::Device device);

}  // namespace titan::dist
