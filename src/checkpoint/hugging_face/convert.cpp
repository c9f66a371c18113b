// Converting weights between a saved state, one safetensors file and a Hugging Face folder, without a job.

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string_view>

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include "checkpoint/hugging_face/model_folder.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/core/error.h"

namespace titan {
namespace {

constexpr int64_t kPieceBytes = 16 << 20;
// A state's tensors with this prefix are the model's parameters.
constexpr std::string_view kModelPrefix = "model.";

// ---- where weights come from

struct WeightSource {
  std::string path;                // for messages
  std::vector<std::string> names;  // in the source's order
  std::map<std::string, SafetensorsEntry> tensors = {};
  // Fills a tensor, contiguous and of the source's dtype, with the elements in the box; keeps no memory.
  std::function<void(const std::string& name, const Box& box, const at::Tensor& target)> read = {};
};

// Files are memory-mapped: their pages are dropped after each read.
void read_and_drop(const SafetensorsFile& file, const std::string& name, const Box& box,
                   const at::Tensor& target) {
  file.read_slice(name, box, target);
  file.drop_pages();
}

WeightSource weights_of(const SafetensorsFile& file) {
  WeightSource source{.path = file.path().string(), .names = file.names()};
  for (const std::string& name : file.names())
    source.tensors[name] = {name, file.info(name).dtype, file.info(name).shape};
  source.read = [file](const std::string& name, const Box& box, const at::Tensor& target) {
    read_and_drop(file, name, box, target);
  };
  return source;
}

// The shards of a Hugging Face folder, under its names.
WeightSource weights_of(const HfFolder& folder) {
  WeightSource source{.path = folder.path().string(), .names = folder.names()};
  for (const std::string& name : folder.names()) {
    const SafetensorsInfo& info = folder.file_of(name).info(name);
    source.tensors[name] = {name, info.dtype, info.shape};
  }
  source.read = [folder](const std::string& name, const Box& box, const at::Tensor& target) {
    read_and_drop(folder.file_of(name), name, box, target);
  };
  return source;
}

// A saved state's tensors "model.NAME", as NAME.
WeightSource weights_of(const checkpoint::SavedState& state) {
  WeightSource source{.path = state.folder().string(), .names = {}};
  for (const checkpoint::StateTensor& tensor : state.table().tensors()) {
    if (!tensor.name.starts_with(kModelPrefix)) continue;
    const std::string name = tensor.name.substr(kModelPrefix.size());
    source.names.push_back(name);
    source.tensors[name] = {name, tensor.dtype, tensor.shape};
  }
  source.read = [state](const std::string& name, const Box& box, const at::Tensor& target) {
    state.read(std::string(kModelPrefix) + name, box, target);
  };
  return source;
}

// ---- a piece at a time

// A tensor at the front of `buffer`, which grows if it is too small.
at::Tensor part_of(at::Tensor& buffer, const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  const int64_t num_bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  if (buffer.numel() < num_bytes) buffer = at::empty({num_bytes}, at::kByte);
  return buffer.narrow(0, 0, num_bytes).view(dtype).view(sizes);
}

// Reads pieces of the source in turn, into the same memory, converts them, and reports progress.
class Converter {
 public:
  // `total_bytes`: the size of everything that is written.
  Converter(const WeightSource& source, int64_t total_bytes, RowOrder to, const ConvertOptions& options)
      : source_(source), to_(to), options_(options), total_(total_bytes) {}

