// Converting weights between a saved state, one safetensors file and a Hugging Face folder, without a job.

#include <algorithm>
#include <set>
#include <string_view>

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include "titan/checkpoint/hugging_face.h"
#include "titan/core/error.h"

namespace titan {
namespace {

constexpr int64_t kPieceBytes = 16 << 20;
// A state's tensors with this prefix are the model's parameters.
constexpr std::string_view kModelPrefix = "model.";

// ---- where weights come from

class WeightSource {
 public:
  virtual ~WeightSource() = default;
  // For messages.
  virtual std::string path() const = 0;
  virtual std::vector<std::string> names() const = 0;
  // Dtype and shape; nullopt: it has no such tensor.
  virtual std::optional<SafetensorsEntry> find(const std::string& name) const = 0;
  // Fills `target`, contiguous and of the source's dtype, with the elements in `box`; keeps no memory.
  virtual void read(const std::string& name, const Box& box, const at::Tensor& target) const = 0;
};

// Files are memory-mapped: their pages are dropped after each read.
class FileWeights : public WeightSource {
 public:
  explicit FileWeights(const std::filesystem::path& file) : file_(file) {}
  std::string path() const override { return file_.path().string(); }
  std::vector<std::string> names() const override { return file_.names(); }
  std::optional<SafetensorsEntry> find(const std::string& name) const override {
    if (!file_.contains(name)) return std::nullopt;
    return SafetensorsEntry{name, file_.info(name).dtype, file_.info(name).shape};
  }
  void read(const std::string& name, const Box& box, const at::Tensor& target) const override {
    file_.read_slice(name, box, target);
    file_.drop_pages();
  }

 private:
  SafetensorsFile file_;
};

// The shards of a Hugging Face folder, under its names. The folder outlives it.
class FolderWeights : public WeightSource {
 public:
  explicit FolderWeights(const HfFolder& folder) : folder_(folder) {}
  std::string path() const override { return folder_.path().string(); }
  std::vector<std::string> names() const override { return folder_.names(); }
  std::optional<SafetensorsEntry> find(const std::string& name) const override {
    if (!folder_.contains(name)) return std::nullopt;
    const SafetensorsInfo& info = folder_.file_of(name).info(name);
    return SafetensorsEntry{name, info.dtype, info.shape};
  }
  void read(const std::string& name, const Box& box, const at::Tensor& target) const override {
    folder_.file_of(name).read_slice(name, box, target);
    folder_.file_of(name).drop_pages();
  }

 private:
  const HfFolder& folder_;
};

// A saved state's tensors "model.NAME", as NAME.
class StateWeights : public WeightSource {
 public:
  explicit StateWeights(checkpoint::SavedState state) : state_(std::move(state)) {}
  std::string path() const override { return state_.folder().string(); }
  std::vector<std::string> names() const override {
    std::vector<std::string> names;
    for (const checkpoint::StateTensor& tensor : state_.table().tensors())
      if (tensor.name.starts_with(kModelPrefix)) names.push_back(tensor.name.substr(kModelPrefix.size()));
    return names;
  }
  std::optional<SafetensorsEntry> find(const std::string& name) const override {
    const auto position = state_.table().find(std::string(kModelPrefix) + name);
    if (!position) return std::nullopt;
    const checkpoint::StateTensor& tensor = state_.table().tensors()[*position];
    return SafetensorsEntry{name, tensor.dtype, tensor.shape};
  }
  void read(const std::string& name, const Box& box, const at::Tensor& target) const override {
    state_.read(std::string(kModelPrefix) + name, box, target);
  }

 private:
  checkpoint::SavedState state_;
};

// ---- a piece at a time

// Rows are reordered within a head, so pieces are whole heads.
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

// Reads pieces of the source in turn, into the same memory, converts them, and reports progress.
class Converter {
 public:
  // `total_bytes`: of everything that is written.
  Converter(const WeightSource& source, int64_t total_bytes, RowOrder to, const ConvertOptions& options)
      : source_(source), to_(to), options_(options), total_(total_bytes) {}

  // Appends the source's tensor `name`, in the order and dtype in which it is written.
  void append(const std::string& name, at::ScalarType dtype, int64_t rotary_head_dim,
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
  // Bytes of a piece, as read and as written.
  at::Tensor read_ = at::empty({0}, at::kByte), converted_ = at::empty({0}, at::kByte);
  int64_t done_ = 0, total_ = 0;
};

// ---- what is written

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
  std::vector<HfEntry> entries;
  int64_t total = 0;
  for (const HfTensor& tensor : model.tensors) {
    entries.push_back({&tensor, options.dtype.value_or(source.find(tensor.name)->dtype)});
    total += num_bytes(entries.back());
  }
  // Each tensor is aligned in this order.
  std::stable_sort(entries.begin(), entries.end(), [](const HfEntry& a, const HfEntry& b) {
    return c10::elementSize(a.dtype) > c10::elementSize(b.dtype);
  });
  Converter converter(source, total, RowOrder::HuggingFace, options);
  write_hf_folder(folder, model, entries, options.folder, [&](size_t index, const AppendTensor& append) {
    const HfTensor& tensor = *entries[index].tensor;
    converter.append(tensor.name, entries[index].dtype, tensor.rotary_head_dim, append);
  });
}

}  // namespace

void convert_from_hf(const std::filesystem::path& folder, const std::filesystem::path& file,
                     const HfModel& model, const ConvertOptions& options) {
  const HfFolder files(folder);
  auto problems = tensor_differences(files, model);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  const FolderWeights source(files);
  std::map<std::string, const HfTensor*> tensors;
  std::vector<SafetensorsEntry> entries;
  for (const HfTensor& tensor : model.tensors) {
    tensors.emplace(tensor.name, &tensor);
    entries.push_back(
        {tensor.name, options.dtype.value_or(source.find(tensor.hf_name)->dtype), tensor.shape});
  }
  sort_for_file(entries);
  Converter converter(source, total_bytes(entries), RowOrder::Ours, options);
  write_safetensors_in_parts(file, entries, {}, [&](size_t index, const AppendTensor& append) {
    const HfTensor& tensor = *tensors.at(entries[index].name);
    converter.append(tensor.hf_name, entries[index].dtype, tensor.rotary_head_dim, append);
  });
}

void convert_to_hf(const std::filesystem::path& file, const std::filesystem::path& folder,
                   const HfModel& model, const ConvertOptions& options) {
  write_as_hf(FileWeights(file), folder, model, options);
}

void convert_state(const checkpoint::SavedState& state, const std::filesystem::path& file,
                   const ConvertOptions& options) {
  const StateWeights source(state);
  std::vector<SafetensorsEntry> entries;
  for (const std::string& name : source.names()) {
    entries.push_back(source.find(name).value());
    if (options.dtype) entries.back().dtype = *options.dtype;
  }
  if (entries.empty())
    throw ConfigError(titan::str(source.path(), ": has no model: no tensor's name begins with 'model.'"));
  sort_for_file(entries);
  Converter converter(source, total_bytes(entries), RowOrder::Ours, options);
  write_safetensors_in_parts(file, entries, {}, [&](size_t index, const AppendTensor& append) {
    converter.append(entries[index].name, entries[index].dtype, /*rotary_head_dim=*/0, append);
  });
}

void convert_state_to_hf(const checkpoint::SavedState& state, const std::filesystem::path& folder,
                         const HfModel& model, const ConvertOptions& options) {
  write_as_hf(StateWeights(state), folder, model, options);
}

}  // namespace titan
