#pragma once

// What ranks come to an agreement about over a tree.

#include <string>
#include <vector>

#include "rank_tree.h"

namespace titan::checkpoint::detail {

/// All ranks' problems as one: empty where nobody has one. `lost` where a rank is.
Verdict merged_problems(const RankTree& tree, const std::vector<Answer>& answers);
/// On rank 0: who says something else than rank 0, as "rank 3 (host) WHAT rank 0 (host)".
Verdict unequal(const RankTree& tree, const std::vector<Answer>& answers, const std::string& what);
/// What any rank has against going on, the same on all: empty for nothing.
Verdict agree(RankTree& tree, const std::string& problem);
/// What the lowest rank says that says anything; empty: none does. Throws Error where a rank is lost.
std::string any_text(RankTree& tree, const std::string& text);

}  // namespace titan::checkpoint::detail
