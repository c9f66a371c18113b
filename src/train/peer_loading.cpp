// RunCheckpoints: what is kept in memory of the hosts, and going on from it.

#include <exception>

#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/train/run_checkpoints.h"
#include "train/peer_saves.h"

namespace titan::train {

namespace {

/// Of a generation in memory, as all ranks have found.
class DamagedGeneration : public Error {
 public:
  using Error::Error;
};

}  // namespace

bool RunCheckpoints::is_due_in_memory(int64_t step) const { return peers_ && peers_->is_due(step); }

// Too little memory is a wrong setting at a run's start. Behind a loss, which may have left fewer hosts, the
// run goes on: its state has just been loaded, and the disk keeps it.
void RunCheckpoints::announce_peers(bool goes_on) {
  try {
    peers_->announce();
  } catch (const ConfigError& error) {
    if (!goes_on) throw;
    log::warning_rank0(str("no states are kept in memory from here on: ", error.what()));
    peers_.reset();
  }
}

void RunCheckpoints::save_in_memory(int64_t step) { peers_->save(step); }

void RunCheckpoints::end() {
  finish();
  if (!peers_) return;
  peers_->tell_failures();
  if (loaded_step_ >= 0) peers_->remove();
}

// What was read of damaged files is overwritten by a load that ends well, and only by one. A load that fails
// for another reason (a rank is lost, memory is short) says nothing against the generation: the next start
// may go on from it.
checkpoint::Loaded RunCheckpoints::load_generation(const std::filesystem::path& folder) {
  while (true) {
    try {
      return load_whole(folder, options_.settings.exclude_from_loading);
    } catch (const ConfigError&) {
      throw;  // the run isn't the generation's: no damage
    } catch (const Error& error) {
      switch (peers_->remove_damaged()) {
        case PeerSaves::Damage::None:
          throw;
        case PeerSaves::Damage::Lost:
          throw DamagedGeneration(error.what());
        case PeerSaves::Damage::Mended:
          break;
      }
    }
  }
}

// The newer one counts; of equals the one that no disk is read for. What isn't used stays until the disk's is
// loaded.
bool RunCheckpoints::load_from_memory(std::optional<int64_t> on_disk) {
  const auto step = peers_->choose_newest();
  const bool is_asked_for = options_.settings.load_step >= 0;
  if (!step || is_asked_for || on_disk.value_or(-1) > *step) {
    if (step)
      log::info_rank0(str("peer checkpoints: step ", *step,
                          " in memory isn't used, as the run goes on behind step ", on_disk.value_or(0),
                          " on disk"));
    return false;
  }
  log::info_rank0(str("peer checkpoints: step ", *step, " is in memory; the newest on disk is ",
                      on_disk ? str("step ", *on_disk) : "none"));
  try {
    const auto folder = peers_->step_path(*step);
    tell_loaded(load_generation(folder), folder);
    loaded_step_ = *step;
    from_memory_ = true;
  } catch (const DamagedGeneration& error) {
    log::warning_rank0(str("passed over: step ", *step, " in memory: ", error.what()));
    peers_->forget();
    // What was read of it is overwritten by a whole state, and only by one; the next start finds nothing in
    // memory.
    if (on_disk.value_or(0) == 0) throw;
  }
  return from_memory_;
}

}  // namespace titan::train
