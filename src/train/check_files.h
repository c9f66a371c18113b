#pragma once

#include <optional>
#include <string>
#include <vector>

#include "titan/train/job_config.h"

namespace titan::train {

/// Adds to `problems` what is wrong with what the job reads: data sets, recorded batches, tokenizer, initial
/// weights. Looks at no more than names, headers and the tokenizer, so that it takes well under a second.
/// `dp_degree` is unset where the degrees are wrong themselves; then batches aren't judged.
CheckedFiles check_files(const JobConfig& config, const config::Origins& origins,
                         std::optional<int> dp_degree, std::vector<std::string>& problems);

}  // namespace titan::train
