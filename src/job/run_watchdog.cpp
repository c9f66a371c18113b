#include "job/run_watchdog.h"

#include <algorithm>

#include "titan/nn/hooks.h"
#include "train/module_probes.h"

namespace titan::train {

namespace {

using dist::ProgressKind;
using dist::TimeLimit;
using std::chrono::seconds;

// A save's own error comes first where it can: it knows the rank and what that was writing.
constexpr int64_t kBehindCheckpointer = 60;
// The watchdog looks every two seconds at most, and knows more than a collective that fails.
constexpr int64_t kBehindWatchdog = 60;

TimeLimit limit(int64_t time_s, std::string setting) { return {seconds(time_s), std::move(setting)}; }

TimeLimit longer(const TimeLimit& a, const TimeLimit& b) { return a.time >= b.time ? a : b; }

// Loads data and computes.
TimeLimit sum_of(const TimeLimit& a, const TimeLimit& b) {
  return {a.time + b.time, a.setting + " + " + b.setting};
}

TimeLimit checkpoint_limit(const CommSettings& comm, const CheckpointSettings& checkpoint) {
  if (comm.checkpoint_timeout_seconds)
    return limit(*comm.checkpoint_timeout_seconds, "comm.checkpoint_timeout_seconds");
  return limit(checkpoint.timeout_seconds + kBehindCheckpointer, "checkpoint.timeout_seconds + 60 s");
}

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

/// Around the hook that a model's root has.
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

dist::WatchdogLimits training_limits(const CommSettings& comm, const CheckpointSettings& checkpoint) {
  dist::WatchdogLimits limits;
  limits.data = limit(comm.data_timeout_seconds, "comm.data_timeout_seconds");
  limits.compute = limit(comm.train_timeout_seconds, "comm.train_timeout_seconds");
  limits.checkpoint = checkpoint_limit(comm, checkpoint);
  limits.validation = sum_of(limits.compute, limits.data);
  return limits;
}

dist::WatchdogLimits startup_limits(const CommSettings& comm, const CheckpointSettings& checkpoint) {
  dist::WatchdogLimits limits = training_limits(comm, checkpoint);
  const TimeLimit init = limit(comm.init_timeout_seconds, "comm.init_timeout_seconds");
  limits.data = longer(init, limits.data);
  limits.compute = init;
  limits.checkpoint = longer(init, limits.checkpoint);
  limits.validation = sum_of(init, limits.data);
  return limits;
}

int64_t collective_timeout_s(const CommSettings& comm, const CheckpointSettings& checkpoint) {
  if (!comm.watchdog) return comm.train_timeout_seconds;
  const dist::WatchdogLimits limits = startup_limits(comm, checkpoint);
  const auto longest =
      std::max({limits.data.time, limits.compute.time, limits.checkpoint.time, limits.validation.time});
  return std::chrono::duration_cast<seconds>(longest).count() + kBehindWatchdog;
}

RunWatchdog::RunWatchdog(std::shared_ptr<dist::Watchdog> watchdog, const dist::WatchdogLimits& startup,
                         dist::WatchdogLimits training, const std::vector<nn::AnyRef>& models)
    : models_(models), training_(std::move(training)), watchdog_(std::move(watchdog)) {
  // What lies before the first phase (a pipeline that connects, what is agreed on) has a limit too.
  watchdog_->progress(ProgressKind::Compute, "start");
  watchdog_->set_limits(startup);
  add_root_probes(models_,
                  [&](auto inner) { return std::make_shared<ForwardProgress>(watchdog_, std::move(inner)); });
}

RunWatchdog::~RunWatchdog() {
  watchdog_->leave();
  remove_probes(models_, [&](const nn::CallHook& hook) {
    const auto* progress = dynamic_cast<const ForwardProgress*>(&hook);
    return progress && progress->watchdog() == watchdog_.get();
  });
}

void RunWatchdog::begin(Phase phase, int64_t step) {
  watchdog_->progress(kind_of(phase), name_of(phase), step);
}

void RunWatchdog::end(Phase phase, int64_t step, bool failed) {
  if (phase == Phase::Finish) return watchdog_->progress(ProgressKind::Idle, "end", step);
  if (phase == Phase::Step && !failed && !first_step_is_over_) {
    first_step_is_over_ = true;
    watchdog_->set_limits(training_);
  }
  watchdog_->progress(ProgressKind::Compute, name_of(Phase::Step), step);
}

}  // namespace titan::train
