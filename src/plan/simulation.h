#pragma once

// [Note: the time of a step]
// A discrete-event simulation of what the ranks' traces say: each rank's host makes its calls one after another, its streams run what was queued
// on them in order, and wait where events were waited for; each group's collectives run on a stream of their own. So what overlaps, and what
// waits for what, is what the program asked for.
//
// - Kernels of one device that run at the same time share it. While a collective runs, computation takes CostModel::contention() longer.
// - Transfers of one rank share the links within its host, and those between hosts. Copies between the host's memory and the device share the bus,
//   each direction for itself, and take nothing from kernels.
// - One rank of each pipeline rank is simulated. Sends and receives between them meet; all other ranks do what the rank does that stands for
//   them, at the same time.
//
// The last step of a trace is measured, from the end of the one before it. What is recorded in a CUDA graph takes the host no time.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/cost_model.h"
#include "plan/trace.h"

namespace titan::plan {

/// The state of a rank's computation stream.
enum class Activity : uint8_t {
  Compute,
  Optimizer,             ///< also the gradients' norm
  ExposedCommunication,  ///< waits for a collective, or for a transfer
  Bubble,                ///< waits for another pipeline rank to send
  Host                   ///< waits for the host's next launch
};
constexpr int kNumActivities = 5;
/// "compute", "optimizer", "exposed_communication", "bubble", "host"
const char* name_of(Activity activity);

struct SimulatedRank {
  const Trace* trace = nullptr;
  int world_rank = 0;
};

/// A piece of work on one stream of one rank.
struct Span {
  int rank = 0;        ///< its place in the list of simulated ranks
  int64_t stream = 0;  ///< below 0: a group's own
  double begin = 0, end = 0;
  std::string name, module;
  Activity activity = Activity::Compute;
  size_t entry = 0;  ///< the place in the rank's trace
};

struct StepTime {
  double seconds = 0;
  struct OfRank {
    std::array<double, kNumActivities> seconds{};  ///< their sum is the step's
    double communicating = 0;                      ///< while any collective ran, hidden or not
    double products = 0, attention = 0;            ///< while such kernels ran: parts of Activity::Compute
  };
  std::vector<OfRank> ranks;
  /// The measured step's, if asked for.
  std::vector<Span> spans;
  double begin = 0;  ///< when that step began, as spans count
};

/// `ranks_of_stage`: world size by pipeline depth; ranks are in order of their pipeline rank. Throws Error if the ranks wait for each other
/// without end.
StepTime simulate(const std::vector<SimulatedRank>& ranks, int ranks_of_stage, const CostModel& costs,
                  bool with_spans = false);

}  // namespace titan::plan
