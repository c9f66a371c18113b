// Checks whether a schedule can run. The checks run in the order of this file, and each assumes that those
// before it found no problem.

#include <algorithm>
#include <map>

#include "parallel/pipeline/actions.h"
#include "titan/core/error.h"

namespace titan::pipeline {

namespace {

using Kind = Action::Kind;

/// A limited number of problems.
class Findings {
 public:
  template <class... Args>
  void add(int rank, int position, const Args&... args) {
    if (problems_.size() < kMost) problems_.push_back({rank, position, str(args...)});
  }
  bool empty() const { return problems_.empty(); }
  std::vector<Problem> take() { return std::move(problems_); }

 private:
  static constexpr size_t kMost = 20;
  std::vector<Problem> problems_;
};

/// The position of each action with a micro-batch in its rank's list.
class Positions {
 public:
  static constexpr int kNone = -1;
  explicit Positions(const Schedule& schedule)
      : positions_(static_cast<size_t>(Kind::ReceiveBackward) + 1, PerMicroBatch<int>(schedule, kNone)) {}
  int& of(const Action& action) { return positions_[static_cast<size_t>(action.kind)](action); }
  int of(const Action& action) const { return positions_[static_cast<size_t>(action.kind)](action); }
  bool has(const Action& action) const { return of(action) != kNone; }

