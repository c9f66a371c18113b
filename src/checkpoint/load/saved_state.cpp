// Reads tensors from a step's folder in any layout, and checks the files against the manifest.

#include "titan/checkpoint/step_folder.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <tuple>

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include "checkpoint/format/rank_file.h"
#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/stored_files.h"
#include "core/threads.h"
#include "titan/core/error.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;

// Well below the 1024 descriptors that a process may have by default.
constexpr size_t kMostOpenFiles = 256;

std::string entry_problem(const RankFile::Entry& entry, const StateTensor& tensor, const Box& box) {
  if (entry.dtype != tensor.dtype)
    return titan::str("has dtype ", c10::toString(entry.dtype), "; the manifest says ",
                      c10::toString(tensor.dtype));
  if (entry.box != box)
    return titan::str("covers [", detail::box_text(entry.box), "]; the manifest says [",
                      detail::box_text(box), "]");
  return "";
}

// Throws Error unless the header's entry is the manifest's piece.
void check_entry(const RankFile& file, const StateTensor& tensor, const Box& box) {
  const std::string problem = entry_problem(file.entry(tensor.name), tensor, box);
  if (!problem.empty())
    throw Error(
        titan::str(file.file().path().string(), ": in its header, tensor '", tensor.name, "' ", problem));
}

// A line for each tensor on which the header contradicts the manifest, by name.
std::map<std::string, std::string> header_problems(const RankFile& file, const StateTable& table,
                                                   int64_t rank) {
  std::map<std::string, std::string> problems;
  std::map<std::string, const Piece*> expected;
  const std::vector<Piece> pieces = table.pieces_of(rank);
  for (const Piece& piece : pieces) expected.emplace(table.tensors()[piece.tensor].name, &piece);
  for (const std::string& name : file.names()) {
    const auto piece = expected.find(name);
    if (piece == expected.end()) {
      problems[name] = "is in the file, but the manifest puts no part of it there";
      continue;
    }
    const std::string problem =
        entry_problem(file.entry(name), table.tensors()[piece->second->tensor], piece->second->box);
    if (!problem.empty()) problems[name] = "in the header it " + problem;
    expected.erase(piece);
  }
  for (const auto& [name, piece] : expected) problems[name] = "is missing from the file";
  return problems;
}

// [Note: verifying] Threads take spans of a few blocks from one queue, in the order of the files: so the disk
// is read forward, and one large file keeps all threads busy. A file is open from its first span to its
// last.

constexpr int64_t kSpanBlocks = 8;
constexpr size_t kMostNames = 5;

// Removes the path from a message about a file whose path is shown separately.
std::string without_path(std::string message, const fs::path& path) {
  if (message.starts_with(path.string())) message.erase(0, path.string().size());
  return message.substr(std::min(message.size(), message.find_first_not_of(": ")));
}

// Drops the pages that were read, so that a large checkpoint doesn't push everything else out of memory.
// (Each span drops its own; the kernel may keep larger units that extend beyond a span, which go with the
// file.)
struct FileUnderCheck {
  RankFile rank_file;
  int64_t rank;
  ~FileUnderCheck() { rank_file.file().drop(0, 0); }
};

// Some blocks of a tensor's piece.
struct BlockSpan {
  std::shared_ptr<const FileUnderCheck> file;
  std::string tensor;
  const RankFile::Entry* entry = nullptr;  // points into `file`
  int64_t first_block = 0;
  int64_t num_blocks = 0;
};

std::vector<BlockSpan> spans_of(const std::shared_ptr<const FileUnderCheck>& file) {
  std::vector<BlockSpan> spans;
  for (const std::string& name : file->rank_file.names()) {
    const RankFile::Entry& entry = file->rank_file.entry(name);
    const auto num_blocks = static_cast<int64_t>(entry.checksums.size());
    for (int64_t block = 0; block < num_blocks; block += kSpanBlocks)
      spans.push_back({file, name, &entry, block, std::min(kSpanBlocks, num_blocks - block)});
  }
  return spans;
}

