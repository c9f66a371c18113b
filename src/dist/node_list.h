#pragma once

// SLURM's compressed lists.

#include <string>
#include <string_view>
#include <vector>

namespace titan::dist {

/// "gpu[01-03,7],login1" -> gpu01 gpu02 gpu03 gpu7 login1; several brackets in one name multiply, the last
/// fastest. Throws ConfigError for what isn't such a list.
std::vector<std::string> parse_node_list(std::string_view list);

/// SLURM_TASKS_PER_NODE: "4(x2),3" -> 4 4 3.
std::vector<int> parse_task_counts(std::string_view list);

}  // namespace titan::dist
