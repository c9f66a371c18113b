// titan checkpoint info and diff: shows what a checkpoint holds, and what differs between two checkpoints,
// whatever meshes they were saved on. Tensors are read slab by slab, so that none is in memory as a whole.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>
#include <nlohmann/json.hpp>

#include "cli/checkpoint/commands.h"
#include "cli/parser.h"
#include "cli/text.h"
#include "core/json.h"
#include "tensor/memory.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/config/load.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

namespace fs = std::filesystem;
using namespace checkpoint;
using nlohmann::json;
using nlohmann::ordered_json;

/// Bytes of a tensor that are in memory at a time.
constexpr int64_t kSlabBytes = 16 << 20;

/// The elements in `box`, contiguous.
at::Tensor read_slab(const checkpoint::SavedState& state, const std::string& name, const Box& box) {
  at::Tensor slab = at::empty(box.length, at::dtype(state.tensor(name).dtype));
  state.read(name, box, slab);
  return slab;
}

double sum_of_squares(const at::Tensor& values) { return values.dot(values).item<double>(); }

at::Tensor differing(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() == b.scalar_type()) return bits_of(a).ne(bits_of(b));
  const at::Tensor x = a.to(at::kDouble), y = b.to(at::kDouble);
  return x.ne(y).logical_and_(x.isnan().logical_and_(y.isnan()).logical_not_()).flatten();
}

std::vector<int64_t> index_in(const Box& box, int64_t position) {
  std::vector<int64_t> index(box.length.size());
  for (size_t dim = index.size(); dim-- > 0;) {
    index[dim] = box.offset[dim] + position % box.length[dim];
    position /= box.length[dim];
  }
  return index;
}

/// Statistics of the finite elements, added up slab by slab in doubles. Without finite elements: NaN, and
/// norm 0.
struct TensorStats {
  int64_t num_elements = 0;
  int64_t num_not_finite = 0;
  double mean = std::numeric_limits<double>::quiet_NaN();
  double min = std::numeric_limits<double>::quiet_NaN();
  double max = std::numeric_limits<double>::quiet_NaN();
  double norm = 0;
  double std() const {
    const int64_t count = num_elements - num_not_finite;
    return count > 0 ? std::sqrt(squares_about_mean_ / static_cast<double>(count)) : mean;
  }

  void add(const at::Tensor& slab) {
    at::Tensor values = slab.flatten().to(at::kDouble);
    const at::Tensor finite = values.isfinite();
    const int64_t count = finite.sum().item<int64_t>(), before = num_elements - num_not_finite;
    num_elements += values.numel();
    num_not_finite += values.numel() - count;
    if (count == 0) return;
    if (count < values.numel()) values = values.masked_select(finite);
    // Merges the means and the squares about them of two parts (Chan, Golub, LeVeque 1983).
    const double slab_mean = values.mean().item<double>(), all = static_cast<double>(before + count);
    const double distance = before == 0 ? 0 : slab_mean - mean;
    squares_about_mean_ += sum_of_squares(values - slab_mean) + distance * distance *
                                                                    static_cast<double>(before) *
                                                                    static_cast<double>(count) / all;
    mean = before == 0 ? slab_mean : mean + distance * static_cast<double>(count) / all;
    min = std::fmin(min, values.min().item<double>());
    max = std::fmax(max, values.max().item<double>());
    norm = std::hypot(norm, std::sqrt(sum_of_squares(values)));
  }

 private:
  double squares_about_mean_ = 0;
};

/// The difference a - b of two tensors of one shape, added up slab by slab in doubles.
struct TensorDifference {
  int64_t num_elements = 0;
  int64_t num_different = 0;         ///< compared by bits; for two dtypes by value, where NaN equals NaN
  std::vector<int64_t> first_index;  ///< index of the first different element
  double max_abs = 0;                ///< infinite if either element isn't finite
  double relative_norm() const {
    if (num_different == 0) return 0;
    return std::sqrt(squares_of_difference_) / std::sqrt(squares_of_a_);
  }

