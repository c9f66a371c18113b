#include <algorithm>
#include <exception>
#include <vector>

#include "checkpoint/format/input_file.h"
#include "checkpoint/format/rank_file.h"
#include "checkpoint/peer/generations.h"
#include "checkpoint/peer/peer_folder_impl.h"
#include "checkpoint/save/shared_folder.h"
#include "core/durable.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "titan/core/file.h"

namespace titan::checkpoint::detail {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kCopiedBytes = int64_t{4} << 20;

/// Throws when no more is to be saved.
using Look = std::function<void()>;

void copy_file(const fs::path& from, const fs::path& to, const FileRecord& record, const Look& look) {
  const InputFile input(from);
  if (input.num_bytes() != record.num_bytes)
    throw Error(str(from.string(), " has ", input.num_bytes(), " bytes in place of ", record.num_bytes));
  OutputFile output(to, record.num_bytes);
  std::vector<std::byte> piece(static_cast<size_t>(std::min(kCopiedBytes, record.num_bytes)));
  for (int64_t offset = 0; offset < record.num_bytes; offset += kCopiedBytes) {
    look();
    const int64_t length = std::min(kCopiedBytes, record.num_bytes - offset);
    input.read({piece.data(), static_cast<size_t>(length)}, offset);
    iovec part = {piece.data(), static_cast<size_t>(length)};
    output.write({&part, 1}, offset);
    output.start_write_back(offset, length);
  }
  output.finish();
}

// A damaged one isn't made a step: it would only be told then, by who wants to go on from it.
void copy_files(const fs::path& from, const fs::path& to, const Look& look) {
  const Manifest manifest = read_manifest(from);
  const auto num_files = static_cast<int64_t>(manifest.files.size());
  for (int64_t rank = 0; rank < num_files; ++rank) {
    const FileRecord& record = manifest.files[static_cast<size_t>(rank)];
    copy_file(from / file_name(rank), to / file_name(rank), record, look);
    RankFile(to / file_name(rank), {manifest.run_id, manifest.step, rank, num_files}, record)
        .verify([&](int64_t /*bytes*/) { look(); });
  }
  write_file_atomic(to / kManifestName, read_file(from / kManifestName));
}

void copy_step(const fs::path& from, int64_t step, const fs::path& disk, const Look& look) {
  const FolderLock lock(disk);
  const std::string id = random_id();
  const fs::path pending = pending_path(disk, step, id);
  try {
    make_folder(pending);
    copy_files(from, pending, look);
    commit_step(disk, step, id);
  } catch (const std::exception&) {
    std::error_code ignored;  // the run's next start removes it
    fs::remove_all(pending, ignored);
    throw;
  }
}

// A folder that isn't there may be on storage that is away.
fs::path disk_of(const fs::path& folder) {
  const fs::path disk = read_file(folder / kDiskName);
  if (!fs::is_directory(disk)) throw Error(str(disk.string(), ", where the run saves, isn't there"));
  return disk;
}

}  // namespace

std::optional<LeftState> save_newest_generation(const fs::path& folder,
                                                const std::function<bool()>& gives_up) {
  std::vector<std::string> ignored;
  const auto newest = newest_generation({held_generations(folder, ignored)});
  if (!newest) return std::nullopt;
  LeftState state{.step = newest->step, .memory = step_path(folder, newest->step)};
  try {
    const fs::path disk = disk_of(folder);
    state.disk = step_path(disk, newest->step);
    if (newest_complete(disk, ignored).value_or(-1) >= newest->step) return std::nullopt;
    copy_step(state.memory, newest->step, disk, [&] {
      if (gives_up && gives_up()) throw Error("told to end at once");
    });
  } catch (const std::exception& error) {
    state.problem = error.what();
  }
  return state;
}

}  // namespace titan::checkpoint::detail
