#include "guard/run_observers.h"

#include <exception>

#include "guard/module_probes.h"
#include "titan/core/log.h"

namespace titan::train {

namespace {

using dist::ProgressKind;

ProgressKind kind_of(Phase phase) {
  switch (phase) {
    case Phase::Data:
      return ProgressKind::Data;
    case Phase::Load:
    case Phase::Save:
    case Phase::Finish:
      return ProgressKind::Checkpoint;
    case Phase::Validate:
      return ProgressKind::Validation;
    default:
      return ProgressKind::Compute;
  }
}

class ForwardProgress final : public ModuleProbe {
 public:
  ForwardProgress(std::shared_ptr<dist::Watchdog> watchdog, std::shared_ptr<nn::CallHook> inner)
      : ModuleProbe(std::move(inner)), watchdog_(std::move(watchdog)) {}
  const dist::Watchdog* watchdog() const { return watchdog_.get(); }

 protected:
  void before(nn::HookHost& /*host*/, const nn::TensorRefs& /*inputs*/) override { watchdog_->progress(); }
  void after(nn::HookHost& /*host*/, const nn::TensorRefs& /*outputs*/) override { watchdog_->progress(); }

 private:
  std::shared_ptr<dist::Watchdog> watchdog_;
};

}  // namespace

RunWatchdog::RunWatchdog(std::shared_ptr<dist::Watchdog> watchdog, const dist::WatchdogLimits& startup,
                         dist::WatchdogLimits training, const std::vector<nn::AnyRef>& models)
    : models_(models), training_(std::move(training)), watchdog_(std::move(watchdog)) {
  // Work before the first phase (connecting a pipeline, agreeing on settings) has a limit, too.
  watchdog_->progress(places_.front().kind, places_.front().what);
  watchdog_->set_limits(startup);
  add_root_probes(models_,
                  [&](auto inner) { return std::make_shared<ForwardProgress>(watchdog_, std::move(inner)); });
}

RunWatchdog::~RunWatchdog() {
  // While an error unwinds, a destructor may wait for work of a GPU that waits for a lost peer, and the watchdog
  // ends that work. The rank is watched until explain(). A destructor may also wait for a save.
  if (std::uncaught_exceptions() == 0)
    watchdog_->leave();
  else
    watchdog_->progress(dist::ProgressKind::Checkpoint, "clean-up");
  remove_probes(models_, [&](const nn::CallHook& hook) {
    const auto* progress = dynamic_cast<const ForwardProgress*>(&hook);
    return progress && progress->watchdog() == watchdog_.get();
  });
}

void RunWatchdog::begin(Phase phase, int64_t step) {
  places_.push_back({kind_of(phase), name_of(phase)});
  watchdog_->progress(places_.back().kind, places_.back().what, step);
}

// Returns to the surrounding phase. A failed phase stays: the rank still cleans it up.
void RunWatchdog::end(Phase phase, int64_t step, bool failed) {
  places_.pop_back();
  if (phase == Phase::Step) places_.front().what = name_of(Phase::Step);
  if (phase == Phase::Finish) places_.front() = {ProgressKind::Idle, "end"};
  if (phase == Phase::Step && !failed && !first_step_is_over_) {
    first_step_is_over_ = true;
    watchdog_->set_limits(training_);
  }
  if (failed && phase != Phase::Finish) return watchdog_->progress();
  const bool is_before_a_step = places_.back().what == std::string_view("start");
  watchdog_->progress(places_.back().kind, places_.back().what, is_before_a_step ? -1 : step);
}

FlightPhases::FlightPhases(std::shared_ptr<dist::FlightRecorder> recorder) : recorder_(std::move(recorder)) {}

FlightPhases::~FlightPhases() { recorder_->set_activity("", 0); }

void FlightPhases::begin(Phase phase, int64_t step) {
  phases_.push_back(phase);
  recorder_->set_activity(name_of(phase), step);
}

// Returns to the surrounding phase. A failed phase stays: that is where the rank was.
void FlightPhases::end(Phase /*phase*/, int64_t step, bool failed) {
  phases_.pop_back();
  if (!failed) recorder_->set_activity(phases_.empty() ? "" : name_of(phases_.back()), step);
}

NanWatch::NanWatch(const std::vector<nn::AnyRef>& models, std::vector<Parameter> parameters,
                   const NanSearch::Options& options)
    : parameters_(std::move(parameters)), checks_gradients_(options.modules), search_(models, options) {
  log::warning_rank0("debug.nan_trace and debug.detect_anomaly check every tensor: the run is slow");
}

void NanWatch::begin(Phase phase, int64_t step) {
  search_.set_step(step);
  if (phase == Phase::Optimizer && checks_gradients_) search_.check_gradients(parameters_);
}

}  // namespace titan::train