  /// `box`: the place of the slabs in the tensors.
  void add(const at::Tensor& a, const at::Tensor& b, const Box& box) {
    const at::Tensor x = a.flatten().to(at::kDouble);
    squares_of_a_ += sum_of_squares(x);
    num_elements += x.numel();
    const at::Tensor differs = differing(a, b);
    const int64_t count = differs.sum().item<int64_t>();
    if (count == 0) return;
    if (num_different == 0) first_index = index_in(box, differs.nonzero()[0].item<int64_t>());
    num_different += count;
    const at::Tensor difference = (x - b.flatten().to(at::kDouble)).masked_select(differs);
    squares_of_difference_ += sum_of_squares(difference);
    const double largest = difference.abs().max().item<double>();
    max_abs = std::isfinite(largest) ? std::max(max_abs, largest) : std::numeric_limits<double>::infinity();
  }

 private:
  double squares_of_difference_ = 0, squares_of_a_ = 0;
};

std::string dtype_text(at::ScalarType dtype) {
  static const std::map<at::ScalarType, const char*> names = {
      {at::kDouble, "float64"}, {at::kFloat, "float32"}, {at::kBFloat16, "bfloat16"},
      {at::kHalf, "float16"},   {at::kLong, "int64"},    {at::kInt, "int32"}};
  const auto name = names.find(dtype);
  return name == names.end() ? c10::toString(dtype) : name->second;
}

int64_t num_elements(const StateTensor& tensor) { return c10::multiply_integers(tensor.shape); }

int64_t num_bytes(const StateTensor& tensor) {
  return num_elements(tensor) * static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

// "dim 0 by fsdp 4, dim 1 by tp 2; only on pp 1; 2 copies"
std::string layout_text(const StateTensor& tensor, int64_t world_size) {
  std::string places;
  std::vector<std::string> cuts;
  for (const LayoutAxis& axis : tensor.layout->axes) {
    if (axis.only >= 0)
      places += str("; only on ", axis.name, " ", axis.only);
    else if (axis.size > 1)
      cuts.push_back(str("dim ", axis.dim, " by ", axis.name, " ", axis.size));
  }
  const int64_t copies = num_replicas(*tensor.layout, world_size);
  return str(cuts.empty() ? "whole" : c10::Join(", ", cuts), places,
             copies > 1 ? str("; ", copies, " copies") : "");
}

// The mesh axes that any layout names, outermost first: "pp 2, fsdp 4, tp 2".
std::string mesh_text(const StateTable& table) {
  std::set<std::tuple<int64_t, std::string, int64_t>> axes;
  for (const StateTensor& tensor : table.tensors())
    for (const LayoutAxis& axis : tensor.layout->axes)
      if (axis.size > 1) axes.emplace(-axis.stride, axis.name, axis.size);
  std::vector<std::string> texts;
  for (const auto& [stride, name, size] : axes) texts.push_back(str(name, " ", size));
  return texts.empty() ? "no tensor is sharded" : c10::Join(", ", texts);
}

constexpr const char* kInfoNotes =
    R"(Layout: which axes of the run's mesh shard a tensor, and along which dimensions. Statistics are over the finite
elements (std over all of them). At most 16 MiB are in memory at a time. For a float8 tensor, statistics are over
its raw values.
)";

// From the trainer's text; "" if the checkpoint has no such text, or one in another form.
std::string tokens_seen(const Manifest& manifest) {
  const auto text = manifest.texts.find("train_state");
  if (text == manifest.texts.end()) return "";
  const auto tokens = json_count(parse_json(text->second), "tokens");
  return tokens ? std::to_string(*tokens) : "";
}

std::string texts_text(const Manifest& manifest) {
  std::vector<std::string> texts;
  const auto add = [&](const std::string& key, const std::string& value) {
    texts.push_back(str(key, " (", size_text(static_cast<int64_t>(value.size())), ")"));
  };
  for (const auto& [key, value] : manifest.texts) add(key, value);
  if (!manifest.config.empty()) add("config", manifest.config);
  return texts.empty() ? "none" : c10::Join(", ", texts);
}

struct Totals {
  int64_t elements = 0, tensor_bytes = 0, file_bytes = 0;
};

Totals totals_of(const Manifest& manifest) {
  Totals totals;
  for (const StateTensor& tensor : manifest.table.tensors()) {
    totals.elements += num_elements(tensor);
    totals.tensor_bytes += num_bytes(tensor);
  }
  for (const FileRecord& file : manifest.files) totals.file_bytes += file.num_bytes;
  return totals;
}

