// Going back within a run.

#include <algorithm>
#include <exception>

#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/train/run_checkpoints.h"
#include "train/peer_saves.h"
#include "train/step_choice.h"

namespace titan::train {

// Of step 0, a seed, there is the model alone. What was read of a damaged step is overwritten by an older
// one, and only by one: as at a start.
std::optional<int64_t> RunCheckpoints::load_before(int64_t step, const std::vector<std::string>& exclude) {
  // What was kept since is of the steps that the run goes back behind.
  if (peers_) peers_->forget();
  for (std::exception_ptr failure;;) {
    const StepChoice choice = share(world_.rank() == 0 ? choose_before(step) : StepChoice{}, world_);
    step = choice.step.value_or(0);
    if (step == 0 && failure) std::rethrow_exception(failure);
    if (step == 0) return std::nullopt;
    try {
      go_back_to(step, exclude);
      return step;
    } catch (const ConfigError&) {
      throw;
    } catch (const Error&) {
      failure = std::current_exception();
    }
    const auto damages = find_damage(checkpoint::step_path(options_.folder, step), world_);
    if (damages.empty()) std::rethrow_exception(failure);
    for (const std::string& damage : damages) log::warning_rank0("passed over: " + damage);
  }
}

// What a start left out of the step that it went on from isn't this run's either.
void RunCheckpoints::go_back_to(int64_t step, std::vector<std::string> exclude) {
  const auto& left_out = options_.settings.exclude_from_loading;
  if (!saved_steps_.count(step)) exclude.insert(exclude.end(), left_out.begin(), left_out.end());
  static_cast<void>(load_whole(checkpoint::step_path(options_.folder, step), std::move(exclude)));
  saved_steps_.erase(saved_steps_.upper_bound(step), saved_steps_.end());
  loaded_step_ = std::min(loaded_step_, step);
}

}  // namespace titan::train
