// Unshard, Reshard and Reduce for a schedule.

#include <algorithm>
#include <map>

#include "titan/core/error.h"
#include "titan/parallel/pipeline_completion.h"

namespace titan::pipeline {

namespace {

using Kind = Action::Kind;
using Actions = std::vector<Action>;

bool has_kind(const Schedule& schedule, std::initializer_list<Kind> kinds) {
  for (const Actions& actions : schedule.ranks)
    for (const Action& action : actions)
      if (std::find(kinds.begin(), kinds.end(), action.kind) != kinds.end()) return true;
  return false;
}

/// Which of a rank's stages are gathered, while its actions are gone through.
class Gathering {
 public:
  Gathering(const Actions& actions, int max_gathered) : max_gathered_(max_gathered) {
    for (size_t i = 0; i < actions.size(); ++i)
      if (is_compute(actions[i].kind)) stages_[actions[i].stage].uses.push_back(i);
  }

  // The stages that are needed next are to be gathered, the others not. Freed first: there is no room before.
  void prepare(size_t position, Actions& out) {
    const std::vector<int> wanted = needed_next(position);
    for (auto& [number, stage] : stages_)
      if (stage.gathered && std::find(wanted.begin(), wanted.end(), number) == wanted.end())
        set(number, false, out);
    for (int number : wanted)
      if (!stages_[number].gathered) set(number, true, out);
  }

  void finish(Actions& out) {
    for (auto& [number, stage] : stages_)
      if (stage.gathered) set(number, false, out);
  }

 private:
  struct Stage {
    std::vector<size_t> uses;
    size_t next_use = 0;
    bool gathered = false;
  };

  std::vector<int> needed_next(size_t position) {
    std::vector<std::pair<size_t, int>> order;
    for (auto& [number, stage] : stages_) {
      while (stage.next_use < stage.uses.size() && stage.uses[stage.next_use] < position) ++stage.next_use;
      if (stage.next_use < stage.uses.size()) order.emplace_back(stage.uses[stage.next_use], number);
    }
    std::sort(order.begin(), order.end());
    if (order.size() > static_cast<size_t>(max_gathered_)) order.resize(max_gathered_);
    std::vector<int> numbers;
    for (const auto& [use, number] : order) numbers.push_back(number);
    return numbers;
  }

  void set(int number, bool gathered, Actions& out) {
    stages_[number].gathered = gathered;
    out.push_back({gathered ? Kind::Unshard : Kind::Reshard, number, -1});
  }

  int max_gathered_ = 1;
  std::map<int, Stage> stages_;
};

Actions with_gathering(const Actions& actions, int max_gathered) {
  Gathering gathering(actions, max_gathered);
  Actions out;
  for (size_t i = 0; i < actions.size(); ++i) {
    if (is_compute(actions[i].kind)) gathering.prepare(i, out);
    out.push_back(actions[i]);
  }
  gathering.finish(out);
  return out;
}

bool is_send_of(const Action& action, const Action& backward) {
  return action.kind == Kind::SendBackward && action.stage == backward.stage &&
         action.micro_batch == backward.micro_batch;
}

Actions with_reduction(const Actions& actions) {
  std::map<int, size_t> last;  // per stage
  for (size_t i = 0; i < actions.size(); ++i)
    if (actions[i].kind == Kind::Backward || actions[i].kind == Kind::BackwardWeight)
      last[actions[i].stage] = i;
  std::map<size_t, int> reduced;  // behind which action
  for (const auto& [stage, position] : last) {
    const bool send_waits =
        position + 1 < actions.size() && is_send_of(actions[position + 1], actions[position]);
    reduced[position + send_waits] = stage;
  }
  Actions out;
  for (size_t i = 0; i < actions.size(); ++i) {
    out.push_back(actions[i]);
    if (const auto found = reduced.find(i); found != reduced.end())
      out.push_back({Kind::Reduce, found->second, -1});
  }
  return out;
}

}  // namespace

Schedule with_parameter_actions(const Schedule& schedule, int max_gathered_stages) {
  TITAN_CHECK(max_gathered_stages >= 1, "max_gathered_stages is 1 or more, not ", max_gathered_stages);
  const bool gathers = has_kind(schedule, {Kind::Unshard, Kind::Reshard}),
             reduces = has_kind(schedule, {Kind::Reduce});
  Schedule whole = schedule;
  for (Actions& actions : whole.ranks) {
    if (!gathers) actions = with_gathering(actions, max_gathered_stages);
    if (!reduces) actions = with_reduction(actions);
  }
  return whole;
}

}  // namespace titan::pipeline
