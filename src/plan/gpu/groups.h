#pragma once

// Groups of planned devices: one rank of any size, whose calls are counted.

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "dist/device_backend.h"

namespace titan::plan {

c10::intrusive_ptr<c10d::Backend> make_planned_group(const dist::GroupSpec& spec);

}  // namespace titan::plan