std::string header_text(const SavedState& state) {
  const Manifest& manifest = state.manifest();
  const Totals totals = totals_of(manifest);
  const std::string tokens = tokens_seen(manifest);
  TextTable table;
  table.rows = {
      {"folder", state.folder().string()},
      {"run", manifest.run_id},
      {"step", std::to_string(manifest.step)},
      {"tokens seen", tokens.empty() ? "not recorded" : tokens},
      {"written", written_text(state.folder() / kManifestName)},
      {"library", manifest.library},
      {"ranks", str(manifest.table.world_size(), " of ", plural(manifest.num_threads, "thread"))},
      {"mesh", mesh_text(manifest.table)},
      {"files", str(manifest.files.size(), ", ", size_text(totals.file_bytes))},
      {"tensors", str(manifest.table.tensors().size(), ", ", plural(totals.elements, "element"), ", ",
                      size_text(totals.tensor_bytes))},
      {"finite", manifest.finite ? "all" : "not all"},
      {"texts", texts_text(manifest)},
  };
  return to_string(table);
}

TensorStats stats_of(const SavedState& state, const StateTensor& tensor) {
  TensorStats stats;
  const auto element_size = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  for (const Box& box : slabs_of(tensor.shape, element_size, kSlabBytes))
    stats.add(read_slab(state, tensor.name, box));
  return stats;
}

std::vector<std::string> stats_cells(const TensorStats& stats) {
  std::vector<std::string> cells;
  for (double value : {stats.mean, stats.std(), stats.min, stats.max, stats.norm})
    cells.push_back(number("%.6g", value));
  cells.push_back(std::to_string(stats.num_not_finite));
  return cells;
}

ordered_json stats_json(const TensorStats& stats) {
  return {{"mean", stats.mean}, {"std", stats.std()}, {"min", stats.min},
          {"max", stats.max},   {"norm", stats.norm}, {"not_finite", stats.num_not_finite}};
}

std::vector<StateTensor> by_name(const StateTable& table, const std::string& pattern) {
  const auto wanted = tensor_filter(pattern);
  std::vector<StateTensor> tensors;
  for (const StateTensor& tensor : table.tensors())
    if (wanted(tensor.name)) tensors.push_back(tensor);
  if (tensors.empty() && !pattern.empty())
    throw ConfigError(str("titan checkpoint info: no tensor's name matches '", pattern, "'"));
  std::ranges::sort(tensors, {}, &StateTensor::name);
  return tensors;
}

std::string tensors_text(const SavedState& state, const std::vector<StateTensor>& tensors, bool stats) {
  TextTable table{.rows = {{"tensor", "dtype", "shape"}}, .right = {}};
  if (stats) {
    table.right = {false, false, false, true, true, true, true, true, true};
    for (const char* head : {"mean", "std", "min", "max", "norm", "not finite"})
      table.rows[0].push_back(head);
  }
  table.rows[0].push_back("layout");
  for (const StateTensor& tensor : tensors) {
    std::vector<std::string> row = {tensor.name, dtype_text(tensor.dtype), shape_text(tensor.shape)};
    if (stats)
      for (std::string& cell : stats_cells(stats_of(state, tensor))) row.push_back(std::move(cell));
    row.push_back(layout_text(tensor, state.table().world_size()));
    table.rows.push_back(std::move(row));
  }
  return to_string(table);
}

ordered_json tensor_json(const SavedState& state, const StateTensor& tensor, bool stats) {
  ordered_json object = {{"name", tensor.name},
                         {"dtype", dtype_text(tensor.dtype)},
                         {"shape", tensor.shape},
                         {"layout", layout_text(tensor, state.table().world_size())}};
  if (stats) object["stats"] = stats_json(stats_of(state, tensor));
  return object;
}

ordered_json json_of(const SavedState& state, const std::vector<StateTensor>& tensors, bool stats) {
  const Manifest& manifest = state.manifest();
  ordered_json all = {{"folder", state.folder().string()},
                      {"run_id", manifest.run_id},
                      {"step", manifest.step},
                      {"written", written_text(state.folder() / kManifestName, /*utc=*/true)},
                      {"library", manifest.library},
                      {"ranks", manifest.table.world_size()},
                      {"threads", manifest.num_threads},
                      {"mesh", mesh_text(manifest.table)},
                      {"finite", manifest.finite},
                      {"bytes", totals_of(manifest).file_bytes},
                      {"elements", totals_of(manifest).elements},
                      {"texts", manifest.texts},
                      {"config", manifest.config},
                      {"tensors", ordered_json::array()}};
  for (const StateTensor& tensor : tensors) all["tensors"].push_back(tensor_json(state, tensor, stats));
  return all;
}

}  // namespace

