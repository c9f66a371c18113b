#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "titan/dist/flight_report.h"

namespace titan::dist {

struct JoinedFlights {
  std::vector<FlightLane> lanes;
  std::unordered_map<const FlightCall*, size_t> lane_of;
};

/// All files' calls by group, purpose and ranks, and by sequence number. Of several calls of a rank under one
/// number (PyTorch's coalesced ones) the first stands for all.
JoinedFlights join_flights(const std::vector<FlightFile>& files);

/// Why two calls of one sequence number can't be the same; "" where they can.
std::string difference(const FlightLane& lane, const FlightCall& a, const FlightCall& b);

/// "Float [4, 8] to [4]", "" for a barrier
std::string describe_tensors(const FlightCall& call);

/// "rank 3", "ranks 0-2, 5", of many the first
std::string name_ranks(std::vector<int> ranks);

}  // namespace titan::dist
