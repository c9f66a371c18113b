// Loading: every rank reads the manifest and reports what prevents it from loading; when nothing does, each
// rank reads its parts.

#include <algorithm>
#include <chrono>
#include <numeric>
#include <set>
#include <sstream>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include "checkpoint/format/rank_file.h"
#include "checkpoint/save/checkpointer_impl.h"
#include "core/threads.h"
#include "core/units.h"
#include "dist/stream.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::checkpoint {

using detail::agree;
using detail::Answer;
using detail::difference_of;
using detail::NamedTensor;
using detail::problem_of;
using detail::throw_if;
using detail::Verdict;

std::string detail::difference_of(const NamedTensor& tensor, const LoadOptions& options,
                                  const Manifest& manifest) {
  const auto position = manifest.table.find(tensor.name);
  if (!position) return titan::str("tensor '", tensor.name, "' isn't in the checkpoint");
  const StateTensor& saved = manifest.table.tensors()[*position];
  if (saved.shape != tensor.data.global_shape)
    return titan::str("tensor '", tensor.name, "' has shape ", at::IntArrayRef(saved.shape),
                      " in the checkpoint, but here it has ", at::IntArrayRef(tensor.data.global_shape));
  const at::ScalarType dtype = tensor.data.local.scalar_type();
  if (saved.dtype == dtype || options.convert_dtypes) return "";
  return titan::str("tensor '", tensor.name, "' is ", saved.dtype, " in the checkpoint, but here it is ",
                    dtype, " (converted only on request)");
}

namespace {

constexpr dist::Label kLoadLabel{.phase = "checkpoint::load"};
// Bytes that a thread reads at once: enough to keep a disk busy, little compared with the tensors.
constexpr int64_t kReadBytes = int64_t{32} << 20;
// Limit for each rank: with a wrong model, every tensor is a problem.
constexpr size_t kShownProblems = 100;

// ---- comparing what is to be loaded with the checkpoint

std::string object_key(const std::string& name) { return name.substr(0, name.find('.')); }

std::string quoted_list(const std::vector<std::string>& names) {
  return names.empty() ? "none" : titan::str("'", c10::Join("', '", names), "'");
}

std::set<std::string> keys_in(const Manifest& manifest) {
  std::set<std::string> keys;
  for (const auto& [key, text] : manifest.texts) keys.insert(key);
  for (const StateTensor& tensor : manifest.table.tensors()) keys.insert(object_key(tensor.name));
  return keys;
}

// The keys of the objects to load. Adds a line to `problems` for each problem with the options.
std::set<std::string> keys_to_load(const std::vector<std::string>& registered, const LoadOptions& options,
                                   const Manifest& manifest, std::vector<std::string>& problems) {
  const std::set<std::string> here(registered.begin(), registered.end()), saved = keys_in(manifest);
  const auto contains = [](const std::vector<std::string>& list, const std::string& key) {
    return std::find(list.begin(), list.end(), key) != list.end();
  };
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
      problems.push_back(titan::str(
          "'", key, "' is to be excluded, but neither this run nor the checkpoint has such an object; ",
          "this run has ", quoted_list(registered)));
    keys.erase(key);
  }
  for (const auto& key : keys)
    if (here.count(key) && !saved.count(key) && !contains(options.optional, key))
      problems.push_back(titan::str("the checkpoint has no '", key, "'; it has ",
                                    quoted_list({saved.begin(), saved.end()})));
  for (const auto& key : saved)
    if (options.only.empty() && !contains(options.exclude, key) && !here.count(key) &&
        !contains(options.optional, key))
      problems.push_back(titan::str("the checkpoint's '", key, "' isn't an object of this run, which has ",
                                    quoted_list(registered), " (exclude it to ignore it)"));
  // A missing object has been reported; reporting each of its tensors would repeat that.
  std::erase_if(keys, [&](const std::string& key) { return !here.count(key) || !saved.count(key); });
  return keys;
}

// The ranks whose files hold parts of these tensors' local parts.
std::set<int64_t> ranks_read(const StateTable& table, const std::vector<NamedTensor>& tensors) {
  std::set<int64_t> ranks;
  for (const NamedTensor& tensor : tensors) {
    const auto position = table.find(tensor.name);
    if (!position || tensor.data.box.numel() == 0) continue;
    for (const Source& source : table.sources_of(*position, tensor.data.box)) ranks.insert(source.rank);
  }
  return ranks;
}

// ---- reading

// Rows of a local part.
struct Stretch {
  size_t tensor = 0;
  Box box;  // in the global tensor
  int64_t first_row = 0;
};

// Covers whole blocks of the pieces that this rank saved itself, so that none is read twice.
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

