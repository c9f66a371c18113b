// Weights that are converted, wherever they lie.

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include "titan/checkpoint/hugging_face.h"
#include "titan/checkpoint/safetensors.h"
#include "titan/checkpoint/saved_state.h"
#include "titan/core/error.h"

namespace titan::detail {

class WeightSource {
 public:
  virtual ~WeightSource() = default;
  /// For messages.
  virtual std::string path() const = 0;
  virtual std::vector<std::string> names() const = 0;
  /// Dtype and shape; nullopt: it has no such tensor.
  virtual std::optional<SafetensorsEntry> find(const std::string& name) const = 0;
  /// Fills `target`, contiguous and of the source's dtype, with the elements in `box`; keeps no memory.
  virtual void read(const std::string& name, const Box& box, const at::Tensor& target) const = 0;
};

/// One file.
class FileWeights : public WeightSource {
 public:
  explicit FileWeights(const std::filesystem::path& file) : file_(file) {}
  std::string path() const override { return file_.path().string(); }
  std::vector<std::string> names() const override { return file_.names(); }
  std::optional<SafetensorsEntry> find(const std::string& name) const override;
  void read(const std::string& name, const Box& box, const at::Tensor& target) const override;

 private:
  SafetensorsFile file_;
};

/// The shards of a Hugging Face folder, under its names. The folder has to live as long.
class FolderWeights : public WeightSource {
 public:
  explicit FolderWeights(const HfFolder& folder) : folder_(folder) {}
  std::string path() const override { return folder_.path().string(); }
  std::vector<std::string> names() const override { return folder_.names(); }
  std::optional<SafetensorsEntry> find(const std::string& name) const override;
  void read(const std::string& name, const Box& box, const at::Tensor& target) const override;

 private:
  const HfFolder& folder_;
};

/// A saved state's tensors "model.NAME", as NAME.
class StateWeights : public WeightSource {
 public:
  explicit StateWeights(checkpoint::SavedState state) : state_(std::move(state)) {}
  std::string path() const override { return state_.folder().string(); }
  std::vector<std::string> names() const override;
  std::optional<SafetensorsEntry> find(const std::string& name) const override;
  void read(const std::string& name, const Box& box, const at::Tensor& target) const override;

 private:
  checkpoint::SavedState state_;
};

namespace {

// Of the parameters among a state's tensors.
constexpr std::string_view kModelPrefix = "model.";

SafetensorsEntry entry_of(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsInfo& info = file.info(name);
  return {name, info.dtype, info.shape};
}

void read_and_drop(const SafetensorsFile& file, const std::string& name, const Box& box,
                   const at::Tensor& target) {
  file.read_slice(name, box, target);
  file.drop_pages();
}

}  // namespace

std::optional<SafetensorsEntry> FileWeights::find(const std::string& name) const {
  if (!file_.contains(name)) return std::nullopt;
  return entry_of(file_, name);
}

void FileWeights::read(const std::string& name, const Box& box, const at::Tensor& target) const {
  read_and_drop(file_, name, box, target);
}

std::optional<SafetensorsEntry> FolderWeights::find(const std::string& name) const {
  if (!folder_.contains(name)) return std::nullopt;
  return entry_of(folder_.file_of(name), name);
}

void FolderWeights::read(const std::string& name, const Box& box, const at::Tensor& target) const {
  read_and_drop(folder_.file_of(name), name, box, target);
}

std::vector<std::string> StateWeights::names() const {
  std::vector<std::string> names;
  for (const checkpoint::StateTensor& tensor : state_.table().tensors())
    if (tensor.name.starts_with(kModelPrefix)) names.push_back(tensor.name.substr(kModelPrefix.size()));
  return names;
}

std::optional<SafetensorsEntry> StateWeights::find(const std::string& name) const {
  const auto position = state_.table().find(std::string(kModelPrefix) + name);
  if (!position) return std::nullopt;
  const checkpoint::StateTensor& tensor = state_.table().tensors()[*position];
  return SafetensorsEntry{name, tensor.dtype, tensor.shape};
}

void StateWeights::read(const std::string& name, const Box& box, const at::Tensor& target) const {
  state_.read(std::string(kModelPrefix) + name, box, target);
}

}  // namespace titan::detail

