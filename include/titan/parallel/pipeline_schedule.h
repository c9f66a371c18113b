#pragma once

// Pipeline schedules as values: what each pipeline rank does in one optimizer step, in order. Plain data, no
// tensors: made by name (pipeline_generators.h) or read from a file (pipeline_csv.h), completed with sends,
// receives and parameter actions (pipeline_completion.h), checked (pipeline_check.h), simulated
// (pipeline_simulation.h), printed (pipeline_timeline.h), and run by train::StepRunner.
//
// [Note: stages and ranks]
// A model is cut into stages 0 .. num_stages-1; a pipeline rank owns one or several. Loop-shaped schedules
// give rank r of p the stages r, r+p, r+2p, ...; V-shaped ones r and 2p-1-r.

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace titan::pipeline {

/// One entry of a schedule. `micro_batch` is -1 for Unshard, Reshard and Reduce.
struct Action {
  enum class Kind : uint8_t {
    Forward,          ///< F: the stage on one micro-batch; the last stage computes the loss too
    Backward,         ///< B: all gradients
    BackwardInput,    ///< I: the gradient of the stage's input only; what weights need is kept
    BackwardWeight,   ///< W: the rest, from what I kept
    SendForward,      ///< the stage's output to the next stage's rank
    ReceiveForward,   ///< the stage's input from the previous stage's rank
    SendBackward,     ///< the gradient of the stage's input to the previous stage's rank
    ReceiveBackward,  ///< the gradient of the stage's output from the next stage's rank
    Unshard,          ///< gathers the stage's parameters over the data-parallel ranks
    Reshard,          ///< frees them
    Reduce,           ///< sums the stage's gradients over the data-parallel ranks; after its last B or W
  };
  Kind kind = Kind::Forward;
  int stage = 0;
  int micro_batch = -1;
  friend bool operator==(const Action&, const Action&) = default;
};

/// F, B, I or W: what keeps a rank busy.
constexpr bool is_compute(Action::Kind kind) { return kind <= Action::Kind::BackwardWeight; }
/// A send or a receive.
constexpr bool is_communication(Action::Kind kind) {
  return kind >= Action::Kind::SendForward && kind <= Action::Kind::ReceiveBackward;
}
/// Unshard, Reshard or Reduce.
constexpr bool is_parameter_action(Action::Kind kind) { return kind >= Action::Kind::Unshard; }

/// "3F7", "0I2", "1SEND_F0", "2RECV_B5", "0UNSHARD", "0REDUCE_GRAD": TorchTitan's and PyTorch's notation.
std::string to_string(const Action& action);
std::ostream& operator<<(std::ostream& out, const Action& action);

struct Schedule {
  std::string name;
  int num_stages = 1;
  int num_micro_batches = 1;
  std::vector<int> rank_of_stage = {0};
  std::vector<std::vector<Action>> ranks;  ///< per pipeline rank

  int num_ranks() const { return static_cast<int>(ranks.size()); }
  friend bool operator==(const Schedule&, const Schedule&) = default;
};

/// Whether any action is a B, I or W; a schedule without them evaluates.
bool has_backward(const Schedule& schedule);
/// Whether any action is a send or a receive.
bool has_communication(const Schedule& schedule);

}  // namespace titan::pipeline
