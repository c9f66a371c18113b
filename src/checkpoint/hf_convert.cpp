#include <algorithm>

#include <c10/util/accumulate.h>

#include "titan/checkpoint/hf_model.h"
#include "titan/core/error.h"

namespace titan {
namespace {

constexpr int64_t kPieceBytes = 32 << 20;

/// Reads pieces of the sources in turn, and counts what was handed on.
class Pieces {
 public:
  Pieces(const std::vector<HfEntry>& entries, RowOrder to, const ConvertOptions& options)
      : to_(to), options_(options) {
    for (const HfEntry& entry : entries) total_ += num_bytes(entry);
  }

  void hand_on(const SafetensorsFile& file, const std::string& name, const HfEntry& entry,
               const AppendTensor& append) {
    const std::vector<int64_t>& shape = entry.tensor->shape;
    const int64_t row_bytes = std::max<int64_t>(1, num_bytes(entry) / std::max<int64_t>(1, shape[0]));
    const int64_t rows = std::max<int64_t>(1, kPieceBytes / row_bytes);
    for (int64_t row = 0; row < shape[0]; row += rows) {
      Box box{std::vector<int64_t>(shape.size(), 0), shape};
      box.offset[0] = row;
      box.length[0] = std::min(rows, shape[0] - row);
      const at::Tensor piece =
          read_reordered(file, name, box, entry.tensor->rotary_head_dim, to_).to(entry.dtype);
      append(piece);
      file.drop_pages();
      done_ += static_cast<int64_t>(piece.nbytes());
      options_.progress(done_, total_);
    }
  }

 private:
  RowOrder to_;
  const ConvertOptions& options_;
  int64_t done_ = 0, total_ = 0;
};

std::vector<std::string> differences(const SafetensorsFile& file, const HfModel& model) {
  std::vector<std::string> problems;
  const std::string path = file.path().string();
  std::vector<std::string> expected;
  for (const HfTensor& tensor : model.tensors) {
    expected.push_back(tensor.name);
    if (!file.contains(tensor.name)) {
      problems.push_back(titan::str(path, ": '", tensor.name, "' is missing"));
    } else if (file.info(tensor.name).shape != tensor.shape) {
      problems.push_back(titan::str(path, ": '", tensor.name, "' has shape ",
                                    at::IntArrayRef(file.info(tensor.name).shape), ", the model's has ",
                                    at::IntArrayRef(tensor.shape)));
    }
  }
  std::sort(expected.begin(), expected.end());
  for (const std::string& name : file.names())
    if (!std::binary_search(expected.begin(), expected.end(), name))
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

}  // namespace

void convert_from_hf(const std::filesystem::path& folder, const std::filesystem::path& file,
                     const HfModel& model, const ConvertOptions& options) {
  const HfFolder source(folder);
  auto problems = tensor_differences(source, model);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  const auto dtype_of = [&](const HfTensor& tensor) {
    return source.file_of(tensor.hf_name).info(tensor.hf_name).dtype;
  };
  const std::vector<HfEntry> entries = plan(model, options, dtype_of);
  std::vector<SafetensorsEntry> in_file;
  for (const HfEntry& entry : entries)
    in_file.push_back({entry.tensor->name, entry.dtype, entry.tensor->shape});
  Pieces pieces(entries, RowOrder::Ours, options);
  write_safetensors_in_parts(file, in_file, {}, [&](size_t index, const AppendTensor& append) {
    const std::string& name = entries[index].tensor->hf_name;
    pieces.hand_on(source.file_of(name), name, entries[index], append);
  });
}

void convert_to_hf(const std::filesystem::path& file, const std::filesystem::path& folder,
                   const HfModel& model, const ConvertOptions& options) {
  const SafetensorsFile source(file);
  auto problems = differences(source, model);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  const std::vector<HfEntry> entries =
      plan(model, options, [&](const HfTensor& tensor) { return source.info(tensor.name).dtype; });
  Pieces pieces(entries, RowOrder::HuggingFace, options);
  write_hf_folder(folder, model, entries, options.folder, [&](size_t index, const AppendTensor& append) {
    pieces.hand_on(source, entries[index].tensor->name, entries[index], append);
  });
}

}  // namespace titan
