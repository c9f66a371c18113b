#pragma once

// What differs between two texts: settings, or JSON by its leaves.

#include <string>
#include <vector>

namespace titan::cli {

/// "training.steps: 10 | 20", a line each, of resolved configs; job.dump_folder doesn't count.
std::vector<std::string> config_differences(const std::string& a, const std::string& b);
/// "/step: 10 | 20" of JSON, by leaves; of other texts where they part. Empty: they are equal.
std::vector<std::string> text_differences(const std::string& a, const std::string& b);

}  // namespace titan::cli
