#include "titan/data/loader_state.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "titan/core/error.h"

namespace titan::data {

LoaderState merge(const std::vector<LoaderState>& parts) {
  TITAN_CHECK(!parts.empty(), "no loader states to merge");
  LoaderState whole = parts[0];
  for (size_t i = 1; i < parts.size(); ++i) {
    const LoaderState& part = parts[i];
    TITAN_CHECK(part.steps == whole.steps && part.num_lanes == whole.num_lanes,
                "loader states of different runs: step ", part.steps, " of ", part.num_lanes,
                " lanes beside step ", whole.steps, " of ", whole.num_lanes);
    TITAN_CHECK(part.feed_fingerprint == whole.feed_fingerprint, "loader states of different data: '",
                part.feed_fingerprint, "' beside '", whole.feed_fingerprint, "'");
    whole.lanes.insert(whole.lanes.end(), part.lanes.begin(), part.lanes.end());
  }
  std::sort(whole.lanes.begin(), whole.lanes.end(),
            [](const auto& a, const auto& b) { return a.lane < b.lane; });
  for (int64_t lane = 0; lane < whole.num_lanes; ++lane)
    TITAN_CHECK(lane < static_cast<int64_t>(whole.lanes.size()) && whole.lanes[lane].lane == lane,
                "the loader states of all ranks lack lane ", lane, " of ", whole.num_lanes,
                ", or have one twice");
  TITAN_CHECK(static_cast<int64_t>(whole.lanes.size()) == whole.num_lanes, "more loader states than lanes");
  return whole;
}

std::string to_json(const LoaderState& state) {
  nlohmann::json tree;
  tree["steps"] = state.steps;
  tree["num_lanes"] = state.num_lanes;
  tree["feed"] = state.feed_fingerprint;
  auto& lanes = tree["lanes"] = nlohmann::json::array();
  for (const auto& lane : state.lanes)
    lanes.push_back(std::array{lane.lane, lane.epoch, lane.position, lane.token_offset});
  return tree.dump();
}

LoaderState loader_state_from_json(std::string_view text) {
  LoaderState state;
  try {
    auto tree = nlohmann::json::parse(text);
    tree.at("steps").get_to(state.steps);
    tree.at("num_lanes").get_to(state.num_lanes);
    tree.at("feed").get_to(state.feed_fingerprint);
    for (const auto& row : tree.at("lanes")) {
      auto [lane, epoch, position, token_offset] = row.get<std::array<int64_t, 4>>();
      state.lanes.push_back({lane, epoch, position, token_offset});
    }
  } catch (const nlohmann::json::exception& error) {
    throw Error(str("not a loader's state: ", error.what()));
  }
  return state;
}

}  // namespace titan::data
