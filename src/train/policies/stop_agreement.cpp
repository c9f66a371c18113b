#include "titan/train/stop_agreement.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/dist/collectives.h"
#include "train/policies/interruption.h"

namespace titan::train {

namespace {

constexpr std::chrono::milliseconds kPause{100};
constexpr int kPausesPerLook = 10;  // at the store

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Of its own for each agreement of a job: what one was asked isn't the next one's.
std::string next_key(const dist::World& world) {
  if (world.size() == 1) return "";
  return str("train/stop/", world.store().add(str("train/stops/", world.rank()), 1));
}

// By a connection of its own, as the one that all share is held by a thread that waits in it.
StorePtr open_store(const dist::World& world) {
  return world.size() == 1 ? StorePtr() : world.store().clone();
}

// Called in the signal watch's thread, beside whatever this rank is at.
void tell_peers(const StorePtr& store, const std::string& key, int signal) {
  if (peer_has_failed())
    return log::info(str(signal_name(signal), ": another rank has failed, and the launcher ends this one"));
  log::warning(str(signal_name(signal),
                   ": all ranks are asked to stop behind the step that they are at; "
                   "another signal ends this process at once"));
  if (!store) return;
  try {
    store->set(key, signal_name(signal));
  } catch (const std::exception& error) {
    log::warning(
        str("the store of the job doesn't answer, so that a rank that waits for data doesn't hear "
            "of the signal: ",
            error.what()));
  }
}

}  // namespace

StopAgreement::StopAgreement(const dist::World& world, const Meshes& meshes)
    : world_(world),
      meshes_(meshes),
      key_(next_key(world)),
      listener_(std::make_unique<SignalListener>(
          [store = open_store(world), key = key_](int signal) { tell_peers(store, key, signal); })) {}

StopAgreement::~StopAgreement() = default;
StopAgreement::StopAgreement(StopAgreement&&) noexcept = default;

bool StopAgreement::is_asked_by_peer() {
  if (!key_.empty()) told_ = told_ || world_.store().check({key_});
  return told_;
}

bool StopAgreement::wait_for(data::DataLoader& loader) {
  for (int pauses = 1; !loader.wait(kPause); ++pauses)
    if (noted_signal() != 0 || (pauses % kPausesPerLook == 0 && is_asked_by_peer())) return false;
  return true;
}

TokenCounts StopAgreement::count(const std::vector<data::Batch>& micro_batches, bool fails) {
  TokenCounts counts;
  for (const data::Batch& batch : micro_batches) counts.local += batch.valid_tokens;
  const bool asks = told_ || noted_signal() != 0;
  const at::Tensor sums = at::empty({3}, at::kLong);
  auto* values = sums.mutable_data_ptr<int64_t>();
  values[0] = counts.local;
  values[1] = asks;
  values[2] = fails;
  meshes_.batch.group()->all_reduce(sums, dist::ReduceOp::Sum, {"train::count_valid_tokens"}).wait();
  counts.global = values[0];
  constexpr double stop = 1, fail = 2;
  double verdict = values[2] > 0 ? fail : values[1] > 0 ? stop : 0;
  for (const DeviceMesh* mesh : {&meshes_.rows, &meshes_.tp, &meshes_.pp})
    if (mesh->size() > 1) verdict = mesh->group()->max(verdict, {"train::agree_to_stop"});
  agreed_ = agreed_ || verdict == stop;
  any_fails_ = any_fails_ || verdict == fail;
  return counts;
}

bool StopAgreement::agree() {
  static_cast<void>(count({}));
  return agreed_;
}

StopCause StopAgreement::cause() const {
  constexpr int kSignalBits = 128;
  const int signal = noted_signal();
  const double mine = signal == 0 ? 0 : (world_.size() - world_.rank()) * kSignalBits + signal;
  const auto everyone = world_.everyone();
  const auto largest = static_cast<int>(everyone->max(mine, {"train::stop_cause"}));
  const bool by_launcher = everyone->max(noted_by_launcher() ? 1 : 0, {"train::stop_cause"}) > 0;
  return {.signal = largest % kSignalBits,
          .rank = world_.size() - largest / kSignalBits,
          .by_launcher = by_launcher};
}

}  // namespace titan::train
