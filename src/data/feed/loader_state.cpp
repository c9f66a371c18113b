// The loader's position in a checkpoint: as JSON, and merged from the parts that the ranks hold.

#include <algorithm>
#include <array>

#include "core/json.h"
#include "titan/core/error.h"
#include "titan/data/loader.h"

namespace titan::data {

LoaderState merge(const std::vector<LoaderState>& parts) {
  TITAN_CHECK(!parts.empty(), "no loader states to merge");
  LoaderState whole = parts[0];
  for (size_t i = 1; i < parts.size(); ++i) {
    const LoaderState& part = parts[i];
    TITAN_CHECK(part.steps == whole.steps && part.num_lanes == whole.num_lanes,
                "loader states of different steps: step ", part.steps, " of ", part.num_lanes,
                " lanes and step ", whole.steps, " of ", whole.num_lanes);
    TITAN_CHECK(part.feed_fingerprint == whole.feed_fingerprint, "loader states of different data: '",
                part.feed_fingerprint, "' and '", whole.feed_fingerprint, "'");
    whole.lanes.insert(whole.lanes.end(), part.lanes.begin(), part.lanes.end());
  }
  std::sort(whole.lanes.begin(), whole.lanes.end(),
            [](const auto& a, const auto& b) { return a.lane < b.lane; });
  for (int64_t lane = 0; lane < whole.num_lanes; ++lane)
    TITAN_CHECK(lane < static_cast<int64_t>(whole.lanes.size()) && whole.lanes[lane].lane == lane, "lane ",
                lane, " of ", whole.num_lanes, " is missing or duplicate in the loader states of all ranks");
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
    if (!holds) throw Error(str("not the state of a data loader: ", what...));
  };
  std::string problem;
  const auto tree = parse_json(text, &problem);
  check(tree.is_object(), problem.empty() ? "not a JSON object" : problem);
  const auto steps = json_count(tree, "steps"), num_lanes = json_count(tree, "num_lanes");
  check(steps && num_lanes, "'steps' and 'num_lanes' must be whole numbers");
  check(tree.contains("feed") && tree["feed"].is_string(), "'feed' must be a string");
  check(tree.contains("lanes") && tree["lanes"].is_array(), "'lanes' must be a list");
  LoaderState state{.steps = *steps, .num_lanes = *num_lanes, .feed_fingerprint = tree["feed"], .lanes = {}};
  for (const auto& row : tree["lanes"]) {
    std::array<int64_t, 4> numbers = {};
    check(row.is_array() && row.size() == numbers.size(), "a lane has ", numbers.size(), " numbers");
    for (size_t i = 0; i < numbers.size(); ++i) {
      const auto number = json_count(row[i]);
      check(number.has_value(), "a lane's numbers must be whole numbers from 0 to ", kMaxJsonCount);
      numbers[i] = *number;
    }
    state.lanes.push_back({numbers[0], numbers[1], numbers[2], numbers[3]});
  }
  return state;
}

}  // namespace titan::data
