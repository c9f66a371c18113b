#include "parallel/pipeline/schedule/check.h"

#include <algorithm>

namespace titan::pipeline {

namespace {

using Kind = Action::Kind;

CheckCase make_case(const Schedule& schedule, const CheckOptions& options) {
  TITAN_CHECK(options.channel_capacity >= 0, "channel_capacity is 0 or more, not ", options.channel_capacity);
  CheckCase check{.schedule = schedule, .options = options};
  for (const std::vector<Action>& actions : schedule.ranks)
    for (const Action& action : actions) {
      check.communicates |= is_communication(action.kind);
      check.gathers |= action.kind == Kind::Unshard || action.kind == Kind::Reshard;
      check.reduces |= action.kind == Kind::Reduce;
    }
  return check;
}

}  // namespace

Positions::Positions(const Schedule& schedule)
    : positions_(static_cast<size_t>(Kind::ReceiveBackward) + 1, PerMicroBatch<int>(schedule, kNone)) {}

int Positions::backward(int stage, int micro_batch) const {
  return std::max(of({Kind::Backward, stage, micro_batch}), of({Kind::BackwardInput, stage, micro_batch}));
}

std::string to_string(const Problem& problem, const Schedule& schedule) {
  if (problem.rank < 0) return problem.message;
  if (problem.position < 0) return str("rank ", problem.rank, ": ", problem.message);
  return str("rank ", problem.rank, ", action ", problem.position, " (",
             schedule.ranks[problem.rank][problem.position], "): ", problem.message);
}

std::vector<Problem> find_problems(const Schedule& schedule, const CheckOptions& options) {
  CheckCase check = make_case(schedule, options);
  check_shape(check);
  if (!check.findings.empty()) return check.findings.take();
  Positions positions(schedule);
  check_actions(check, positions);
  if (check.findings.empty()) check_complete(check, positions);
  if (!check.findings.empty()) return check.findings.take();
  check_order(check, positions);
  check_channels(check);
  check_parameters(check);
  check_live_activations(check);
  if (check.findings.empty()) check_progress(check);
  return check.findings.take();
}

void check_schedule(const Schedule& schedule, const CheckOptions& options) {
  std::vector<std::string> messages;
  for (const Problem& problem : find_problems(schedule, options))
    messages.push_back(str("pipeline schedule ", schedule.name, ": ", to_string(problem, schedule)));
  if (!messages.empty()) throw ConfigError(messages);
}

}  // namespace titan::pipeline
