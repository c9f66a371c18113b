#include "titan/data/loader_state.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "core/shallow_json.h"
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
  const auto check = [](bool holds, const auto&... what) {
    if (!holds) throw Error(str("not a loader's state: ", what...));
  };
  const auto tree = parse_shallow_json(text);
  check(tree.is_object(), "no JSON object, or one nested deeper than ", kMaxJsonDepth);
  const auto steps = json_count(tree, "steps"), num_lanes = json_count(tree, "num_lanes");
  check(steps && num_lanes, "'steps' and 'num_lanes' have to be whole numbers");
  check(tree.contains("feed") && tree["feed"].is_string(), "'feed' has to be a text");
  check(tree.contains("lanes") && tree["lanes"].is_array(), "'lanes' has to be a list");
  LoaderState state{.steps = *steps, .num_lanes = *num_lanes, .feed_fingerprint = tree["feed"], .lanes = {}};
  for (const auto& row : tree["lanes"]) {
    std::array<int64_t, 4> numbers = {};
    check(row.is_array() && row.size() == numbers.size(), "a lane has ", numbers.size(), " numbers");
    for (size_t i = 0; i < numbers.size(); ++i) {
      const auto number = json_count(row[i]);
      check(number.has_value(), "a lane's numbers have to be whole ones of 0 to ", kMaxJsonCount);
      numbers[i] = *number;
    }
    state.lanes.push_back({numbers[0], numbers[1], numbers[2], numbers[3]});
  }
  return state;
}

}  // namespace titan::data