// The tensors that are lost with a file: "; it has parts of 14 tensors: 'a', 'b', ...".
std::string tensors_text(const StateTable& table, int64_t rank) {
  const std::vector<Piece> pieces = table.pieces_of(rank);
  std::string text =
      titan::str("; it has parts of ", pieces.size(), pieces.size() == 1 ? " tensor" : " tensors");
  for (size_t i = 0; i < std::min(pieces.size(), kMostNames); ++i)
    text += titan::str(i == 0 ? ": '" : ", '", table.tensors()[pieces[i].tensor].name, "'");
  return text + (pieces.size() > kMostNames ? ", ..." : "");
}

int64_t total_bytes(const StateTable& table) {
  int64_t bytes = 0;
  for (const StateTensor& tensor : table.tensors()) {
    bytes += c10::multiply_integers(tensor.shape) * static_cast<int64_t>(c10::elementSize(tensor.dtype));
  }
  return bytes;
}

// Whether `next` follows `last` in the same tensor and has the same problem.
bool continues(const Damage& last, const Damage& next) {
  return next.num_blocks > 0 && last.first_block + last.num_blocks == next.first_block &&
         std::tie(last.file, last.tensor, last.what) == std::tie(next.file, next.tensor, next.what);
}

class VerifyWork {
 public:
  // The arguments must outlive it.
  VerifyWork(const fs::path& step_folder, const Manifest& manifest, const VerifyOptions& options)
      : folder_(step_folder), manifest_(manifest), options_(options), total_(total_bytes(manifest.table)) {}

  // Checks spans until none is left. Called by any number of threads.
  void run() {
    std::vector<std::byte> buffer;
    while (const auto span = next()) check(*span, buffer);
  }

  // Called after all threads have returned.
  VerifyReport report() {
    std::stable_sort(found_.begin(), found_.end(), [](const Found& a, const Found& b) {
      return std::tie(a.rank, a.offset) < std::tie(b.rank, b.offset);
    });
    VerifyReport report{.damages = {},
                        .num_files = manifest_.table.world_size(),
                        .num_tensors = static_cast<int64_t>(manifest_.table.tensors().size()),
                        .num_bytes = done_};
    for (Found& found : found_) {
      if (!report.damages.empty() && continues(report.damages.back(), found.damage))
        ++report.damages.back().num_blocks;
      else
        report.damages.push_back(std::move(found.damage));
    }
    return report;
  }

 private:
  struct Found {
    int64_t rank = 0;
    int64_t offset = 0;  // in the file
    Damage damage;
  };

  std::optional<BlockSpan> next() {
    const std::lock_guard lock(mutex_);
    while (spans_.empty() && rank_ < manifest_.table.world_size()) open_next();
    if (spans_.empty()) return std::nullopt;
    BlockSpan span = std::move(spans_.front());
    spans_.pop_front();
    return span;
  }

  void open_next() {
    const int64_t rank = rank_++;
    try {
      const std::shared_ptr<const FileUnderCheck> file(
          new FileUnderCheck{detail::open_rank_file(folder_, manifest_, rank), rank});
      for (const auto& [name, what] : header_problems(file->rank_file, manifest_.table, rank))
        found_.push_back({rank, 0, {file->rank_file.file().path(), name, 0, 0, what}});
      for (BlockSpan& span : spans_of(file)) spans_.push_back(std::move(span));
    } catch (const Error& error) {
      const fs::path path = detail::stored_file(folder_, manifest_, rank);
      const std::string what = without_path(error.what(), path) + tensors_text(manifest_.table, rank);
      found_.push_back({rank, 0, {path, "", 0, 0, what}});
    }
  }

  void check(const BlockSpan& span, std::vector<std::byte>& buffer) {
    const RankFile::Entry& entry = *span.entry;
    const detail::InputFile& file = span.file->rank_file.file();
    for (int64_t block = span.first_block; block < span.first_block + span.num_blocks; ++block) {
      const int64_t begin = block * kBlockBytes, length = std::min(kBlockBytes, entry.num_bytes - begin);
      buffer.resize(static_cast<size_t>(length));
      std::string what;
      try {
        file.read(buffer, entry.offset + begin);
        if (detail::checksum_of(buffer) != entry.checksums[static_cast<size_t>(block)])
          what = "the bytes don't match their checksum";
      } catch (const Error& error) {
        what = without_path(error.what(), file.path());
      }
      const std::lock_guard lock(mutex_);
      if (!what.empty())
        found_.push_back(
            {span.file->rank, entry.offset + begin, {file.path(), span.tensor, block, 1, std::move(what)}});
      done_ += length;
      if (options_.progress) options_.progress(done_, total_);
    }
    file.drop(entry.offset + span.first_block * kBlockBytes, span.num_blocks * kBlockBytes);
  }

