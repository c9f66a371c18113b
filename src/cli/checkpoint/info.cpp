// titan checkpoint info: shows what a checkpoint holds.

#include <algorithm>
#include <cstdio>

#include <nlohmann/json.hpp>

#include "cli/checkpoint/commands.h"
#include "cli/checkpoint/tensor_figures.h"
#include "cli/parser.h"
#include "cli/text.h"
#include "core/json.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

namespace fs = std::filesystem;
using namespace checkpoint;
using Json = nlohmann::ordered_json;

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
  std::string text;
  const auto add = [&](const std::string& key, const std::string& value) {
    text += str(text.empty() ? "" : ", ", key, " (", size_text(static_cast<int64_t>(value.size())), ")");
  };
  for (const auto& [key, value] : manifest.texts) add(key, value);
  if (!manifest.config.empty()) add("config", manifest.config);
  return text.empty() ? "none" : text;
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

Json stats_json(const TensorStats& stats) {
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
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
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

Json tensor_json(const SavedState& state, const StateTensor& tensor, bool stats) {
  Json object = {{"name", tensor.name},
                 {"dtype", dtype_text(tensor.dtype)},
                 {"shape", tensor.shape},
                 {"layout", layout_text(tensor, state.table().world_size())}};
  if (stats) object["stats"] = stats_json(stats_of(state, tensor));
  return object;
}

Json json_of(const SavedState& state, const std::vector<StateTensor>& tensors, bool stats) {
  const Manifest& manifest = state.manifest();
  Json all = {{"folder", state.folder().string()},
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
              {"tensors", Json::array()}};
  for (const StateTensor& tensor : tensors) all["tensors"].push_back(tensor_json(state, tensor, stats));
  return all;
}

}  // namespace

InfoArguments parse_info_arguments(const Arguments& words) {
  InfoArguments arguments;
  Parser parser("titan checkpoint info", "STEP_FOLDER [--stats] [--tensors REGEX] [--json]", kInfoNotes);
  parser.path("STEP_FOLDER", arguments.folder, "the folder of one step");
  parser.flag("--stats", arguments.stats,
              "read the tensors and print mean, std, min, max, norm and the count of non-finite elements");
  add_tensors(parser, arguments.tensors);
  parser.flag("--json", arguments.json, "print JSON, for programs");
  parser.parse(words);
  return arguments;
}

int checkpoint_info(const Arguments& words) {
  const InfoArguments arguments = parse_info_arguments(words);
  const SavedState state(step_folder(arguments.folder, "info"));
  const std::vector<StateTensor> tensors = by_name(state.table(), arguments.tensors);
  if (arguments.json) return print(titan::json_text(json_of(state, tensors, arguments.stats), 2) + "\n");
  return print(str(header_text(state), "\n", tensors_text(state, tensors, arguments.stats)));
}

}  // namespace titan::cli
