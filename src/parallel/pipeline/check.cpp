// The checker: each action alone, and whether any is missing.

#include "parallel/pipeline/check.h"

#include <algorithm>

namespace titan::pipeline {

namespace {

using Kind = Action::Kind;

bool is_backward(Kind kind) { return is_compute(kind) && kind != Kind::Forward; }

int64_t num_micro_batches_of_all_stages(const Schedule& schedule) {
  return int64_t{schedule.num_stages} * schedule.num_micro_batches;
}

void check_map(CheckCase& check) {
  const Schedule& schedule = check.schedule;
  if (schedule.rank_of_stage.size() != static_cast<size_t>(schedule.num_stages))
    return check.findings.add(-1, -1, "the map of stages to ranks has ", schedule.rank_of_stage.size(),
                              " entries for ", schedule.num_stages, " stages");
  std::vector<bool> owns(schedule.ranks.size(), false);
  for (int stage = 0; stage < schedule.num_stages; ++stage) {
    const int rank = schedule.rank_of_stage[stage];
    if (rank < 0 || rank >= schedule.num_ranks())
      return check.findings.add(-1, -1, "stage ", stage, " is on rank ", rank, "; the ranks are 0 to ",
                                schedule.num_ranks() - 1);
    owns[rank] = true;
  }
  for (int rank = 0; rank < schedule.num_ranks(); ++rank)
    if (!owns[rank]) check.findings.add(rank, -1, "owns no stage");
}

class Single {
 public:
  Single(CheckCase& check, int rank, int position)
      : check_(check),
        schedule_(check.schedule),
        action_(schedule_.ranks[rank][position]),
        rank_(rank),
        position_(position) {}

  void check(Positions& positions) {
    if (!in_range()) return;
    if (schedule_.rank_of_stage[action_.stage] != rank_)
      return add("stage ", action_.stage, " is on rank ", schedule_.rank_of_stage[action_.stage]);
    if (check_.options.purpose == Purpose::Evaluation &&
        (is_backward(action_.kind) || action_.kind == Kind::Reduce))
      return add("an evaluation has forwards only");
    if (is_communication(action_.kind) && !travels()) return;
    if (is_parameter_action(action_.kind)) return;
    int& known = positions.of(action_);
    if (known != Positions::kNone) return add("is there already, as action ", known);
    known = position_;
  }

 private:
  template <class... Args>
  void add(const Args&... args) {
    check_.findings.add(rank_, position_, args...);
  }
  /// Adds a problem and says that the check has failed.
  template <class... Args>
  bool refuse(const Args&... args) {
    add(args...);
    return false;
  }

  bool in_range() {
    if (static_cast<int>(action_.kind) >= kNumKinds) return refuse("is of no known kind");
    if (action_.stage < 0 || action_.stage >= schedule_.num_stages)
      return refuse("there is no stage ", action_.stage, "; the stages are 0 to ", schedule_.num_stages - 1);
    if (is_parameter_action(action_.kind)) return true;
    if (action_.micro_batch < 0 || action_.micro_batch >= schedule_.num_micro_batches)
      return refuse("there is no micro-batch ", action_.micro_batch, "; they are 0 to ",
                    schedule_.num_micro_batches - 1);
    return true;
  }

  // Whether what the message carries is made and used on different ranks.
  bool travels() {
    const bool forward = action_.kind == Kind::SendForward || action_.kind == Kind::ReceiveForward;
    const bool upward = action_.kind == Kind::SendForward || action_.kind == Kind::ReceiveBackward;
    const int other = action_.stage + (upward ? 1 : -1);
    if (other < 0 || other >= schedule_.num_stages)
      return refuse("the ", upward ? "last" : "first", " stage has nobody to exchange ",
                    forward ? "activations" : "gradients", " with there");
    if (schedule_.rank_of_stage[other] == rank_)
      return refuse("stages ", action_.stage, " and ", other, " are both on rank ", rank_,
                    " and hand over without a message");
    return true;
  }