InfoArguments parse_info_arguments(const Arguments& words) {
  InfoArguments arguments;
  Parser parser("titan checkpoint info", "FOLDER [--stats] [--tensors REGEX] [--json]", kInfoNotes);
  parser.path("FOLDER", arguments.folder, kStepOrRunText);
  parser.flag("--stats", arguments.stats,
              "read the tensors and print mean, std, min, max, norm and the count of non-finite elements");
  add_tensors(parser, arguments.tensors);
  parser.flag("--json", arguments.json, "print JSON, for programs");
  parser.parse(words);
  return arguments;
}

int checkpoint_info(const Arguments& words) {
  const InfoArguments arguments = parse_info_arguments(words);
  const SavedState state(step_or_newest(arguments.folder, "info", NewestStep::WithState));
  const std::vector<StateTensor> tensors = by_name(state.table(), arguments.tensors);
  if (arguments.json) return print(json_text(json_of(state, tensors, arguments.stats), 2) + "\n");
  return print(str(header_text(state), "\n", tensors_text(state, tensors, arguments.stats)));
}

namespace {

using Values = std::map<std::string, std::string>;

constexpr size_t kMostValueChars = 60;

constexpr const char* kDiffNotes =
    R"(The two checkpoints may be saved on different meshes. A tensor differs if any bit does; the norm of the difference
is relative to A's norm. In the configs, job.dump_folder is ignored; run, step and library are only shown.
The exit code is 1 if the checkpoints differ.
)";

Values leaves_of(const json& value) {
  Values leaves;
  if (value.empty()) return leaves;
  const json flat = value.flatten();  // items() refers to it
  for (const auto& [path, leaf] : flat.items()) leaves[path] = json_text(leaf);
  return leaves;
}

std::string shortened(const std::string& text) {
  return text.size() > kMostValueChars ? text.substr(0, kMostValueChars) + "..." : text;
}

std::vector<std::string> differences(const Values& a, const Values& b) {
  std::set<std::string> keys;
  for (const Values& values : {a, b})
    for (const auto& [key, value] : values) keys.insert(key);
  const auto value_in = [](const Values& values, const std::string& key) {
    const auto found = values.find(key);
    return found == values.end() ? std::string("unset") : found->second;
  };
  std::vector<std::string> lines;
  for (const std::string& key : keys)
    if (const std::string in_a = value_in(a, key), in_b = value_in(b, key); in_a != in_b)
      lines.push_back(str(key, ": ", shortened(in_a), " | ", shortened(in_b)));
  return lines;
}

// "training.steps: 10 | 20", a line for each setting of two resolved configs. Ignores job.dump_folder.
std::vector<std::string> config_differences(const std::string& a, const std::string& b) {
  Values in_a = config::printed_settings(a), in_b = config::printed_settings(b);
  for (Values* values : {&in_a, &in_b}) values->erase("job.dump_folder");
  return differences(in_a, in_b);
}

// "/step: 10 | 20", a line for each leaf of two JSON texts; one line for other texts. Empty: the texts, or
// their leaves, are equal.
std::vector<std::string> text_differences(const std::string& a, const std::string& b) {
  if (a == b) return {};
  const json in_a = parse_json(a), in_b = parse_json(b);
  if (in_a.is_structured() && in_b.is_structured()) return differences(leaves_of(in_a), leaves_of(in_b));
  const auto at = std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
  return {str(a.size(), " bytes | ", b.size(), " bytes, first difference at byte ", at)};
}

struct Pair {
  const SavedState& a;
  const SavedState& b;
};

const StateTensor* find(const SavedState& state, const std::string& name) {
  const auto position = state.table().find(name);
  return position ? &state.table().tensors()[*position] : nullptr;
}

// Reads both tensors slab by slab, so that neither is in memory as a whole. Slabs suit the larger element
// type.
TensorDifference compare(const Pair& states, const StateTensor& a, const StateTensor& b) {
  TensorDifference difference;
  const auto element_size =
      static_cast<int64_t>(std::max(c10::elementSize(a.dtype), c10::elementSize(b.dtype)));
  for (const Box& box : slabs_of(a.shape, element_size, kSlabBytes))
    difference.add(read_slab(states.a, a.name, box), read_slab(states.b, b.name, box), box);
  return difference;
}

