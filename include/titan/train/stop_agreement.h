#pragma once

// How all ranks come to stop behind the same step ([Note: stopping] in interruption.h), or to fail there.
//
// Whoever asks says so in the exchange of token counts that every step begins with anyway: of the ranks that
// read different rows. Those that share rows (tensor, context, pipeline parallel) exchange nothing by then,
// so where there are such axes a number goes along each of them too.

#include <memory>
#include <string>
#include <vector>

#include "titan/data/loader.h"
#include "titan/dist/world.h"
#include "titan/train/parallel_dims.h"
#include "titan/train/run_end.h"
#include "titan/train/step_runner.h"

namespace titan::train {

class SignalListener;

class StopAgreement {
 public:
  StopAgreement(const dist::World& world, const Meshes& meshes);
  ~StopAgreement();
  StopAgreement(StopAgreement&&) noexcept;

  /// Waits for the loader's next step; false: this rank gives up, as a signal was noted here or on a rank
  /// that waits for this one. It then has to come to count() without batches.
  bool wait_for(data::DataLoader& loader);

  /// The tokens of this rank's micro-batches that count, and of all ranks'; agreed() is set on the way.
  /// Collective over the world.
  /// `fails`: this rank can't go on, which all ranks then do: any_fails() is set.
  TokenCounts count(const std::vector<data::Batch>& micro_batches, bool fails = false);

  /// Where nothing is counted. Collective over the world.
  bool agree();

  /// Whether all ranks stop: the same everywhere behind the same count() or agree().
  bool agreed() const { return agreed_; }
  /// Likewise, whether a rank fails; then nothing is said of stopping.
  bool any_fails() const { return any_fails_; }

  /// Collective over the world, behind the agreement.
  StopCause cause() const;

 private:
  bool is_asked_by_peer();

  dist::World world_;
  Meshes meshes_;
  std::string key_;  // in the job's store, where a rank that was asked says so; empty: there are no others
  std::unique_ptr<SignalListener> listener_;
  bool told_ = false;  // by a peer
  bool agreed_ = false;
  bool any_fails_ = false;
};

}  // namespace titan::train
