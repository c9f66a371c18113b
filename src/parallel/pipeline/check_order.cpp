// The checker: the order of one rank's actions, and of a channel's receives.

#include <map>

#include "parallel/pipeline/check.h"

namespace titan::pipeline {

namespace {

using Kind = Action::Kind;

/// One action and the actions that have to precede it on its rank.
class Order {
 public:
  Order(CheckCase& check, const Positions& positions, int rank, int position)
      : check_(check),
        schedule_(check.schedule),
        positions_(positions),
        action_(schedule_.ranks[rank][position]),
        rank_(rank),
        position_(position) {}

  void check() {
    switch (action_.kind) {
      case Kind::Forward:
        return source();
      case Kind::Backward:
      case Kind::BackwardInput:
        needs({Kind::Forward, action_.stage, action_.micro_batch});
        return source();
      case Kind::BackwardWeight:
        return needs({Kind::BackwardInput, action_.stage, action_.micro_batch});
      case Kind::SendForward:
        return needs({Kind::Forward, action_.stage, action_.micro_batch});
      case Kind::SendBackward:
        return needs(backward_of(action_.stage));
      default:  // a receive may be posted at any time
        return;
    }
  }

 private:
  Action backward_of(int stage) const {
    const Action whole{Kind::Backward, stage, action_.micro_batch};
    return positions_.has(whole) ? whole : Action{Kind::BackwardInput, stage, action_.micro_batch};
  }

  void needs(const Action& needed) {
    if (positions_.of(needed) > position_)
      check_.findings.add(rank_, position_, "needs ", needed, ", which is action ", positions_.of(needed));
  }

  // The neighbouring stage's part: of this rank, or by message.
  void source() {
    const auto stage = source_stage(schedule_, action_);
    if (!stage) return;
    if (schedule_.rank_of_stage[*stage] == rank_)
      needs(action_.kind == Kind::Forward ? Action{Kind::Forward, *stage, action_.micro_batch}
                                          : backward_of(*stage));
    else if (check_.communicates)
      needs(*receive_for(schedule_, action_));
  }

  CheckCase& check_;
  const Schedule& schedule_;
  const Positions& positions_;
  const Action& action_;
  int rank_, position_;
};

struct Place {
  int rank = 0, position = 0;
};

/// The state of a stage's parameters while the checker walks its rank's actions.
struct Parameters {
  bool gathered = false;
  int num_reductions = 0;
};

class ParameterOrder {
 public:
  ParameterOrder(CheckCase& check, int rank) : check_(check), rank_(rank) {
    const std::vector<Action>& actions = check.schedule.ranks[rank];
    for (size_t i = 0; i < actions.size(); ++i)
      if (actions[i].kind == Kind::Backward || actions[i].kind == Kind::BackwardWeight)
        last_backward_[actions[i].stage] = static_cast<int>(i);
  }

  void check() {
    const std::vector<Action>& actions = check_.schedule.ranks[rank_];
    for (size_t i = 0; i < actions.size(); ++i) take(actions[i], static_cast<int>(i));
    for (int stage = 0; stage < check_.schedule.num_stages; ++stage)
      if (check_.schedule.rank_of_stage[stage] == rank_) finish(stage);
  }

 private:
  void take(const Action& action, int position) {
    Parameters& parameters = stages_[action.stage];
    switch (action.kind) {
      case Kind::Unshard:
        if (parameters.gathered) add(position, "stage ", action.stage, " is gathered already");
        parameters.gathered = true;
        break;
      case Kind::Reshard:
        if (!parameters.gathered) add(position, "stage ", action.stage, " isn't gathered");
        parameters.gathered = false;
        break;
      case Kind::Reduce:
        reduce(action.stage, position);
        break;
      default:
        if (check_.gathers && is_compute(action.kind) && !parameters.gathered)
          add(position, "stage ", action.stage, "'s parameters aren't gathered");
    }
  }

  void reduce(int stage, int position) {
    if (++stages_[stage].num_reductions > 1) add(position, "stage ", stage, " is reduced already");
    if (position < last_backward_[stage])
      add(position, "gradients have to be reduced after the stage's last backward, which is action ",
          last_backward_[stage]);
  }

  void finish(int stage) {
    if (stages_[stage].gathered) add(-1, "stage ", stage, " is left gathered at the end");
    if (check_.reduces && stages_[stage].num_reductions == 0)
      add(-1, Action{Kind::Reduce, stage, -1}, " is missing");
  }

  template <class... Args>
  void add(int position, const Args&... args) {
    check_.findings.add(rank_, position, args...);
  }

