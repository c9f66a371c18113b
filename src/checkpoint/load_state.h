#pragma once

// Loading: what is wanted against what the checkpoint has, and the reads.

#include <map>
#include <set>
#include <string>
#include <vector>

#include "save_plan.h"
#include "titan/checkpoint/checkpointer.h"
#include "titan/checkpoint/saved_state.h"

namespace titan::checkpoint::detail {

/// The keys of objects that are loaded, and what is wrong with the options: a line each.
std::set<std::string> keys_to_load(const std::vector<std::string>& registered, const LoadOptions& options,
                                   const Manifest& manifest, std::vector<std::string>& problems);

/// Everything that keeps the checkpoint from being loaded into `tensors`, a line each. `names`: of the
/// tensors of all pipeline stages.
std::vector<std::string> differences(const std::vector<NamedTensor>& tensors,
                                     const std::set<std::string>& names, const std::set<std::string>& keys,
                                     const LoadOptions& options, const Manifest& manifest);

/// The ranks whose files have parts of these tensors' local parts.
std::set<int64_t> ranks_read(const StateTable& table, const std::vector<NamedTensor>& tensors);

/// Reads each tensor's local part, by several threads: what is in host memory and has the saved dtype right
/// where it belongs, the rest by way of a small buffer. Throws Error.
void read_tensors(const SavedState& saved, const std::vector<NamedTensor>& tensors, int num_threads);

}  // namespace titan::checkpoint::detail
