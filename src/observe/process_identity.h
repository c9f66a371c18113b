#pragma once

// What this process is and where it runs, for logs.

#include <string>

#include <c10/core/Device.h>

namespace titan::dist {
class World;
}

namespace titan::train {

std::string host_name();

/// A JSON object: versions, machine, device, place in the job, command line, threads.
std::string process_environment_json(const dist::World& world, at::Device device);

}  // namespace titan::train
