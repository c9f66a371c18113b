#include "titan/checkpoint/saved_state.h"

#include <algorithm>

#include <ATen/ops/empty.h>

#include "checkpoint/format/stored_files.h"
#include "checkpoint/load/open_files.h"
#include "titan/core/error.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;

// Well below the 1024 descriptors that a process may have by default.
constexpr size_t kMostOpenFiles = 256;

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

namespace detail {

RankFile open_rank_file(const fs::path& step_folder, const Manifest& manifest, int64_t rank) {
  const fs::path path = step_folder / file_name(rank);
  if (!is_file(path))
    throw Error(titan::str(path.string(), not_a_file(path), is_there(path) ? "; links aren't followed" : ""));
  const FileIdentity identity{manifest.run_id, manifest.step, rank, manifest.table.world_size()};
  return RankFile(path, identity, manifest.files.at(static_cast<size_t>(rank)));
}

void check_entry(const RankFile& file, const StateTensor& tensor, const Box& box) {
  const std::string problem = entry_problem(file.entry(tensor.name), tensor, box);
  if (!problem.empty())
    throw Error(
        titan::str(file.path().string(), ": its header's part of tensor '", tensor.name, "' ", problem));
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
      problems[name] = "is in the file, but by the manifest it has no part there";
      continue;
    }
    const std::string problem =
        entry_problem(file.entry(name), table.tensors()[piece->second->tensor], piece->second->box);
    if (!problem.empty()) problems[name] = "the header's part of it " + problem;
    expected.erase(piece);
  }
  for (const auto& [name, piece] : expected) problems[name] = "is missing from the file";
  return problems;
}

OpenFiles::Lease OpenFiles::use(const Manifest& manifest, int64_t rank) {
  Slot& slot = take_slot(rank);
  try {
    // Other threads wait here for this file, and for no other.
    const std::lock_guard lock(slot.opening);
    if (!slot.file) slot.file = open_rank_file(folder_, manifest, rank);
  } catch (...) {
    release(slot);
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

void OpenFiles::release(Slot& slot) {
  const std::lock_guard lock(mutex_);
  --slot.num_users;
}

void OpenFiles::close_oldest() {
  auto oldest = slots_.end();
  for (auto slot = slots_.begin(); slot != slots_.end(); ++slot) {
    if (slot->second.num_users > 0) continue;
    if (oldest == slots_.end() || slot->second.last_use < oldest->second.last_use) oldest = slot;
  }
  if (oldest == slots_.end()) return;  // all are being read: one more than usual stays open for a while
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

}  // namespace detail

struct SavedState::Impl {
  fs::path folder;
  Manifest manifest;
  detail::OpenFiles files;
};

SavedState::SavedState(const fs::path& step_folder) : SavedState(step_folder, read_manifest(step_folder)) {}
SavedState::SavedState(const fs::path& step_folder, Manifest manifest)
    : impl_(new Impl{step_folder, std::move(manifest), {step_folder, kMostOpenFiles}}) {}

const fs::path& SavedState::folder() const { return impl_->folder; }
const Manifest& SavedState::manifest() const { return impl_->manifest; }
int64_t SavedState::bytes_read() const { return impl_->files.bytes_read(); }

const StateTensor& SavedState::tensor(std::string_view name) const {
  if (const auto position = table().find(name)) return table().tensors()[*position];
  std::vector<std::string> known;
  for (const StateTensor& tensor : table().tensors()) known.push_back(tensor.name);
  std::string message = titan::str(folder().string(), ": no tensor '", name, "'");
  for (const auto& near : nearest_names(name, known, 3)) message += titan::str("; there is '", near, "'");
  throw Error(message);
}

void SavedState::read(std::string_view name, const Box& box, const at::Tensor& target) const {
  const StateTensor& wanted = tensor(name);
  TITAN_CHECK(target.scalar_type() == wanted.dtype, folder().string(), ": tensor '", name, "' is of ",
              c10::toString(wanted.dtype), ", not ", c10::toString(target.scalar_type()));
  TITAN_CHECK(target.sizes() == at::IntArrayRef(box.length), "a box of lengths ", at::IntArrayRef(box.length),
              " of tensor '", name, "' can't be read into a tensor of shape ", target.sizes());
  for (const Source& source : table().sources_of(*table().find(name), box)) {
    const auto lease = impl_->files.use(manifest(), source.rank);
    detail::check_entry(lease.file(), wanted, source.box);
    lease.file().read(name, box, target);
  }
}

at::Tensor SavedState::read(std::string_view name) const {
  const StateTensor& wanted = tensor(name);
  at::Tensor whole = at::empty(wanted.shape, at::dtype(wanted.dtype));
  read(name, Box{std::vector<int64_t>(wanted.shape.size(), 0), wanted.shape}, whole);
  return whole;
}

std::vector<Box> slabs_of(const std::vector<int64_t>& shape, int64_t element_size, int64_t most_bytes) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return {};
  if (shape.empty()) return {Box{}};
  // The dimension to cut: several of its indices fit, but not one index of the dimension before.
  int64_t index_bytes = element_size;
  for (int64_t length : shape) index_bytes *= length;
  size_t cut = 0;
  for (;; ++cut) {
    index_bytes /= shape[cut];
    if (index_bytes <= most_bytes || cut + 1 == shape.size()) break;
  }
  const int64_t step = std::max<int64_t>(1, most_bytes / index_bytes);
  std::vector<Box> slabs;
  std::vector<int64_t> offset(shape.size(), 0);
  while (true) {
    std::vector<int64_t> length = shape;
    std::fill(length.begin(), length.begin() + static_cast<std::ptrdiff_t>(cut), 1);
    length[cut] = std::min(step, shape[cut] - offset[cut]);
    slabs.push_back({offset, length});
    offset[cut] += length[cut];
    for (size_t dim = cut; offset[dim] == shape[dim]; --dim) {  // carry
      if (dim == 0) return slabs;
      offset[dim] = 0;
      ++offset[dim - 1];
    }
  }
}

}  // namespace titan::checkpoint