  CheckCase& check_;
  const Schedule& schedule_;
  const Action& action_;
  int rank_, position_;
};

void check_backward(CheckCase& check, const Positions& positions, int stage, int micro_batch) {
  const int rank = check.schedule.rank_of_stage[stage];
  const Action whole{Kind::Backward, stage, micro_batch}, input{Kind::BackwardInput, stage, micro_batch},
      weight{Kind::BackwardWeight, stage, micro_batch};
  const int b = positions.of(whole), i = positions.of(input), w = positions.of(weight);
  if (b >= 0 && (i >= 0 || w >= 0))
    return check.findings.add(rank, b, "a backward is whole or split, but there is ", i >= 0 ? input : weight,
                              " too, as action ", std::max(i, w));
  if (b >= 0 || (i >= 0 && w >= 0)) return;
  if (i >= 0) return check.findings.add(rank, i, weight, " is missing");
  if (w >= 0) return check.findings.add(rank, w, input, " is missing");
  check.findings.add(rank, -1, whole, " (or ", input, " and ", weight, ") is missing");
}

// The two ends of the message that an F, B or I works on.
void check_message(CheckCase& check, const Positions& positions, const Action& compute) {
  if (!positions.has(compute)) return;
  const auto receive = receive_for(check.schedule, compute);
  if (!receive) return;
  if (!positions.has(*receive))
    check.findings.add(check.schedule.rank_of_stage[compute.stage], positions.of(compute), *receive,
                       " is missing");
  const Action send = send_of(*receive);
  if (!positions.has(send))
    check.findings.add(check.schedule.rank_of_stage[send.stage], -1, send, " is missing, for ", *receive,
                       " on rank ", check.schedule.rank_of_stage[compute.stage]);
}

}  // namespace

void check_shape(CheckCase& check) {
  const Schedule& schedule = check.schedule;
  if (schedule.ranks.empty()) return check.findings.add(-1, -1, "there is no rank");
  if (schedule.num_stages < 1 || schedule.num_micro_batches < 1)
    return check.findings.add(-1, -1, "a schedule needs 1 or more stages and micro-batches, got ",
                              schedule.num_stages, " and ", schedule.num_micro_batches);
  check_map(check);
  // Said here once, and the tables below are no larger than the schedule.
  int64_t num_actions = 0;
  for (const std::vector<Action>& actions : schedule.ranks)
    num_actions += static_cast<int64_t>(actions.size());
  if (num_micro_batches_of_all_stages(schedule) > num_actions)
    check.findings.add(-1, -1, "only ", num_actions, " actions for ", schedule.num_micro_batches,
                       " micro-batches of ", schedule.num_stages, " stages: at least their ",
                       num_micro_batches_of_all_stages(schedule), " forwards are wanted");
}

void check_actions(CheckCase& check, Positions& positions) {
  for (int rank = 0; rank < check.schedule.num_ranks(); ++rank)
    for (size_t position = 0; position < check.schedule.ranks[rank].size(); ++position)
      Single(check, rank, static_cast<int>(position)).check(positions);
}

void check_complete(CheckCase& check, const Positions& positions) {
  for (int stage = 0; stage < check.schedule.num_stages; ++stage)
    for (int micro_batch = 0; micro_batch < check.schedule.num_micro_batches; ++micro_batch) {
      const Action forward{Kind::Forward, stage, micro_batch};
      if (!positions.has(forward))
        check.findings.add(check.schedule.rank_of_stage[stage], -1, forward, " is missing");
      if (check.options.purpose == Purpose::Training) check_backward(check, positions, stage, micro_batch);
      if (!check.communicates) continue;
      for (Kind kind : {Kind::Forward, Kind::Backward, Kind::BackwardInput})
        check_message(check, positions, {kind, stage, micro_batch});
    }
}

namespace {

using Kind = Action::Kind;

CheckCase make_case(const Schedule& schedule, const CheckOptions& options) {
  TITAN_CHECK(options.channel_capacity >= 0, "expected channel_capacity of 0 or more, got ",
              options.channel_capacity);
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