  const fs::path& folder_;
  const Manifest& manifest_;
  const VerifyOptions& options_;
  const int64_t total_;

  std::mutex mutex_;
  int64_t rank_ = 0;
  std::deque<BlockSpan> spans_;
  std::vector<Found> found_;
  int64_t done_ = 0;
};

// The files without tensors in the folder of a model alone.
std::vector<Damage> other_damages(const fs::path& folder, const Manifest& manifest) {
  std::vector<Damage> damages;
  for (const auto& [name, digest] : manifest.texts) {
    if (name == detail::kModelForm) continue;
    const std::string what = detail::digest_problem(folder / name, digest);
    if (!what.empty()) damages.push_back({folder / name, "", 0, 0, what});
  }
  return damages;
}

VerifyReport manifest_report(const fs::path& path, const std::string& what) {
  VerifyReport report;
  report.damages.push_back({path, "", 0, 0, without_path(what, path)});
  return report;
}

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
int64_t SavedState::bytes_read() const { return impl_->files.bytes_read(); }

const StateTensor& SavedState::tensor(std::string_view name) const {
  if (const auto position = table().find(name)) return table().tensors()[*position];
  std::vector<std::string> known;
  for (const StateTensor& tensor : table().tensors()) known.push_back(tensor.name);
  throw Error(titan::detail::no_tensor_text(folder().string(), name, known));
}

void SavedState::read(std::string_view name, const Box& box, const at::Tensor& target) const {
  const StateTensor& wanted = tensor(name);
  TITAN_CHECK(target.scalar_type() == wanted.dtype, folder().string(), ": tensor '", name, "' has dtype ",
              c10::toString(wanted.dtype), ", not ", c10::toString(target.scalar_type()));
  TITAN_CHECK(target.sizes() == at::IntArrayRef(box.length), "a box of lengths ", at::IntArrayRef(box.length),
              " of tensor '", name, "' can't be read into a tensor of shape ", target.sizes());
  for (const Source& source : table().sources_of(*table().find(name), box)) {
    const auto file = impl_->files.use(manifest(), source.rank);
    check_entry(*file, wanted, source.box);
    file->read(name, box, target);
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
  // The dimension to cut: one of its indices fits, but not one index of the dimension before.
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

// ---- verifying

std::string to_string(const Damage& damage) {
  const std::string tensor = damage.tensor.empty() ? "" : titan::str(": tensor '", damage.tensor, "'");
  std::string blocks;
  if (damage.num_blocks == 1) blocks = titan::str(", block ", damage.first_block);
  if (damage.num_blocks > 1)
    blocks = titan::str(", blocks ", damage.first_block, " to ", damage.first_block + damage.num_blocks - 1);
  return titan::str(damage.file.string(), tensor, blocks, ": ", damage.what);
}

VerifyReport verify_step(const fs::path& step_folder, const VerifyOptions& options) {
  const Storage::Kind kind = detail::kind_of(step_folder);
  if (kind == Storage::Kind::Nothing || kind == Storage::Kind::File)
    throw Error(titan::str("there is no folder ", step_folder.string()));
  fs::path path = step_folder / kManifestName;
  const bool is_model = !detail::is_file(path) && detail::is_file(step_folder / kModelManifestName);
  if (is_model) path = step_folder / kModelManifestName;
  if (!detail::is_file(path)) return manifest_report(path, detail::not_a_file(path).substr(1));
  Manifest manifest;
  try {
    manifest = is_model ? read_model_manifest(step_folder) : read_manifest(step_folder);
  } catch (const Error& error) {
    return manifest_report(path, error.what());
  }
  VerifyWork work(step_folder, manifest, options);
  const int num_threads = std::max(1, options.num_threads);
  run_tasks(num_threads, static_cast<size_t>(num_threads), [&](size_t) { work.run(); });
  VerifyReport report = work.report();
  if (is_model) std::ranges::move(other_damages(step_folder, manifest), std::back_inserter(report.damages));
  if (const auto problem = detail::step_name_problem(step_folder, manifest))
    report.damages.insert(report.damages.begin(), {path, "", 0, 0, without_path(*problem, path)});
  return report;
}

}  // namespace titan::checkpoint
