#include "job/debug_traces.h"

#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::train {

DebugTraces::DebugTraces(const DebugSettings& debug, const std::vector<nn::AnyRef>& models,
                         const std::vector<Parameter>& parameters, int rank)
    : parameters_(parameters), rank_(rank) {
  log::warning_rank0("debug.nan_trace and debug.detect_anomaly look at every tensor: the run is slow");
  if (debug.detect_anomaly) anomaly_trace_ = std::make_unique<AnomalyTrace>(models, rank);
  if (debug.nan_trace) nan_trace_ = std::make_unique<NanTrace>(models, rank);
}

void DebugTraces::begin(Phase phase, int64_t step) {
  if (nan_trace_) nan_trace_->set_step(step);
  if (anomaly_trace_) anomaly_trace_->set_step(step);
  if (phase == Phase::Optimizer && nan_trace_) check_gradients(step);
}

// Weight gradients don't pass modules' inputs and outputs; here they are summed over ranks already.
void DebugTraces::check_gradients(int64_t step) const {
  for (const Parameter& parameter : parameters_) {
    const at::Tensor& gradient = parameter.data.local.grad();
    if (is_finite(gradient)) continue;
    throw Error(
        titan::str("step ", step, ", rank ", rank_, ": the gradient of parameter '", parameter.name,
                   "' is the first that isn't finite, and no module of this rank gave such a gradient: "
                   "it was made by the parameter's own, or on another rank that shares it\n  gradient: ",
                   describe_numbers(gradient), "\n  parameter: ", describe_numbers(parameter.data.local)));
  }
}

}  // namespace titan::train
