#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "titan/data/feed.h"

namespace titan::data {

/// What a loader needs to continue: a table with a row a lane, which any number of ranks can share out.
struct LoaderState {
  int64_t steps = 0;             ///< global batches given so far
  int64_t num_lanes = 0;         ///< global batch size
  std::string feed_fingerprint;  ///< of what was read
  std::vector<LaneState> lanes;  ///< of one rank after DataLoader::state, of all after merge; by lane
  friend bool operator==(const LoaderState&, const LoaderState&) = default;
};

/// The tables of all ranks as one. Throws Error when they are of different steps or feeds, or a lane is
/// missing or there twice.
LoaderState merge(const std::vector<LoaderState>& parts);

std::string to_json(const LoaderState& state);
/// Throws Error when the text isn't what to_json writes.
LoaderState loader_state_from_json(std::string_view text);

}  // namespace titan::data