std::string figures_text(const TensorDifference& difference) {
  return str(difference.num_different, " of ", plural(difference.num_elements, "element"), ", first ",
             shape_text(difference.first_index), "; max abs ", number("%.3g", difference.max_abs),
             ", relative norm ", number("%.3g", difference.relative_norm()));
}

// "" if the tensors are equal.
std::string tensor_text(const Pair& states, const std::string& name) {
  const StateTensor *a = find(states.a, name), *b = find(states.b, name);
  if (a == nullptr || b == nullptr) return a == nullptr ? "only in B" : "only in A";
  if (a->shape != b->shape) return str("shape ", shape_text(a->shape), " | ", shape_text(b->shape));
  const TensorDifference difference = compare(states, *a, *b);
  const std::string figures = difference.num_different > 0 ? figures_text(difference) : "";
  if (a->dtype == b->dtype) return figures;
  return str(dtype_text(a->dtype), " | ", dtype_text(b->dtype), figures.empty() ? ", equal values" : "; ",
             figures);
}

std::vector<std::string> names_of(const Pair& states, const std::string& pattern) {
  const auto wanted = tensor_filter(pattern);
  std::set<std::string> names;
  for (const SavedState* state : {&states.a, &states.b})
    for (const StateTensor& tensor : state->table().tensors())
      if (wanted(tensor.name)) names.insert(tensor.name);
  if (names.empty() && !pattern.empty())
    throw ConfigError(str("titan checkpoint diff: no tensor's name matches '", pattern, "'"));
  return {names.begin(), names.end()};
}

void print_head(const char* letter, const SavedState& state) {
  const Manifest& manifest = state.manifest();
  std::printf("%s  %s: step %lld of run %s, %s, %s\n", letter, state.folder().c_str(),
              static_cast<long long>(manifest.step), manifest.run_id.c_str(),
              plural(manifest.table.world_size(), "rank").c_str(), manifest.library.c_str());
}

// Prints each difference as soon as it is found. Returns how many tensors differ.
size_t print_tensors(const Pair& states, const std::vector<std::string>& names) {
  size_t count = 0;
  for (const std::string& name : names) {
    const std::string text = tensor_text(states, name);
    if (text.empty()) continue;
    if (count++ == 0) std::printf("\ntensors that differ\n");
    std::printf("  %s: %s\n", name.c_str(), text.c_str());
    std::fflush(stdout);
  }
  return count;
}

size_t print_lines(const std::string& title, const std::vector<std::string>& lines) {
  if (lines.empty()) return 0;
  std::printf("\n%s\n", title.c_str());
  for (const std::string& line : lines) std::printf("  %s\n", line.c_str());
  return lines.size();
}

size_t print_texts(const Manifest& a, const Manifest& b) {
  size_t count = print_lines("settings that differ", config_differences(a.config, b.config));
  std::set<std::string> keys;
  for (const auto* texts : {&a.texts, &b.texts})
    for (const auto& [key, text] : *texts) keys.insert(key);
  for (const std::string& key : keys) {
    const auto in_a = a.texts.find(key), in_b = b.texts.find(key);
    if (in_a == a.texts.end() || in_b == b.texts.end())
      count += print_lines(key, {in_a == a.texts.end() ? "only in B" : "only in A"});
    else
      count += print_lines(key + ": values differ", text_differences(in_a->second, in_b->second));
  }
  return count;
}

}  // namespace

DiffArguments parse_diff_arguments(const Arguments& words) {
  DiffArguments arguments;
  Parser parser("titan checkpoint diff", "A B [--tensors REGEX]", kDiffNotes);
  parser.path("A", arguments.a, "the folder of one step");
  parser.path("B", arguments.b, "the folder of another step");
  add_tensors(parser, arguments.tensors);
  parser.parse(words);
  return arguments;
}

int checkpoint_diff(const Arguments& words) {
  const DiffArguments arguments = parse_diff_arguments(words);
  const SavedState a(step_folder(arguments.a, "diff")), b(step_folder(arguments.b, "diff"));
  const std::vector<std::string> names = names_of({a, b}, arguments.tensors);
  print_head("A", a);
  print_head("B", b);
  const size_t tensors = print_tensors({a, b}, names);
  const size_t texts = print_texts(a.manifest(), b.manifest());
  std::printf("\n%zu of %s %s\n", tensors, plural(names.size(), "tensor").c_str(),
              tensors == 1 ? "differs" : "differ");
  return tensors + texts == 0 ? 0 : 1;
}

}  // namespace titan::cli