  CheckCase& check_;
  int rank_;
  std::map<int, Parameters> stages_;
  std::map<int, int> last_backward_;
};

}  // namespace

void check_order(CheckCase& check, const Positions& positions) {
  for (int rank = 0; rank < check.schedule.num_ranks(); ++rank)
    for (size_t position = 0; position < check.schedule.ranks[rank].size(); ++position)
      Order(check, positions, rank, static_cast<int>(position)).check();
}

void check_channels(CheckCase& check) {
  const Channels channels(check.schedule);
  std::vector<std::vector<Action>> sends(channels.size());
  std::vector<std::vector<std::pair<Action, Place>>> receives(channels.size());
  for (int rank = 0; rank < check.schedule.num_ranks(); ++rank)
    for (size_t i = 0; i < check.schedule.ranks[rank].size(); ++i) {
      const Action& action = check.schedule.ranks[rank][i];
      if (action.kind == Kind::SendForward || action.kind == Kind::SendBackward)
        sends[channels.of(action)].push_back(action);
      else if (is_communication(action.kind))
        receives[channels.of(action)].emplace_back(action, Place{rank, static_cast<int>(i)});
    }
  for (int channel = 0; channel < channels.size(); ++channel)
    for (size_t i = 0; i < receives[channel].size(); ++i) {
      const auto& [receive, place] = receives[channel][i];
      if (send_of(receive) == sends[channel][i]) continue;
      check.findings.add(place.rank, place.position, "message ", i, " from rank ", channels.sender(channel),
                         " is ", sends[channel][i], "; receives stand in the order of the sends");
      break;  // the later ones are out of order for the same reason
    }
}

void check_parameters(CheckCase& check) {
  if (!check.gathers && !check.reduces) return;
  for (int rank = 0; rank < check.schedule.num_ranks(); ++rank) ParameterOrder(check, rank).check();
}

void check_live_activations(CheckCase& check) {
  if (check.options.purpose == Purpose::Evaluation) return;
  for (int rank = 0; rank < check.schedule.num_ranks(); ++rank) {
    int live = 0;
    for (size_t i = 0; i < check.schedule.ranks[rank].size(); ++i) {
      const Kind kind = check.schedule.ranks[rank][i].kind;
      live += (kind == Kind::Forward) - (kind == Kind::Backward || kind == Kind::BackwardWeight);
      if (kind != Kind::Forward || live <= check.options.max_live_activations) continue;
      check.findings.add(rank, static_cast<int>(i), "makes ", live, " live activations; at most ",
                         check.options.max_live_activations, " are allowed");
      break;
    }
  }
}

// The checker for deadlocks: runs the ranks' actions without time, each rank as far as possible. Ranks that
// have actions left then wait for each other.

namespace {

using Kind = Action::Kind;

class Progress {
 public:
  explicit Progress(CheckCase& check)
      : check_(check),
        schedule_(check.schedule),
        channels_(check.schedule),
        num_open_(channels_.size(), 0),
        next_(check.schedule.ranks.size(), 0),
        forward_done_(check.schedule, false),
        backward_done_(check.schedule, false),
        runnable_(check.schedule.num_ranks()) {}

  void check() {
    while (const auto rank = runnable_.next())
      while (!at_end(*rank) && can_run(action(*rank))) run(*rank);
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank)
      if (!at_end(rank)) return report_circle(rank);
  }

 private:
  bool at_end(int rank) const { return next_[rank] == schedule_.ranks[rank].size(); }
  const Action& action(int rank) const { return schedule_.ranks[rank][next_[rank]]; }

  static bool is_send(Kind kind) { return kind == Kind::SendForward || kind == Kind::SendBackward; }

  // The input of the F, B or I is there: made, and, if messages are in the schedule, sent. That it was
  // received, and that what is made on the same rank stands ahead, is known already.
  bool can_run(const Action& action) const {
    if (is_send(action.kind)) return num_open_[channels_.of(action)] < check_.options.channel_capacity;
    const auto receive = receive_for(schedule_, action);
    if (!receive) return true;
    return (receive->kind == Kind::ReceiveForward ? forward_done_ : backward_done_)(send_of(*receive));
  }

  // Marks a stage's output or input gradient as there for its neighbour on another rank.
  void hand_over(const Action& send) {
    (send.kind == Kind::SendForward ? forward_done_ : backward_done_)(send) = true;
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
    if (is_send(action(rank).kind)) return channels_.receiver(channels_.of(action(rank)));
    return channels_.sender(channels_.of(*receive_for(schedule_, action(rank))));
  }

  std::string wait_of(int rank) const {
    const std::string place = str("rank ", rank, " at action ", next_[rank], " (", action(rank), ") ");
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
  void report_circle(int rank) {
    for (int i = 0; i < schedule_.num_ranks(); ++i) rank = waits_for(rank);
    std::string circle;
    int at = rank;
    do {
      circle += (circle.empty() ? "" : "; ") + wait_of(at);
      at = waits_for(at);
    } while (at != rank);
    check_.findings.add(rank, static_cast<int>(next_[rank]), "deadlock, ranks wait for each other: ", circle);
  }

  CheckCase& check_;
  const Schedule& schedule_;
  Channels channels_;
  std::vector<int> num_open_;  // per channel: sent, less received; negative where receives are posted ahead
  std::vector<size_t> next_;   // per rank
  PerMicroBatch<char> forward_done_, backward_done_;
  Runnable runnable_;
};

}  // namespace

void check_progress(CheckCase& check) { Progress(check).check(); }

}  // namespace titan::pipeline
