#include "load_state.h"

#include <algorithm>
#include <numeric>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "run_tasks.h"
#include "titan/checkpoint/rank_file.h"
#include "titan/core/error.h"

namespace titan::checkpoint::detail {
namespace {

// What a thread reads at once: enough to keep a disk busy, little beside the tensors.
constexpr int64_t kReadBytes = int64_t{32} << 20;

std::string object_key(const std::string& name) { return name.substr(0, name.find('.')); }

std::string quoted_list(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += titan::str(text.empty() ? "'" : ", '", name, "'");
  return text.empty() ? "none" : text;
}

std::set<std::string> keys_in(const Manifest& manifest) {
  std::set<std::string> keys;
  for (const auto& [key, text] : manifest.texts) keys.insert(key);
  for (const StateTensor& tensor : manifest.table.tensors()) keys.insert(object_key(tensor.name));
  return keys;
}

// Rows of a local part.
struct Stretch {
  size_t tensor = 0;
  Box box;  // in the global tensor
  int64_t first_row = 0;
};

// Whole blocks of what this rank saved itself, so that none is read twice.
int64_t rows_at_once(const Box& box, int64_t item_bytes) {
  const int64_t rows = box.length[0];
  const int64_t row_bytes = std::max<int64_t>(1, box.numel() / std::max<int64_t>(1, rows) * item_bytes);
  const int64_t rows_of_blocks = kBlockBytes / std::gcd(kBlockBytes, row_bytes);
  const int64_t wanted = std::max<int64_t>(1, kReadBytes / row_bytes);
  return std::max(wanted / rows_of_blocks, int64_t{1}) * rows_of_blocks;
}

void add_stretches(const std::vector<NamedTensor>& tensors, const SavedState& saved, size_t index,
                   std::vector<Stretch>& stretches) {
  const Box& box = tensors[index].data.box;
  if (box.numel() == 0) return;
  const auto item_bytes = static_cast<int64_t>(c10::elementSize(saved.tensor(tensors[index].name).dtype));
  if (box.length.empty() || box.numel() * item_bytes <= kReadBytes) {
    stretches.push_back({index, box, 0});
    return;
  }
  const int64_t step = rows_at_once(box, item_bytes);
  for (int64_t row = 0; row < box.length[0]; row += step) {
    Stretch stretch{index, box, row};
    stretch.box.offset[0] += row;
    stretch.box.length[0] = std::min(step, box.length[0] - row);
    stretches.push_back(std::move(stretch));
  }
}

void read_stretch(const SavedState& saved, const NamedTensor& tensor, const Stretch& stretch) {
  at::NoGradGuard no_grad;
  at::Tensor target = tensor.data.local.detach();
  if (!stretch.box.length.empty()) target = target.narrow(0, stretch.first_row, stretch.box.length[0]);
  const at::ScalarType dtype = saved.tensor(tensor.name).dtype;
  if (target.is_cpu() && target.scalar_type() == dtype) {
    saved.read(tensor.name, stretch.box, target);
    return;
  }
  const at::Tensor bounce = at::empty(stretch.box.length, at::TensorOptions().dtype(dtype));
  saved.read(tensor.name, stretch.box, bounce);
  target.copy_(bounce);
}

std::string difference_of(const NamedTensor& tensor, const LoadOptions& options, const Manifest& manifest) {
  const auto position = manifest.table.find(tensor.name);
  if (!position) return titan::str("tensor '", tensor.name, "' isn't in the checkpoint");
  const StateTensor& saved = manifest.table.tensors()[*position];
  if (saved.shape != tensor.data.global_shape)
    return titan::str("tensor '", tensor.name, "' has shape ", shape_text(saved.shape),
                      " in the checkpoint, here it has ", shape_text(tensor.data.global_shape));
  const at::ScalarType dtype = tensor.data.local.scalar_type();
  if (saved.dtype == dtype || options.convert_dtypes) return "";
  return titan::str("tensor '", tensor.name, "' is ", saved.dtype, " in the checkpoint, here it is ", dtype,
                    " (converted only on request)");
}

}  // namespace

std::set<std::string> keys_to_load(const std::vector<std::string>& registered, const LoadOptions& options,
                                   const Manifest& manifest, std::vector<std::string>& problems) {
  const std::set<std::string> here(registered.begin(), registered.end()), saved = keys_in(manifest);
  std::set<std::string> keys = here;
  if (!options.only.empty()) {
    keys = {options.only.begin(), options.only.end()};
    for (const auto& key : options.only)
      if (!here.count(key))
        problems.push_back(titan::str("'", key, "' is to be loaded, but this run has no such object; it has ",
                                      quoted_list(registered)));
  }
  for (const auto& key : options.exclude) {
    if (!here.count(key) && !saved.count(key))
      problems.push_back(titan::str("'", key,
                                    "' is to be excluded, but neither this run nor the checkpoint "
                                    "has such an object; this run has ",
                                    quoted_list(registered)));
    keys.erase(key);
  }
  const auto is_optional = [&options](const std::string& key) {
    return std::count(options.optional.begin(), options.optional.end(), key) > 0;
  };
  for (const auto& key : keys)
    if (here.count(key) && !saved.count(key) && !is_optional(key))
      problems.push_back(titan::str("the checkpoint has no '", key, "'; it has ",
                                    quoted_list({saved.begin(), saved.end()})));
  const bool all_wanted = options.only.empty();
  for (const auto& key : saved) {
    const bool excluded = std::count(options.exclude.begin(), options.exclude.end(), key) > 0;
    if (all_wanted && !excluded && !here.count(key) && !is_optional(key))
      problems.push_back(titan::str("the checkpoint's '", key, "' is no object of this run, which has ",
                                    quoted_list(registered), " (exclude it to leave it)"));
  }
  // What is missing as a whole was told; its tensors one by one would say it again.
  std::erase_if(keys, [&](const std::string& key) { return !here.count(key) || !saved.count(key); });
  return keys;
}

std::vector<std::string> differences(const std::vector<NamedTensor>& tensors,
                                     const std::set<std::string>& names, const std::set<std::string>& keys,
                                     const LoadOptions& options, const Manifest& manifest) {
  std::vector<std::string> problems;
  for (const NamedTensor& tensor : tensors)
    if (const std::string problem = difference_of(tensor, options, manifest); !problem.empty())
      problems.push_back(problem);
  for (const StateTensor& tensor : manifest.table.tensors())
    if (keys.count(object_key(tensor.name)) && !names.count(tensor.name))
      problems.push_back(titan::str("the checkpoint's tensor '", tensor.name, "' isn't one of this run's"));
  return problems;
}

std::set<int64_t> ranks_read(const StateTable& table, const std::vector<NamedTensor>& tensors) {
  std::set<int64_t> ranks;
  for (const NamedTensor& tensor : tensors) {
    const auto position = table.find(tensor.name);
    if (!position || tensor.data.box.numel() == 0) continue;
    for (const Source& source : table.sources_of(*position, tensor.data.box)) ranks.insert(source.rank);
  }
  return ranks;
}

void read_tensors(const SavedState& saved, const std::vector<NamedTensor>& tensors, int num_threads) {
  std::vector<Stretch> stretches;
  for (size_t i = 0; i < tensors.size(); ++i) add_stretches(tensors, saved, i, stretches);
  run_tasks(num_threads, stretches.size(),
            [&](size_t index) { read_stretch(saved, tensors[stretches[index].tensor], stretches[index]); });
}

}  // namespace titan::checkpoint::detail
