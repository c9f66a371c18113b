#include "titan/checkpoint/saved_state.h"

#include <ATen/ops/empty.h>

#include "open_files.h"
#include "titan/core/error.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;

// Well below the 1024 descriptors that a process may have by default.
constexpr size_t kMostOpenFiles = 256;

}  // namespace

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

int64_t SavedState::bytes_read() const { return impl_->files.bytes_read(); }

}  // namespace titan::checkpoint
