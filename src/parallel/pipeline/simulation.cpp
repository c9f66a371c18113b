// Simulates a schedule with given costs: when each action starts, and how long each rank is idle.

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>

#include "parallel/pipeline/actions.h"
#include "titan/core/error.h"

namespace titan::pipeline {

namespace {

using Kind = Action::Kind;

constexpr PathEntry kNobody{-1, -1};

void check_cost(double cost, std::string_view name) {
  if (!(cost >= 0) || !std::isfinite(cost))
    throw ConfigError(str("expected a cost '", name, "' of 0 or more, got ", cost));
}

void check_costs(const std::vector<double>& costs, std::string_view name, int num_stages) {
  if (costs.size() != 1 && costs.size() != static_cast<size_t>(num_stages))
    throw ConfigError(str("the cost '", name, "' has ", costs.size(),
                          " values; expected 1, or 1 for each of the ", num_stages, " stages"));
  for (double cost : costs) check_cost(cost, name);
}

double of_stage(const std::vector<double>& costs, int stage) {
  return costs.size() == 1 ? costs[0] : costs[stage];
}

double duration(const Schedule& schedule, const Costs& costs, const Action& action) {
  const int stage = action.stage;
  switch (action.kind) {
    case Kind::Forward:
      return of_stage(costs.forward, stage) + (stage + 1 == schedule.num_stages ? costs.loss : 0);
    case Kind::Backward:
      return of_stage(costs.input, stage) + of_stage(costs.weight, stage);
    case Kind::BackwardInput:
      return of_stage(costs.input, stage);
    default:
      return of_stage(costs.weight, stage);
  }
}

/// When one end of a message was ready, and the computation that it had to wait for.
struct End {
  double time = 0;
  PathEntry after = kNobody;
  bool done = false;
};

struct MessageEnds {
  End sent, posted;
};

class Simulator {
 public:
  Simulator(const Schedule& schedule, const Costs& costs)
      : schedule_(schedule),
        costs_(costs),
        communicates_(has_communication(schedule)),
        channels_(schedule),
        messages_(schedule, {}),
        ranks_(schedule.ranks.size()),
        runnable_(schedule.num_ranks()) {
    result_.timeline.resize(schedule.ranks.size());
    result_.ranks.resize(schedule.ranks.size());
  }

  Simulation run() {
    while (const auto rank = runnable_.next())
      while (step(*rank)) {
      }
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      TITAN_INTERNAL_ASSERT(ranks_[rank].next == schedule_.ranks[rank].size(), "rank ", rank, " of ",
                            schedule_.name, " is stuck at action ", ranks_[rank].next);
      summarize(rank);
    }
    set_critical_path();
    return std::move(result_);
  }

 private:
  struct Rank {
    size_t next = 0;
    double time = 0;
    std::vector<PathEntry> causes;  // per entry of the timeline
  };

  PathEntry last_of(int rank) const {
    const int count = static_cast<int>(result_.timeline[rank].size());
    return count == 0 ? kNobody : PathEntry{rank, count - 1};
  }

  bool step(int rank) {
    Rank& state = ranks_[rank];
    if (state.next == schedule_.ranks[rank].size()) return false;
    const Action& action = schedule_.ranks[rank][state.next];
    if (is_compute(action.kind) && !compute(rank, action)) return false;
    if (is_communication(action.kind)) communicate(rank, action);
    ++state.next;
    return true;
  }

  bool compute(int rank, const Action& action) {
    Rank& state = ranks_[rank];
    double start = state.time;
    PathEntry cause = last_of(rank);
    if (const auto receive = receive_for(schedule_, action)) {
      const MessageEnds& ends = messages_(*receive);
      if (!ends.sent.done) return false;
      const End& later = ends.posted.time > ends.sent.time ? ends.posted : ends.sent;
      const double arrival = later.time + costs_.communication;
      if (arrival > start) {
        start = arrival;
        cause = later.after;
      }
    }
    state.time = start + duration(schedule_, costs_, action);
    result_.timeline[rank].push_back({action, start, state.time});
    state.causes.push_back(cause);
    if (!communicates_)
      if (const auto send = send_after(schedule_, action)) communicate(rank, *send);
    return true;
  }

  void communicate(int rank, const Action& action) {
    const bool sends = is_send(action.kind);
    MessageEnds& ends = messages_(action);
    (sends ? ends.sent : ends.posted) = {ranks_[rank].time, last_of(rank), true};
    if (sends) runnable_.wake(channels_.receiver(channels_.of(action)));
  }

  void summarize(int rank) {
    const std::vector<Interval>& timeline = result_.timeline[rank];
    RankFigures& figures = result_.ranks[rank];
    if (timeline.empty()) return;
    figures.first_start = timeline.front().start;
    figures.last_end = timeline.back().end;
    result_.makespan = std::max(result_.makespan, figures.last_end);
    int live = 0, before_input = 0, owed = 0;
    for (const Interval& interval : timeline) {
      const Kind kind = interval.action.kind;
      figures.busy += interval.end - interval.start;
      if (kind == Kind::Forward) ++live, ++before_input;
      if (kind == Kind::BackwardInput) --before_input, ++owed;
      figures.peak_live = std::max(figures.peak_live, live);
      figures.peak_before_input = std::max(figures.peak_before_input, before_input);
      figures.peak_owed_weight = std::max(figures.peak_owed_weight, owed);
      if (kind == Kind::Backward) --live, --before_input;
      if (kind == Kind::BackwardWeight) --live, --owed;
    }
  }

  void set_critical_path() {
    double busy = 0;
    PathEntry entry = kNobody;
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      busy += result_.ranks[rank].busy;
      if (entry == kNobody && result_.ranks[rank].last_end == result_.makespan) entry = last_of(rank);
    }
    const double available = result_.makespan * schedule_.num_ranks();
    result_.bubble_fraction = available > 0 ? 1 - busy / available : 0;
    for (; !(entry == kNobody); entry = ranks_[entry.rank].causes[entry.index])
      result_.critical_path.push_back(entry);
    std::reverse(result_.critical_path.begin(), result_.critical_path.end());
  }

  const Schedule& schedule_;
  const Costs& costs_;
  bool communicates_ = false;
  Channels channels_;
  PerMessage<MessageEnds> messages_;
  std::vector<Rank> ranks_;
  Runnable runnable_;
  Simulation result_;
};

}  // namespace

Simulation simulate(const Schedule& schedule, const Costs& costs) {
  check_schedule(schedule, {.purpose = has_backward(schedule) ? Purpose::Training : Purpose::Evaluation,
                            .channel_capacity = std::numeric_limits<int>::max()});
  check_costs(costs.forward, "forward", schedule.num_stages);
  check_costs(costs.input, "input", schedule.num_stages);
  check_costs(costs.weight, "weight", schedule.num_stages);
  check_cost(costs.communication, "communication");
  check_cost(costs.loss, "loss");
  return Simulator(schedule, costs).run();
}

}  // namespace titan::pipeline
