#pragma once

// This machine's own speed, for plans of it.

#include <functional>
#include <string>

#include "plan/cluster.h"

namespace titan::plan {

/// Measures products in float32 and bfloat16, copies, and the time of a launch, on the first GPU or else on the CPU: about half a minute. On a CPU whose
/// cores `num_ranks` processes share, each gets so much less. What one device can't tell, the links between GPUs and hosts, is `base`'s.
/// `progress` gets a line for each measurement. This process can't plan afterwards.
ClusterSpec calibrate(const ClusterSpec& base, int num_ranks,
                      const std::function<void(const std::string&)>& progress);

}  // namespace titan::plan
