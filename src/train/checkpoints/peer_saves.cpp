#include "train/checkpoints/peer_saves.h"

#include <sys/stat.h>
#include <cerrno>
#include <cstring>
#include <optional>
#include <sstream>
#include <utility>

#include "checkpoint/format/stored_files.h"
#include "checkpoint/save/rank_tree.h"
#include "core/file.h"
#include "core/process.h"
#include "core/units.h"
#include "titan/checkpoint/manifest.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::train {

namespace {

namespace fs = std::filesystem;

constexpr const char* kRunMark = ".peer_run";
constexpr dist::Label kPeerLabel{"train::peer_saves"};

// The content of `.peer_run`. It has no device numbers: those of one network file system differ from host to
// host and from boot to boot.
struct Marked {
  std::string run, inode, path;
};

std::string to_text(const Marked& marked) {
  return str(marked.run, "\n", marked.inode, "\n", marked.path, "\n");
}

// nullopt if there is no such file, or something else is in it.
std::optional<Marked> read_mark(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::exists(folder / kRunMark, ignored)) return std::nullopt;
  std::istringstream text(read_file(folder / kRunMark));
  Marked marked;
  const bool whole =
      std::getline(text, marked.run) && std::getline(text, marked.inode) && std::getline(text, marked.path);
  return whole && !marked.run.empty() ? std::optional(marked) : std::nullopt;
}

// The place where the run saves; run_mark() fills in `run`.
Marked place_of(const fs::path& folder) {
  struct stat status = {};
  if (::stat(folder.c_str(), &status) != 0)
    throw Error(str("cannot stat ", folder.string(), ": ", errno_text(errno)));
  return {.run = "", .inode = std::to_string(status.st_ino), .path = fs::canonical(folder).string()};
}

// A folder with a new path was renamed, or is seen from another host. A copy has a new inode. A snapshot of a
// file system has the same one, but then the original is still there.
bool is_same_run(const Marked& saved, const Marked& now) {
  if (saved.path == now.path) return true;
  if (saved.inode != now.inode) return false;
  std::error_code ignored;
  return !fs::exists(saved.path, ignored) || fs::equivalent(saved.path, now.path, ignored);
}

std::shared_ptr<checkpoint::PeerFolder> open_folder(const dist::World& world, const PeerSettings& settings,
                                                    const fs::path& disk) {
  const auto mark = checkpoint::detail::from_wire<RunMark>(checkpoint::detail::from_rank_0(
      world, kPeerLabel, [&] { return checkpoint::detail::to_wire(run_mark(disk)); }));
  return std::make_shared<checkpoint::PeerFolder>(world,
                                                  checkpoint::PeerFolder::Options{.parent = settings.folder,
                                                                                  .job = settings.job,
                                                                                  .run = mark.run,
                                                                                  .owner = mark.folder,
                                                                                  .disk = disk});
}

// A step never waits for these files, and a failure never ends the run: the checkpoints on disk are what
// counts.
checkpoint::SaveOptions peer_options(checkpoint::SaveOptions options,
                                     std::shared_ptr<checkpoint::PeerFolder> folder) {
  if (options.async == checkpoint::AsyncMode::Disabled) options.async = checkpoint::AsyncMode::Copied;
  options.skip_when_busy = true;
  options.stop_on_failure = false;
  options.peers = std::move(folder);
  return options;
}

}  // namespace

RunMark run_mark(const fs::path& folder) {
  Marked now = place_of(folder);
  const std::optional<Marked> saved = read_mark(folder);
  now.run = saved && is_same_run(*saved, now) ? saved->run : checkpoint::detail::random_id();
  if (!saved || to_text(*saved) != to_text(now)) write_file_atomic(folder / kRunMark, to_text(now));
  return {.run = now.run, .folder = str(now.path, " (inode ", now.inode, ")")};
}

PeerSaves::PeerSaves(const dist::World& world, const DeviceMesh& pipeline, const PeerSettings& settings,
                     const checkpoint::SaveOptions& disk)
    : folder(open_folder(world, settings, disk.folder)),
      saver(world, pipeline, peer_options(disk, folder)),
      settings_(settings) {}

void PeerSaves::announce() {
  const checkpoint::PeerFolder::Memory memory = folder->check_memory(saver.plan());
  const std::string copies = folder->num_places() > 1
                                 ? str("each file on two of ", folder->num_places(), " hosts")
                                 : "on one host; no copies, because they would be lost with the host";
  log::info_rank0(str("peer checkpoints: every ", settings_.interval, " step(s) the state is kept in ",
                      folder->path().string(), memory.in_memory ? "" : " (on a disk, not in memory)", ", ",
                      copies, "; up to ", size_text(memory.files_bytes), " per host, and ",
                      size_text(memory.staged_bytes), " more while copying; ", size_text(memory.free_bytes),
                      " are free"));
}

PeerSaves::Damage PeerSaves::remove_damaged() {
  const auto [found, is_whole] = folder->remove_damaged();
  for (const std::string& damage : found)
    log::warning_rank0("peer checkpoints: removed a damaged file: " + damage);
  if (found.empty()) return Damage::None;
  if (!is_whole) return Damage::Lost;
  log::warning_rank0("peer checkpoints: another host has sound copies of the damaged files; loading them");
  return Damage::Mended;
}

void PeerSaves::save(int64_t step) {
  try {
    saver.save(step);
  } catch (const Error& error) {
    log::warning_rank0(
        str("peer checkpoints: the state of step ", step, " isn't kept in memory: ", error.what()));
  }
}

void PeerSaves::finish() {
  try {
    saver.finish();
  } catch (const Error& error) {
    log::warning(str("the state isn't kept in memory: ", error.what()));
  }
}

void PeerSaves::log_failures() const {
  const checkpoint::SaveCounts counts = saver.counts();
  if (counts.failed == 0) return;
  log::warning_rank0(str("peer checkpoints: ", counts.complete, " states were kept, ", counts.failed,
                         " couldn't be, and ", counts.skipped,
                         " were skipped while an earlier one was being copied"));
}

void PeerSaves::remove() {
  if (std::exchange(removed_, true)) return;
  try {
    folder->remove();
  } catch (const Error& error) {
    log::warning_rank0(str("peer checkpoints: ", error.what()));
  }
}

}  // namespace titan::train
