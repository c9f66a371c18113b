#include "train/peer_saves.h"

#include <cstdio>
#include <exception>

#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "train/run_mark.h"

namespace titan::train {

namespace {

namespace fs = std::filesystem;

constexpr dist::Label kPeerLabel{"train::peer_saves"};
// Rank 0's.
RunMark shared_mark(const dist::World& world, const fs::path& folder) {
  RunMark mark;
  std::string problem;
  try {
    if (world.rank() == 0) mark = run_mark(folder);
  } catch (const std::exception& error) {
    problem = error.what();
  }
  const auto of_rank_0 = [&](const std::string& text) {
    return world.everyone()->all_gather_text(text, kPeerLabel).front();
  };
  problem = of_rank_0(problem);
  if (!problem.empty()) throw Error(problem);
  return {.run = of_rank_0(mark.run), .folder = of_rank_0(mark.folder)};
}

std::shared_ptr<checkpoint::PeerFolder> open_folder(const dist::World& world, const PeerSettings& settings,
                                                    const fs::path& disk) {
  const RunMark mark = shared_mark(world, disk);
  return std::make_shared<checkpoint::PeerFolder>(world,
                                                  checkpoint::PeerFolder::Options{.parent = settings.folder,
                                                                                  .job = settings.job,
                                                                                  .run = mark.run,
                                                                                  .owner = mark.folder,
                                                                                  .disk = disk});
}

// The step waits for no file, and none that fails ends the run: the disk's are what counts.
checkpoint::SaveOptions peer_options(checkpoint::SaveOptions options,
                                     std::shared_ptr<checkpoint::PeerFolder> folder) {
  if (options.async == checkpoint::AsyncMode::Disabled) options.async = checkpoint::AsyncMode::Copied;
  options.skip_when_busy = true;
  options.stop_on_failure = false;
  options.peers = std::move(folder);
  return options;
}

std::string peer_gigabytes(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f GB", static_cast<double>(bytes) * 1e-9);
  return text;
}

}  // namespace

PeerSaves::PeerSaves(const dist::World& world, const DeviceMesh& pipeline, const PeerSettings& settings,
                     const checkpoint::SaveOptions& disk)
    : settings_(settings),
      folder_(open_folder(world, settings, disk.folder)),
      saver_(world, pipeline, peer_options(disk, folder_)) {}

fs::path PeerSaves::step_path(int64_t step) const { return checkpoint::step_path(folder_->path(), step); }

bool PeerSaves::holds(const fs::path& step_folder) const {
  return step_folder.parent_path() == folder_->path();
}

void PeerSaves::add_bringer(checkpoint::LoadOptions& options) const {
  options.bring_files = [folder = folder_](const checkpoint::Manifest& manifest,
                                           const std::set<int64_t>& ranks) {
    folder->bring_files(manifest, ranks);
  };
}

void PeerSaves::announce() {
  const checkpoint::PeerFolder::Memory memory = folder_->check_memory(saver_.plan());
  const std::string copies = folder_->num_places() > 1
                                 ? str("each file on two of ", folder_->num_places(), " hosts")
                                 : "on one host, without copies, which would be lost with it";
  log::info_rank0(str("peer checkpoints: every ", settings_.interval, " step(s) the state is kept in ",
                      folder_->path().string(), memory.in_memory ? "" : " (on a disk, not in memory)", ", ",
                      copies, "; up to ", peer_gigabytes(memory.files_bytes), " a host there, and ",
                      peer_gigabytes(memory.staged_bytes), " while it is copied; ",
                      peer_gigabytes(memory.free_bytes), " are free"));
}

PeerSaves::Damage PeerSaves::remove_damaged() {
  const auto [found, is_whole] = folder_->remove_damaged();
  for (const std::string& damage : found)
    log::warning_rank0("peer checkpoints: damaged, and removed: " + damage);
  if (found.empty()) return Damage::None;
  if (!is_whole) return Damage::Lost;
  log::warning_rank0(
      "peer checkpoints: of what was damaged another host has sound copies, which are loaded now");
  return Damage::Mended;
}

void PeerSaves::save(int64_t step) {
  try {
    saver_.save(step);
  } catch (const Error& error) {
    log::warning_rank0(str("peer checkpoints: the state of step ", step, " isn't kept: ", error.what()));
  }
}

void PeerSaves::finish() {
  try {
    saver_.finish();
  } catch (const Error& error) {
    log::warning(str("the state isn't kept in memory: ", error.what()));
  }
}

void PeerSaves::tell_failures() const {
  const checkpoint::SaveCounts counts = saver_.counts();
  if (counts.failed == 0) return;
  log::warning_rank0(str("peer checkpoints: ", counts.complete, " states were kept, ", counts.failed,
                         " couldn't be, and ", counts.skipped, " were skipped for others on their way"));
}

void PeerSaves::remove() {
  if (std::exchange(removed_, true)) return;
  try {
    folder_->remove();
  } catch (const Error& error) {
    log::warning_rank0(str("peer checkpoints: ", error.what()));
  }
}

}  // namespace titan::train
