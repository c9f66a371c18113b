#pragma once

// This machine's own speed, for plans of it.

#include <functional>
#include <string>

#include "plan/cluster.h"
#include "titan/dist/world.h"

namespace titan::plan {

/// Measures products in float32, bfloat16 and, where the GPU has them, float8; attention, copies, and the time of a launch, on the first GPU or
/// else on the CPU: about half a minute. On a CPU whose cores `num_ranks` processes share, each gets so much less. Links are `base`'s, except
/// those of one rank on a CPU, which has none. `progress` gets a line for each measurement. This process can't plan afterwards.
ClusterSpec calibrate(const ClusterSpec& base, int num_ranks,
                      const std::function<void(const std::string&)>& progress);

/// Measures what gathers of two or more ranks on one CPU reach, and how late ranks that share its cores come to them. Collective over the
/// world.
ClusterSpec::Host measure_links(const dist::World& world);

}  // namespace titan::plan