  // Appends the source's tensor `name`, in the order and dtype in which it is written.
  void append(const std::string& name, at::ScalarType dtype, int64_t rotary_head_dim,
              const AppendTensor& append) {
    const SafetensorsEntry& entry = source_.tensors.at(name);
    for (const Box& box : detail::pieces_of(entry, rotary_head_dim, kPieceBytes)) {
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

// ---- writing

std::vector<std::string> differences(const WeightSource& source, const HfModel& model) {
  std::vector<std::string> problems;
  const std::string& path = source.path;
  std::set<std::string> expected;
  for (const HfTensor& tensor : model.tensors) {
    expected.insert(tensor.name);
    const auto found = source.tensors.find(tensor.name);
    if (found == source.tensors.end())
      problems.push_back(titan::str(path, ": '", tensor.name, "' is missing"));
    else if (const auto& shape = found->second.shape; shape != tensor.shape)
      problems.push_back(titan::str(path, ": '", tensor.name, "' has shape ", at::IntArrayRef(shape),
                                    ", the model's has ", at::IntArrayRef(tensor.shape)));
  }
  for (const std::string& name : source.names)
    if (!expected.count(name))
      problems.push_back(titan::str(path, ": '", name, "' is not a parameter of the model"));
  return problems;
}

int64_t total_bytes(const auto& entries) {
  int64_t total = 0;
  for (const auto& entry : entries) total += num_bytes(entry);
  return total;
}

// The source has our names.
void write_as_hf(const WeightSource& source, const std::filesystem::path& folder, const HfModel& model,
                 const ConvertOptions& options) {
  auto problems = differences(source, model);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  std::vector<HfEntry> entries;
  for (const HfTensor& tensor : model.tensors)
    entries.push_back({&tensor, options.dtype.value_or(source.tensors.at(tensor.name).dtype)});
  // In this order each tensor is aligned.
  std::ranges::stable_sort(entries, std::greater(),
                           [](const HfEntry& entry) { return c10::elementSize(entry.dtype); });
  Converter converter(source, total_bytes(entries), RowOrder::HuggingFace, options);
  write_hf_folder(folder, model, entries, options.folder, [&](size_t index, const AppendTensor& append) {
    const HfTensor& tensor = *entries[index].tensor;
    converter.append(tensor.name, entries[index].dtype, tensor.rotary_head_dim, append);
  });
}

// `hf_name` is the source's name of a tensor.
void write_as_file(const WeightSource& source, const std::filesystem::path& file,
                   const std::vector<HfTensor>& tensors, const ConvertOptions& options) {
  std::map<std::string, const HfTensor*> by_name;
  std::vector<SafetensorsEntry> entries;
  for (const HfTensor& tensor : tensors) {
    by_name.emplace(tensor.name, &tensor);
    entries.push_back(
        {tensor.name, options.dtype.value_or(source.tensors.at(tensor.hf_name).dtype), tensor.shape});
  }
  sort_for_file(entries);
  Converter converter(source, total_bytes(entries), RowOrder::Ours, options);
  write_safetensors_in_parts(file, entries, {}, [&](size_t index, const AppendTensor& append) {
    const HfTensor& tensor = *by_name.at(entries[index].name);
    converter.append(tensor.hf_name, entries[index].dtype, tensor.rotary_head_dim, append);
  });
}

}  // namespace

void convert_from_hf(const std::filesystem::path& folder, const std::filesystem::path& file,
                     const HfModel& model, const ConvertOptions& options) {
  const HfFolder files(folder);
  auto problems = tensor_differences(files, model);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  write_as_file(weights_of(files), file, model.tensors, options);
}

void convert_to_hf(const std::filesystem::path& file, const std::filesystem::path& folder,
                   const HfModel& model, const ConvertOptions& options) {
  const bool is_folder = std::filesystem::is_directory(file);
  write_as_hf(is_folder ? weights_of(HfFolder(file)) : weights_of(SafetensorsFile(file)), folder, model,
              options);
}

void convert_state(const checkpoint::SavedState& state, const std::filesystem::path& file,
                   const ConvertOptions& options) {
  const WeightSource source = weights_of(state);
  std::vector<HfTensor> tensors;
  for (const auto& [name, entry] : source.tensors)
    tensors.push_back({.name = name, .hf_name = name, .shape = entry.shape});
  if (tensors.empty())
    throw ConfigError(titan::str(source.path, ": has no model: no tensor's name begins with 'model.'"));
  write_as_file(source, file, tensors, options);
}

void convert_state_to_hf(const checkpoint::SavedState& state, const std::filesystem::path& folder,
                         const HfModel& model, const ConvertOptions& options) {
  write_as_hf(weights_of(state), folder, model, options);
}

}  // namespace titan
