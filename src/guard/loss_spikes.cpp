#include "guard/policies.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/json_tree.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/train/trainer.h"

namespace titan::train {

double LossSpikes::mean() const {
  return std::accumulate(window_.begin(), window_.end(), 0.0) / static_cast<double>(window_.size());
}

// Summed anew each time, so that it is the same after a resume; the window is short compared with a step.
double LossSpikes::deviation() const {
  const double center = mean();
  double squares = 0;
  for (const double loss : window_) squares += (loss - center) * (loss - center);
  return std::sqrt(squares / static_cast<double>(window_.size()));
}

bool LossSpikes::add(double loss) {
  const auto size = static_cast<size_t>(settings_.spike_window);
  last_ = loss;
  if (window_.size() >= size && loss > mean() + settings_.spike_sigma * deviation()) return true;
  window_.push_back(loss);
  while (window_.size() > size) window_.pop_front();
  return false;
}

void LossSpikes::check_rewinds_left(const std::string& spike) const {
  if (num_rewinds_ >= settings_.max_rewinds)
    throw UnsoundRun(
        str(spike, ", and the run has gone back ", num_rewinds_,
            " times already, as often as fault_tolerance.max_rewinds allows. A lower learning rate or "
            "other data may help"));
}

int64_t LossSpikes::rewind_distance(int64_t step) const {
  const bool comes_again = num_rewinds_ > 0 && step <= last_spike_ + settings_.spike_window;
  return comes_again ? 2 * last_distance_ : settings_.spike_rewind_steps;
}

void LossSpikes::count_rewind(int64_t step) {
  last_distance_ = rewind_distance(step);
  last_spike_ = step;
  ++num_rewinds_;
}

std::string LossSpikes::state() const {
  return nlohmann::json{{"window", std::vector<double>(window_.begin(), window_.end())},
                        {"num_rewinds", num_rewinds_},
                        {"last_spike", last_spike_},
                        {"last_distance", last_distance_}}
      .dump();
}

void LossSpikes::load(const std::string& state) {
  const auto tree = parse_json(state);
  const auto num_rewinds = json_count(tree, "num_rewinds");
  const auto is_loss = [](const nlohmann::json& value) { return value.is_number(); };
  TITAN_CHECK(num_rewinds && tree.contains("window") && tree["window"].is_array() &&
                  std::ranges::all_of(tree["window"], is_loss),
              "the state of loss spikes has no 'window' of numbers, or no count 'num_rewinds'");
  const std::vector<double> window = tree["window"];
  window_.assign(window.begin(), window.end());
  if (*num_rewinds <= num_rewinds_) return;
  num_rewinds_ = *num_rewinds;
  last_spike_ = json_count(tree, "last_spike").value_or(0);
  last_distance_ = json_count(tree, "last_distance").value_or(settings_.spike_rewind_steps);
}

void RewindOnSpike::judge(Trainer& trainer, const StepValues& values) {
  spiked_ = spikes_.add(trainer.loss_of_all(values));
}

bool RewindOnSpike::end_step(Trainer& trainer) {
  trainer.settle();
  return std::exchange(spiked_, false) && rewind(trainer);
}

// Checkpoints at the wanted distance may not exist yet, so shorter distances are tried.
bool RewindOnSpike::rewind(Trainer& trainer) {
  const int64_t spike = trainer.step();
  const std::string what = str("step ", spike, ": the loss of ", spikes_.last(), " is a spike above ",
                               spikes_.mean(), " +- ", spikes_.deviation());
  spikes_.check_rewinds_left(what);
  const PhaseScope load = trainer.phase(Phase::Load);
  for (int64_t distance = spikes_.rewind_distance(spike); distance > 0; distance /= 2) {
    if (spike <= distance || !trainer.load_before(spike - distance + 1)) continue;
    spikes_.count_rewind(spike);
    log::warning_rank0(str(what, ". Rewinding to step ", trainer.step(),
                           " and skipping the data through step ", spike, ": rewind ", spikes_.num_rewinds(),
                           " of ", settings_.max_rewinds));
    return true;
  }
  log::warning_rank0(what + "; there is no complete checkpoint to go back to, so the run continues");
  return false;
}

}  // namespace titan::train
