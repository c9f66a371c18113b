#include "open_files.h"

#include <algorithm>

#include "folder_calls.h"
#include "titan/core/error.h"

namespace titan::checkpoint::detail {
namespace {

namespace fs = std::filesystem;

std::string text_of(const Box& box) {
  std::string text;
  for (size_t dim = 0; dim < box.offset.size(); ++dim)
    text += titan::str(dim == 0 ? "" : ",", box.offset[dim], ":", box.offset[dim] + box.length[dim]);
  return titan::str("[", text, "]");
}

std::string entry_problem(const RankFile::Entry& entry, const StateTensor& tensor, const Box& box) {
  if (entry.dtype != tensor.dtype)
    return titan::str("is of ", c10::toString(entry.dtype), "; the manifest says ",
                      c10::toString(tensor.dtype));
  if (entry.box != box)
    return titan::str("is ", text_of(entry.box), " of it; the manifest says ", text_of(box));
  return "";
}

}  // namespace

RankFile open_rank_file(const fs::path& step_folder, const Manifest& manifest, int64_t rank) {
  const fs::path path = step_folder / file_name(rank);
  if (!titan::detail::is_own_file(path))
    throw Error(titan::str(path.string(), titan::detail::is_there(path)
                                              ? " is no regular file; what a link leads to isn't read"
                                              : " is missing"));
  const FileIdentity identity{manifest.run_id, manifest.step, rank, manifest.table.world_size()};
  return RankFile(path, identity, manifest.files.at(static_cast<size_t>(rank)));
}

void check_entry(const RankFile& file, const StateTensor& tensor, const Box& box) {
  const std::string problem = entry_problem(file.entry(tensor.name), tensor, box);
  if (!problem.empty())
    throw Error(
        titan::str(file.path().string(), ": what its header has of tensor '", tensor.name, "' ", problem));
}

std::map<std::string, std::string> header_problems(const RankFile& file, const StateTable& table,
                                                   int64_t rank) {
  std::map<std::string, std::string> problems;
  std::map<std::string, const Piece*> expected;
  const std::vector<Piece> pieces = table.pieces_of(rank);
  for (const Piece& piece : pieces) expected.emplace(table.tensors()[piece.tensor].name, &piece);
  for (const std::string& name : file.names()) {
    const auto piece = expected.find(name);
    if (piece == expected.end()) {
      problems[name] = "is in the file; the manifest has no part of it there";
      continue;
    }
    const std::string problem =
        entry_problem(file.entry(name), table.tensors()[piece->second->tensor], piece->second->box);
    if (!problem.empty()) problems[name] = "what the header has of it " + problem;
    expected.erase(piece);
  }
  for (const auto& [name, piece] : expected) problems[name] = "is missing from the file";
  return problems;
}

OpenFiles::Lease OpenFiles::use(const Manifest& manifest, int64_t rank) {
  Slot& slot = take_slot(rank);
  try {
    // Others wait for this file here, and for no other one.
    const std::lock_guard lock(slot.opening);
    if (!slot.file) slot.file = open_rank_file(folder_, manifest, rank);
  } catch (...) {
    give_back(slot);
    throw;
  }
  return Lease(*this, slot);
}

OpenFiles::Slot& OpenFiles::take_slot(int64_t rank) {
  const std::lock_guard lock(mutex_);
  if (slots_.find(rank) == slots_.end() && slots_.size() >= most_open_) close_oldest();
  Slot& slot = slots_[rank];
  ++slot.num_users;
  slot.last_use = ++num_uses_;
  return slot;
}

void OpenFiles::give_back(Slot& slot) {
  const std::lock_guard lock(mutex_);
  --slot.num_users;
}

void OpenFiles::close_oldest() {
  auto oldest = slots_.end();
  for (auto slot = slots_.begin(); slot != slots_.end(); ++slot) {
    if (slot->second.num_users > 0) continue;
    if (oldest == slots_.end() || slot->second.last_use < oldest->second.last_use) oldest = slot;
  }
  if (oldest == slots_.end()) return;  // all are being read: one more than usual is open for a while
  if (oldest->second.file) bytes_of_closed_ += oldest->second.file->bytes_read();
  slots_.erase(oldest);
}

int64_t OpenFiles::bytes_read() const {
  const std::lock_guard lock(mutex_);
  int64_t bytes = bytes_of_closed_;
  for (const auto& [rank, slot] : slots_)
    if (slot.file) bytes += slot.file->bytes_read();
  return bytes;
}

}  // namespace titan::checkpoint::detail