 private:
  std::vector<PerMicroBatch<int>> positions_;  // per kind
};

struct CheckCase {
  const Schedule& schedule;
  const CheckOptions& options;
  bool communicates = false, gathers = false, reduces = false;  ///< whether the schedule has such actions
  Findings findings = {};
};

bool is_backward(Kind kind) { return is_compute(kind) && kind != Kind::Forward; }

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

// Checks an action by itself. Fills `positions`.
void check_action(CheckCase& check, Positions& positions, int rank, int position) {
  const Schedule& schedule = check.schedule;
  const Action& action = schedule.ranks[rank][position];
  const Kind kind = action.kind;
  const auto add = [&](const auto&... args) { check.findings.add(rank, position, args...); };
  if (static_cast<int>(kind) >= kNumKinds) return add("has an unknown kind");
  if (action.stage < 0 || action.stage >= schedule.num_stages)
    return add("there is no stage ", action.stage, "; the stages are 0 to ", schedule.num_stages - 1);
  if (!is_parameter_action(kind) &&
      (action.micro_batch < 0 || action.micro_batch >= schedule.num_micro_batches))
    return add("there is no micro-batch ", action.micro_batch, "; they are 0 to ",
               schedule.num_micro_batches - 1);
  if (schedule.rank_of_stage[action.stage] != rank)
    return add("stage ", action.stage, " is on rank ", schedule.rank_of_stage[action.stage]);
  if (check.options.purpose == Purpose::Evaluation && (is_backward(kind) || kind == Kind::Reduce))
    return add("an evaluation has forwards only");
  if (is_communication(kind)) {  // a message connects stages on different ranks
    const bool forward = kind == Kind::SendForward || kind == Kind::ReceiveForward;
    const bool upward = kind == Kind::SendForward || kind == Kind::ReceiveBackward;
    const int other = action.stage + (upward ? 1 : -1);
    if (other < 0 || other >= schedule.num_stages)
      return add("the ", upward ? "last" : "first", " stage has no neighbor to exchange ",
                 forward ? "activations" : "gradients", " with");
    if (schedule.rank_of_stage[other] == rank)
      return add("stages ", action.stage, " and ", other, " are both on rank ", rank,
                 ", so they exchange no messages");
  }
  if (is_parameter_action(kind)) return;
  int& known = positions.of(action);
  if (known != Positions::kNone) return add("duplicates action ", known);
  known = position;
}

void check_backward(CheckCase& check, const Positions& positions, int stage, int micro_batch) {
  const int rank = check.schedule.rank_of_stage[stage];
  const Action whole{Kind::Backward, stage, micro_batch}, input{Kind::BackwardInput, stage, micro_batch},
      weight{Kind::BackwardWeight, stage, micro_batch};
  const int b = positions.of(whole), i = positions.of(input), w = positions.of(weight);
  if (b >= 0 && (i >= 0 || w >= 0))
    return check.findings.add(rank, b, "a backward must be whole or split, but ", i >= 0 ? input : weight,
                              " is there, too, as action ", std::max(i, w));
  if (b >= 0 || (i >= 0 && w >= 0)) return;
  if (i >= 0) return check.findings.add(rank, i, weight, " is missing");
  if (w >= 0) return check.findings.add(rank, w, input, " is missing");
  check.findings.add(rank, -1, whole, " (or ", input, " and ", weight, ") is missing");
}

// Checks the send and the receive of the message that is the input of an F, B or I.
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

// Checks the counts and the map of stages to ranks.
void check_shape(CheckCase& check) {
  const Schedule& schedule = check.schedule;
  if (schedule.ranks.empty()) return check.findings.add(-1, -1, "the schedule has no ranks");
  if (schedule.num_stages < 1 || schedule.num_micro_batches < 1)
    return check.findings.add(-1, -1, "a schedule needs 1 or more stages and micro-batches, got ",
                              schedule.num_stages, " and ", schedule.num_micro_batches);
  check_map(check);
  // Reported once, and before the tables below are made, so that they are no larger than the schedule.
  int64_t num_actions = 0;
  for (const std::vector<Action>& actions : schedule.ranks)
    num_actions += static_cast<int64_t>(actions.size());
  const int64_t num_forwards = int64_t{schedule.num_stages} * schedule.num_micro_batches;
  if (num_forwards > num_actions)
    check.findings.add(-1, -1, "only ", num_actions, " actions for ", schedule.num_micro_batches,
                       " micro-batches of ", schedule.num_stages, " stages, which need at least ",
                       num_forwards, " forwards");
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

// Checks that the actions that an action needs precede it on its rank.
void check_order(CheckCase& check, const Positions& positions, int rank, int position) {
  const Schedule& schedule = check.schedule;
  const auto& [kind, stage, micro_batch] = schedule.ranks[rank][position];
  const auto needs = [&](const Action& needed) {
    if (positions.of(needed) > position)
      check.findings.add(rank, position, "needs ", needed, ", which is action ", positions.of(needed));
  };
  const auto backward_of = [&, micro_batch = micro_batch](int of_stage) {
    const Action whole{Kind::Backward, of_stage, micro_batch};
    return positions.has(whole) ? whole : Action{Kind::BackwardInput, of_stage, micro_batch};
  };
  if (kind == Kind::BackwardWeight) needs({Kind::BackwardInput, stage, micro_batch});
  if (kind == Kind::SendBackward) needs(backward_of(stage));
  if (kind == Kind::SendForward || kind == Kind::Backward || kind == Kind::BackwardInput)
    needs({Kind::Forward, stage, micro_batch});
  // The neighboring stage's result, made on this rank or received. (A receive may be posted at any time.)
  const Action& action = schedule.ranks[rank][position];
  const auto source = source_stage(schedule, action);
  if (!source) return;
  if (schedule.rank_of_stage[*source] == rank)
    needs(kind == Kind::Forward ? Action{Kind::Forward, *source, micro_batch} : backward_of(*source));
  else if (check.communicates)
    needs(*receive_for(schedule, action));
}

// Checks that parameters are gathered while used, freed at the end, and reduced once, after the last
// backward.
void check_parameters(CheckCase& check, int rank) {
  struct Parameters {
    bool gathered = false;
    int num_reductions = 0, last_backward = 0;
  };
  std::map<int, Parameters> stages;
  const auto add = [&](int position, const auto&... args) { check.findings.add(rank, position, args...); };
  const std::vector<Action>& actions = check.schedule.ranks[rank];
  for (size_t i = 0; i < actions.size(); ++i)
    if (ends_backward(actions[i].kind)) stages[actions[i].stage].last_backward = static_cast<int>(i);
  for (size_t i = 0; i < actions.size(); ++i) {
    const auto position = static_cast<int>(i);
    const auto& [kind, stage, micro_batch] = actions[i];
    Parameters& parameters = stages[stage];
    if (kind == Kind::Unshard || kind == Kind::Reshard) {
      const bool gather = kind == Kind::Unshard;
      if (parameters.gathered == gather)
        add(position, "stage ", stage, gather ? " is gathered already" : " isn't gathered");
      parameters.gathered = gather;
    } else if (kind == Kind::Reduce) {
      if (++parameters.num_reductions > 1) add(position, "stage ", stage, " is reduced already");
      if (position < parameters.last_backward)
        add(position, "gradients must be reduced after the stage's last backward, which is action ",
            parameters.last_backward);
    } else if (check.gathers && is_compute(kind) && !parameters.gathered) {
      add(position, "stage ", stage, "'s parameters aren't gathered");
    }
  }
  for (int stage = 0; stage < check.schedule.num_stages; ++stage) {
    if (check.schedule.rank_of_stage[stage] != rank) continue;
    if (stages[stage].gathered) add(-1, "stage ", stage, " is left gathered at the end");
    if (check.reduces && stages[stage].num_reductions == 0)
      add(-1, Action{Kind::Reduce, stage, -1}, " is missing");
  }
}

// Checks that the receives of a channel are in the order of its sends.
void check_channels(CheckCase& check) {
  const Channels channels(check.schedule);
  std::vector<std::vector<Action>> sends(channels.size());
  std::vector<std::vector<int>> receives(channels.size());  // positions in the receiver's list
  for (const std::vector<Action>& actions : check.schedule.ranks)
    for (size_t i = 0; i < actions.size(); ++i)
      if (is_send(actions[i].kind))
        sends[channels.of(actions[i])].push_back(actions[i]);
      else if (is_communication(actions[i].kind))
        receives[channels.of(actions[i])].push_back(static_cast<int>(i));
  for (int channel = 0; channel < channels.size(); ++channel) {
    const int receiver = channels.receiver(channel);
    for (size_t i = 0; i < receives[channel].size(); ++i) {
      const int position = receives[channel][i];
      if (send_of(check.schedule.ranks[receiver][position]) == sends[channel][i]) continue;
      check.findings.add(receiver, position, "message ", i, " from rank ", channels.sender(channel), " is ",
                         sends[channel][i], "; receives must be in the order of the sends");
      break;  // the later ones are out of order for the same reason
    }
  }
}

void check_live_activations(CheckCase& check) {
  if (check.options.purpose == Purpose::Evaluation) return;
  for (int rank = 0; rank < check.schedule.num_ranks(); ++rank) {
    int live = 0;
    for (size_t i = 0; i < check.schedule.ranks[rank].size(); ++i) {
      const Kind kind = check.schedule.ranks[rank][i].kind;
      live += (kind == Kind::Forward) - ends_backward(kind);
      if (kind != Kind::Forward || live <= check.options.max_live_activations) continue;
      check.findings.add(rank, static_cast<int>(i), "makes ", live, " live activations; at most ",
                         check.options.max_live_activations, " are allowed");
      break;
    }
  }
}

// Checks for deadlocks: runs the ranks' actions without time, each rank as far as possible. Ranks that
// have actions left then wait for each other.

class Progress {
 public:
  explicit Progress(CheckCase& check)
      : check_(check),
        schedule_(check.schedule),
        channels_(check.schedule),
        num_open_(channels_.size(), 0),
        contacts_(channels_.size()),
        next_(check.schedule.ranks.size(), 0),
        sent_(check.schedule, false),
        runnable_(check.schedule.num_ranks()) {}

  void check() {
    while (const auto rank = runnable_.next())
      while (!at_end(*rank) && can_run(action(*rank))) run(*rank);
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank)
      if (!at_end(rank)) return report_cycle(rank);
  }

 private:
  /// Which ranks of a channel have come to its first message.
  struct Contact {
    bool sender = false, receiver = false;
    bool is_made() const { return sender && receiver; }
  };

  bool at_end(int rank) const { return next_[rank] == schedule_.ranks[rank].size(); }
  const Action& action(int rank) const { return schedule_.ranks[rank][next_[rank]]; }

  // Whether the input of an F, B or I exists: it was computed and, if the schedule has messages, sent. The
  // earlier checks ensure that a receive, or the computation on the same rank, precedes the action.
  bool can_run(const Action& action) {
    if (is_communication(action.kind) && !connect(action)) return false;
    if (is_send(action.kind)) return num_open_[channels_.of(action)] < check_.options.channel_capacity;
    const auto receive = receive_for(schedule_, action);
    if (!receive) return true;
    return sent_(*receive);
  }

  // Whether the message's channel is connected, now that one of its ranks has come to a message.
  bool connect(const Action& message) {
    const int channel = channels_.of(message);
    Contact& contact = contacts_[channel];
    if (!check_.options.connects_at_first_message || contact.is_made()) return true;
    const bool sends = is_send(message.kind);
    (sends ? contact.sender : contact.receiver) = true;
    if (contact.is_made()) runnable_.wake(sends ? channels_.receiver(channel) : channels_.sender(channel));
    return contact.is_made();
  }

  // Marks a stage's output or input gradient as available to its neighbor on another rank.
  void hand_over(const Action& send) {
    sent_(send) = true;
    runnable_.wake(channels_.receiver(channels_.of(send)));
  }

  void run(int rank) {
    const Action& done = action(rank);
    ++next_[rank];
    if (is_send(done.kind)) {
      ++num_open_[channels_.of(done)];
      hand_over(done);
    } else if (is_communication(done.kind)) {
      --num_open_[channels_.of(done)];
      runnable_.wake(channels_.sender(channels_.of(done)));
    } else if (!check_.communicates) {
      if (const auto send = send_after(schedule_, done)) hand_over(*send);
    }
  }

  /// The rank that a blocked rank waits for.
  int waits_for(int rank) const {
    const Action& blocked = action(rank);
    if (is_send(blocked.kind)) return channels_.receiver(channels_.of(blocked));
    if (is_communication(blocked.kind)) return channels_.sender(channels_.of(blocked));
    return channels_.sender(channels_.of(*receive_for(schedule_, blocked)));
  }

  std::string wait_of(int rank) const {
    const std::string place = str("rank ", rank, " at action ", next_[rank], " (", action(rank), ") ");
    if (is_communication(action(rank).kind) && check_.options.connects_at_first_message &&
        !contacts_[channels_.of(action(rank))].is_made())
      return str(place, "connects to rank ", waits_for(rank),
                 ", which hasn't come to the first message of this direction");
    if (is_send(action(rank).kind))
      return str(place, "waits until rank ", waits_for(rank), " posts ", receive_of(action(rank)), " (",
                 check_.options.channel_capacity, " sent without a receive allowed)");
    const Action receive = *receive_for(schedule_, action(rank));
    const Action made_by = send_of(receive);
    if (check_.communicates) return str(place, "waits for ", made_by, " of rank ", waits_for(rank));
    const bool forward = made_by.kind == Kind::SendForward;
    return str(place, "waits for ",
               Action{forward ? Kind::Forward : Kind::Backward, made_by.stage, made_by.micro_batch},
               forward ? "" : " (or its I)", " of rank ", waits_for(rank));
  }

  // Every blocked rank waits for a blocked one, so following them from any rank leads to a cycle.
  void report_cycle(int rank) {
    for (int i = 0; i < schedule_.num_ranks(); ++i) rank = waits_for(rank);
    std::string cycle;
    int at = rank;
    do {
      cycle += (cycle.empty() ? "" : "; ") + wait_of(at);
      at = waits_for(at);
    } while (at != rank);
    check_.findings.add(rank, static_cast<int>(next_[rank]), "deadlock, ranks wait for each other: ", cycle);
  }

  CheckCase& check_;
  const Schedule& schedule_;
  Channels channels_;
  std::vector<int> num_open_;      // per channel: sends minus receives; negative if receives are posted ahead
  std::vector<Contact> contacts_;  // per channel
  std::vector<size_t> next_;       // per rank
  PerMessage<char> sent_;          // if the schedule has no messages: computed
  Runnable runnable_;
};

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
  const auto for_each_action = [&](const auto& check_one) {
    for (int rank = 0; rank < schedule.num_ranks(); ++rank)
      for (size_t position = 0; position < schedule.ranks[rank].size(); ++position)
        check_one(check, positions, rank, static_cast<int>(position));
  };
  for_each_action(check_action);
  if (check.findings.empty()) check_complete(check, positions);
  if (!check.findings.empty()) return check.findings.take();
  for_each_action(check_order);
  check_channels(check);
  if (check.gathers || check.reduces)
    for (int rank = 0; rank < schedule.num_ranks(); ++rank) check_parameters(check, rank);
  check_live_activations(check);
  if (check.findings.empty()) Progress(check).check();
  return check.findings.take();
}

void check_schedule(const Schedule& schedule, const CheckOptions& options) {
  std::vector<std::string> messages;
  for (const Problem& problem : find_problems(schedule, options))
    messages.push_back(str("pipeline schedule ", schedule.name, ": ", to_string(problem, schedule)));
  if (!messages.empty()) throw ConfigError(messages);
}

}  // namespace titan::pipeline
