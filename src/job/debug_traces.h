#pragma once

// debug.nan_trace and debug.detect_anomaly in a run.

#include <memory>
#include <vector>

#include "job/settings.h"
#include "titan/nn/hooks.h"
#include "titan/parallel/parameters.h"
#include "titan/train/nan_trace.h"
#include "titan/train/run_observer.h"

namespace titan::train {

class DebugTraces final : public RunObserver {
 public:
  DebugTraces(const DebugSettings& debug, const std::vector<nn::AnyRef>& models,
              const std::vector<Parameter>& parameters, int rank);
  /// Before the optimizer throws Error that names the first parameter whose gradient isn't finite, where no
  /// module's was.
  void begin(Phase phase, int64_t step) override;

 private:
  void check_gradients(int64_t step) const;

  std::vector<Parameter> parameters_;
  int rank_;
  std::unique_ptr<AnomalyTrace> anomaly_trace_;
  std::unique_ptr<NanTrace> nan_trace_;  // around the other's hooks
};

}  // namespace titan::train