namespace titan {
namespace {

using detail::WeightSource;

constexpr int64_t kPieceBytes = 16 << 20;

// Rows are woven within a head: pieces are whole heads.
std::vector<Box> pieces_of(const SafetensorsEntry& source, int64_t rotary_head_dim) {
  const auto element_size = static_cast<int64_t>(c10::elementSize(source.dtype));
  if (rotary_head_dim == 0) return checkpoint::slabs_of(source.shape, element_size, kPieceBytes);
  const int64_t rows = source.shape.at(0), num_heads = rows / rotary_head_dim;
  TITAN_CHECK(rows % rotary_head_dim == 0, "tensor '", source.name, "': its ", rows, " rows aren't heads of ",
              rotary_head_dim);
  const int64_t num_bytes = c10::multiply_integers(source.shape) * element_size;
  std::vector<Box> pieces;
  for (const Box& heads :
       checkpoint::slabs_of({num_heads}, num_bytes / std::max<int64_t>(1, num_heads), kPieceBytes)) {
    Box piece{std::vector<int64_t>(source.shape.size(), 0), source.shape};
    piece.offset[0] = heads.offset[0] * rotary_head_dim;
    piece.length[0] = heads.length[0] * rotary_head_dim;
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

// The front of a buffer, which grows where it is too small.
at::Tensor part_of(at::Tensor& buffer, const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  const int64_t num_bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  if (buffer.numel() < num_bytes) buffer = at::empty({num_bytes}, at::kByte);
  return buffer.narrow(0, 0, num_bytes).view(dtype).view(sizes);
}

/// Reads pieces of the sources in turn, into the same memory, and counts what was handed on.
class Pieces {
 public:
  /// `total_bytes`: of all that is written.
  Pieces(const WeightSource& source, int64_t total_bytes, RowOrder to, const ConvertOptions& options)
      : source_(source), to_(to), options_(options), total_(total_bytes) {}

  /// The source's tensor `name`, in the order and dtype in which it is written.
  void hand_on(const std::string& name, at::ScalarType dtype, int64_t rotary_head_dim,
               const AppendTensor& append) {
    const SafetensorsEntry entry = source_.find(name).value();
    for (const Box& box : pieces_of(entry, rotary_head_dim)) {
      at::Tensor piece = part_of(read_, box.length, entry.dtype);
      source_.read(name, box, piece);
      if (rotary_head_dim != 0 || dtype != entry.dtype) {
        const at::Tensor converted = part_of(converted_, box.length, dtype);
        reorder_rows(piece, rotary_head_dim, to_, converted);
        piece = converted;
      }
      append(piece);
      done_ += static_cast<int64_t>(piece.nbytes());
      options_.progress(done_, total_);
    }
  }

 private:
  const WeightSource& source_;
  RowOrder to_;
  const ConvertOptions& options_;
  // Bytes of a piece, as it was read and as it is written.
  at::Tensor read_ = at::empty({0}, at::kByte), converted_ = at::empty({0}, at::kByte);
  int64_t done_ = 0, total_ = 0;
};

std::vector<std::string> differences(const WeightSource& source, const HfModel& model) {
  std::vector<std::string> problems;
  const std::string path = source.path();
  std::set<std::string> expected;
  for (const HfTensor& tensor : model.tensors) {
    expected.insert(tensor.name);
    const auto found = source.find(tensor.name);
    if (!found) {
      problems.push_back(titan::str(path, ": '", tensor.name, "' is missing"));
    } else if (found->shape != tensor.shape) {
      problems.push_back(titan::str(path, ": '", tensor.name, "' has shape ", at::IntArrayRef(found->shape),
                                    ", the model's has ", at::IntArrayRef(tensor.shape)));
    }
  }
  for (const std::string& name : source.names())
    if (!expected.count(name))
      problems.push_back(titan::str(path, ": '", name, "' is not a parameter of the model"));
  return problems;
}

/// What is written, in the order in which each tensor is aligned; `dtype_of`: of the source.
template <class DtypeOf>
std::vector<HfEntry> plan(const HfModel& model, const ConvertOptions& options, const DtypeOf& dtype_of) {
  std::vector<HfEntry> entries;
  for (const HfTensor& tensor : model.tensors)
    entries.push_back({&tensor, options.dtype ? *options.dtype : dtype_of(tensor)});
  std::stable_sort(entries.begin(), entries.end(), [](const HfEntry& a, const HfEntry& b) {
    return c10::elementSize(a.dtype) > c10::elementSize(b.dtype);
  });
  return entries;
}

int64_t total_bytes(const std::vector<HfEntry>& entries) {
  int64_t total = 0;
  for (const HfEntry& entry : entries) total += num_bytes(entry);
  return total;
}

int64_t total_bytes(const std::vector<SafetensorsEntry>& entries) {
  int64_t total = 0;
  for (const SafetensorsEntry& entry : entries)
    total += c10::multiply_integers(entry.shape) * static_cast<int64_t>(c10::elementSize(entry.dtype));
  return total;
}

// From our names.
void write_as_hf(const WeightSource& source, const std::filesystem::path& folder, const HfModel& model,
                 const ConvertOptions& options) {
  auto problems = differences(source, model);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  const std::vector<HfEntry> entries =
      plan(model, options, [&](const HfTensor& tensor) { return source.find(tensor.name)->dtype; });
  Pieces pieces(source, total_bytes(entries), RowOrder::HuggingFace, options);
  write_hf_folder(folder, model, entries, options.folder, [&](size_t index, const AppendTensor& append) {
    const HfTensor& tensor = *entries[index].tensor;
    pieces.hand_on(tensor.name, entries[index].dtype, tensor.rotary_head_dim, append);
  });
}

}  // namespace

void convert_from_hf(const std::filesystem::path& folder, const std::filesystem::path& file,
                     const HfModel& model, const ConvertOptions& options) {
  const HfFolder files(folder);
  auto problems = tensor_differences(files, model);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  const detail::FolderWeights source(files);
  std::vector<HfEntry> entries =
      plan(model, options, [&](const HfTensor& tensor) { return source.find(tensor.hf_name)->dtype; });
  // As sort_for_file: the file is the one that a run writes of these weights.
  std::sort(entries.begin(), entries.end(), [](const HfEntry& a, const HfEntry& b) {
    const auto sizes = std::pair(c10::elementSize(a.dtype), c10::elementSize(b.dtype));
    return sizes.first != sizes.second ? sizes.first > sizes.second : a.tensor->name < b.tensor->name;
  });
  std::vector<SafetensorsEntry> in_file;
  for (const HfEntry& entry : entries)
    in_file.push_back({entry.tensor->name, entry.dtype, entry.tensor->shape});
  Pieces pieces(source, total_bytes(entries), RowOrder::Ours, options);
  write_safetensors_in_parts(file, in_file, {}, [&](size_t index, const AppendTensor& append) {
    const HfTensor& tensor = *entries[index].tensor;
    pieces.hand_on(tensor.hf_name, entries[index].dtype, tensor.rotary_head_dim, append);
  });
}

void convert_to_hf(const std::filesystem::path& file, const std::filesystem::path& folder,
                   const HfModel& model, const ConvertOptions& options) {
  write_as_hf(detail::FileWeights(file), folder, model, options);
}

void convert_state(const checkpoint::SavedState& state, const std::filesystem::path& file,
                   const ConvertOptions& options) {
  const detail::StateWeights source(state);
  std::vector<SafetensorsEntry> entries;
  for (const std::string& name : source.names()) {
    entries.push_back(source.find(name).value());
    if (options.dtype) entries.back().dtype = *options.dtype;
  }
  if (entries.empty())
    throw ConfigError(
        titan::str(source.path(), ": has no model in it, whose tensors are called 'model.'..."));
  sort_for_file(entries);
  Pieces pieces(source, total_bytes(entries), RowOrder::Ours, options);
  write_safetensors_in_parts(file, entries, {}, [&](size_t index, const AppendTensor& append) {
    pieces.hand_on(entries[index].name, entries[index].dtype, /*rotary_head_dim=*/0, append);
  });
}

void convert_state_to_hf(const checkpoint::SavedState& state, const std::filesystem::path& folder,
                         const HfModel& model, const ConvertOptions& options) {
  write_as_hf(detail::StateWeights(state), folder, model, options);
}

}  // namespace titan
