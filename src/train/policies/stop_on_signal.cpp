#include "train/policies/stop_on_signal.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/dist/collectives.h"
#include "train/policies/interruption.h"

namespace titan::train {

namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Each trainer of a job has its own key: a request to stop one isn't meant for the next.
std::string next_key(const dist::World& world) {
  if (world.size() == 1) return "";
  return str("train/stop/", world.store().add(str("train/stops/", world.rank()), 1));
}

// A connection of its own: a thread that waits in the shared one would hold it.
StorePtr open_store(const dist::World& world) {
  return world.size() == 1 ? StorePtr() : world.store().clone();
}

// Called by the signal watch's thread, whatever this rank is doing.
void tell_peers(const StorePtr& store, const std::string& key, int signal) {
  if (peer_has_failed())
    return log::info(str(signal_name(signal), ": another rank has failed, and the launcher ends this one"));
  log::warning(str(
      signal_name(signal),
      ": all ranks are asked to stop after the step in progress; another signal ends this process at once"));
  if (!store) return;
  try {
    store->set(key, signal_name(signal));
  } catch (const std::exception& error) {
    log::warning(
        str("the job's store doesn't answer, so ranks that wait for data don't learn of the signal: ",
            error.what()));
  }
}

}  // namespace

StopOnSignal::StopOnSignal(const dist::World& world)
    : world_(world),
      key_(next_key(world)),
      listener_(std::make_unique<SignalListener>(
          [store = open_store(world), key = key_](int signal) { tell_peers(store, key, signal); })) {}

StopOnSignal::~StopOnSignal() = default;

Vote StopOnSignal::vote() { return told_ || noted_signal() != 0 ? Vote::Stop : Vote::Go; }

bool StopOnSignal::gives_up_waiting() {
  constexpr int kAsksPerLook = 10;  // at the store
  return noted_signal() != 0 || (++num_asked_ % kAsksPerLook == 0 && is_asked_by_peer());
}

bool StopOnSignal::is_asked_by_peer() {
  if (!key_.empty()) told_ = told_ || world_.store().check({key_});
  return told_;
}

std::optional<StopCause> StopOnSignal::stop_cause() {
  constexpr int kSignalBits = 128;
  constexpr dist::Label kLabel{"train::stop_cause"};
  const int signal = noted_signal();
  const double mine = signal == 0 ? 0 : (world_.size() - world_.rank()) * kSignalBits + signal;
  const auto everyone = world_.everyone();
  const auto largest = static_cast<int>(everyone->max(mine, kLabel));
  const bool by_launcher = everyone->max(noted_by_launcher() ? 1 : 0, kLabel) > 0;
  if (largest == 0) return std::nullopt;
  StopCause cause{.signal = largest % kSignalBits,
                  .rank = world_.size() - largest / kSignalBits,
                  .by_launcher = by_launcher};
  cause.reason = str(signal_name(cause.signal), " on rank ", cause.rank);
  return cause;
}

}  // namespace titan::train