// Reads each tensor's local part, with several threads: a tensor in host memory with the saved dtype in
// place, any other through a small buffer. Throws Error.
void read_tensors(const SavedState& saved, const std::vector<NamedTensor>& tensors, int num_threads) {
  std::vector<Stretch> stretches;
  for (size_t i = 0; i < tensors.size(); ++i) add_stretches(tensors, saved, i, stretches);
  // The threads' copies follow what this thread has queued.
  dist::Stream current;
  for (const NamedTensor& tensor : tensors)
    if (!tensor.data.local.is_cpu()) current = dist::Stream::current(tensor.data.local.device());
  run_tasks(num_threads, stretches.size(), [&](size_t index) {
    const dist::StreamGuard on_current(current);
    read_stretch(saved, tensors[stretches[index].tensor], stretches[index]);
  });
}

// ---- lines of problems

std::string joined_lines(std::vector<std::string> lines) {
  const size_t num_lines = lines.size();
  lines.resize(std::min(num_lines, kShownProblems));
  if (num_lines > kShownProblems) lines.push_back(titan::str("and ", num_lines - kShownProblems, " more"));
  return c10::Join("\n", lines);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// Each line once, in the order of the ranks.
Verdict merged_lines(const detail::RankTree& tree, const std::vector<Answer>& answers) {
  std::set<std::string> known;
  std::vector<std::string> lines;
  for (const Answer& answer : answers) {
    if (answer.lost) return {titan::str(tree.name_of(answer.rank), " ", answer.text), true};
    for (const std::string& line : lines_of(answer.text))
      if (known.insert(line).second) lines.push_back(line);
  }
  return {joined_lines(lines), false};
}

}  // namespace

void Checkpointer::Impl::check_problems(const std::filesystem::path& folder,
                                        const std::vector<std::string>& problems) {
  const auto answers = control_->gather(joined_lines(problems));
  const Verdict verdict = control_->spread(world.rank() == 0 ? merged_lines(*control_, answers) : Verdict{});
  if (verdict.lost) throw Error(verdict.text);
  std::vector<std::string> lines = lines_of(verdict.text);
  for (std::string& line : lines) line = titan::str(folder.string(), ": ", line);
  if (!lines.empty()) throw ConfigError(std::move(lines));
}

std::vector<NamedTensor> Checkpointer::Impl::tensors_to_load(const std::filesystem::path& folder,
                                                             const LoadOptions& load_options,
                                                             const Manifest& manifest,
                                                             std::set<std::string>& keys) {
  std::vector<std::string> registered, problems;
  for (const auto& [key, object] : objects) registered.push_back(key);
  keys = keys_to_load(registered, load_options, manifest, problems);
  std::vector<NamedTensor> tensors;
  throw_if(agree(*control_, problem_of([&] { tensors = detail::tensors_of(states(&keys)); })));
  std::vector<std::string> own;
  for (const NamedTensor& tensor : tensors) own.push_back(tensor.name);
  const auto names = detail::names_of_stages(own, pipeline, kLoadLabel);
  for (const NamedTensor& tensor : tensors)
    if (std::string problem = difference_of(tensor, load_options, manifest); !problem.empty())
      problems.push_back(std::move(problem));
  for (const StateTensor& tensor : manifest.table.tensors())
    if (keys.count(object_key(tensor.name)) && !names.count(tensor.name))
      problems.push_back(titan::str("the checkpoint's tensor '", tensor.name, "' isn't one of this run's"));
  for (const std::string& key : keys) {
    const auto text = manifest.texts.find(key);
    if (text == manifest.texts.end()) continue;
    if (std::string problem = problem_of([&] { objects.at(key)->check(text->second); }); !problem.empty())
      problems.push_back(std::move(problem));
  }
  check_problems(folder, problems);
  return tensors;
}

Loaded Checkpointer::Impl::load(const std::filesystem::path& folder, const LoadOptions& load_options) {
  const auto start = std::chrono::steady_clock::now();
  throw_if(agree(*control_, wait_for_last()));
  std::optional<SavedState> saved;
  throw_if(agree(*control_, problem_of([&] { saved.emplace(folder); })));
  const auto answers = control_->gather(digest_of(to_text(saved->manifest())));
  throw_if(control_->spread(unequal(*control_, answers, "reads a different manifest than")));
  Loaded loaded{.manifest = saved->manifest()};
  std::set<std::string> keys;
  const auto tensors = tensors_to_load(folder, load_options, loaded.manifest, keys);
  if (load_options.bring_files)
    load_options.bring_files(loaded.manifest, ranks_read(saved->table(), tensors));
  const auto agree_halfway = [&](const std::string& problem) {
    const Verdict verdict = agree(*control_, problem);
    if (!verdict.text.empty())
      throw Error(titan::str("loading ", folder.string(),
                             " failed halfway, with only part of the state loaded: ", verdict.text));
  };
  agree_halfway(problem_of([&] { read_tensors(*saved, tensors, options.num_threads); }));
  agree_halfway(problem_of([&] {
    for (const std::string& key : keys) objects.at(key)->loaded(loaded.manifest.texts[key]);
  }));
  loaded.num_bytes_read = saved->bytes_read();
  loaded.seconds = seconds_since(start);
  log::debug(
      titan::str("loaded ", folder.string(), " (step ", loaded.manifest.step, ") in ", loaded.seconds, " s"));
  return loaded;
}

}  // namespace titan::checkpoint
