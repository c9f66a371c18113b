#pragma once

// A signal to any rank stops all of them after the same step ([Note: stopping] in interruption.h).

#include <memory>
#include <string>

#include "titan/dist/world.h"
#include "titan/train/policy.h"

namespace titan::train {

class SignalListener;

class StopOnSignal final : public TrainerPolicy {
 public:
  /// Collective over the world.
  explicit StopOnSignal(const dist::World& world);
  ~StopOnSignal() override;

  Vote vote() override;
  bool gives_up_waiting() override;
  std::optional<StopCause> stop_cause() override;

 private:
  bool is_asked_by_peer();

  dist::World world_;
  std::string
      key_;  // in the job's store, set by a rank that was sent a signal; empty: there are no other ranks
  std::unique_ptr<SignalListener> listener_;
  bool told_ = false;  // by a peer
  int num_asked_ = 0;  // calls of gives_up_waiting
};

}  // namespace titan::train
