#include "train/peer_saves.h"

#include <cstdio>
#include <exception>
#include <random>

#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "titan/core/file.h"
#include "titan/core/log.h"

namespace titan::train {

namespace {

namespace fs = std::filesystem;

constexpr dist::Label kPeerLabel{"train::peer_saves"};
constexpr const char* kRunMark = ".peer_run";

std::string random_mark() {
  std::random_device source;
  return checkpoint::digest_of(str(source(), " ", source(), " ", source(), " ", source()));
}

// A folder that was removed and made anew is another run's: what is in memory isn't loaded into that.
std::string mark_of(const fs::path& folder) {
  const fs::path path = folder / kRunMark;
  std::error_code ignored;
  if (!fs::exists(path, ignored)) write_file_atomic(path, random_mark());
  return read_file(path);
}

std::string shared_mark(const dist::World& world, const fs::path& folder) {
  std::string mark, problem;
  try {
    if (world.rank() == 0) mark = mark_of(folder);
  } catch (const Error& error) {
    problem = error.what();
  }
  problem = world.everyone()->all_gather_text(problem, kPeerLabel).front();
  TITAN_CHECK(problem.empty(), problem);
  return world.everyone()->all_gather_text(mark, kPeerLabel).front();
}

std::shared_ptr<checkpoint::PeerFolder> open_folder(const dist::World& world, const PeerSettings& settings,
                                                    const fs::path& disk) {
  return std::make_shared<checkpoint::PeerFolder>(
      world, checkpoint::PeerFolder::Options{
                 .parent = settings.folder, .job = settings.job, .run = shared_mark(world, disk)});
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

void PeerSaves::remove() {
  if (std::exchange(removed_, true)) return;
  folder_->remove();
}

}  // namespace titan::train
