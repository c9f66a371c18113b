// titan checkpoint diff: shows what differs between two checkpoints, whatever meshes they were saved on.

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/checkpoint/commands.h"
#include "cli/checkpoint/tensor_figures.h"
#include "cli/parser.h"
#include "cli/text.h"
#include "core/json.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/config/load.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

using nlohmann::json;
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
  for (const auto& [path, leaf] : flat.items()) leaves[path] = titan::json_text(leaf);
  return leaves;
}

std::string shortened(const std::string& text) {
  return text.size() > kMostValueChars ? text.substr(0, kMostValueChars) + "..." : text;
}

std::vector<std::string> differences(const Values& a, const Values& b) {
  std::set<std::string> keys;
  for (const Values& values : {a, b})
    for (const auto& [key, value] : values) keys.insert(key);
  const auto value = [](const Values& values, const std::string& key) {
    const auto found = values.find(key);
    return found == values.end() ? std::string("unset") : shortened(found->second);
  };
  std::vector<std::string> lines;
  for (const std::string& key : keys) {
    const auto in_a = a.find(key), in_b = b.find(key);
    if (in_a != a.end() && in_b != b.end() && in_a->second == in_b->second) continue;
    lines.push_back(str(key, ": ", value(a, key), " | ", value(b, key)));
  }
  return lines;
}

// "training.steps: 10 | 20", a line for each setting of two resolved configs. Ignores job.dump_folder.
std::vector<std::string> config_differences(const std::string& a, const std::string& b) {
  Values in_a = config::printed_settings(a), in_b = config::printed_settings(b);
  for (Values* values : {&in_a, &in_b}) values->erase("job.dump_folder");
  return differences(in_a, in_b);
}

// "/step: 10 | 20", a line for each leaf of two JSON texts; one line for other texts. Empty: the texts, or their
// leaves, are equal.
std::vector<std::string> text_differences(const std::string& a, const std::string& b) {
  if (a == b) return {};
  const json in_a = parse_json(a), in_b = parse_json(b);
  if (in_a.is_structured() && in_b.is_structured()) return differences(leaves_of(in_a), leaves_of(in_b));
  const auto at = std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
  return {str(a.size(), " bytes | ", b.size(), " bytes, first difference at byte ", at)};
}

using namespace checkpoint;

struct Pair {
  const SavedState& a;
  const SavedState& b;
};

const StateTensor* find(const SavedState& state, const std::string& name) {
  const auto position = state.table().find(name);
  return position ? &state.table().tensors()[*position] : nullptr;
}

// Reads both tensors slab by slab, so that neither is in memory as a whole. Slabs suit the larger element type.
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
      count += print_lines(key + ": values that differ", text_differences(in_a->second, in_b->second));
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
  std::printf("\n%zu of %s %s\n", tensors, plural(static_cast<int64_t>(names.size()), "tensor").c_str(),
              tensors == 1 ? "differs" : "differ");
  return tensors + texts == 0 ? 0 : 1;
}

}  // namespace titan::cli
