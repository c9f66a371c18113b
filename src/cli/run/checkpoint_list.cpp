#include "cli/run/checkpoint_list.h"

#include "cli/checkpoint/commands.h"
#include "cli/text.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

namespace fs = std::filesystem;

int64_t bytes_in(const fs::path& folder) {
  int64_t bytes = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error))
    if (entry.is_regular_file(error)) bytes += static_cast<int64_t>(entry.file_size(error));
  return bytes;
}

CheckpointRow row_of(const checkpoint::StepEntry& entry) {
  CheckpointRow row{
      .step = entry.step,
      .num_bytes = bytes_in(entry.path),
      .written = written_text(entry.has_manifest ? entry.path / checkpoint::kManifestName : entry.path)};
  if (holds_model_only(entry.path)) {
    row.state = "model only";
    return row;
  }
  const std::vector<std::string> problems = checkpoint::quick_problems(entry.path);
  row.usable = problems.empty();
  row.state = problems.empty() ? "complete" : "damaged: " + problems.front();
  return row;
}

}  // namespace

std::vector<CheckpointRow> list_checkpoints(const fs::path& folder) {
  std::vector<CheckpointRow> rows;
  for (const checkpoint::StepEntry& entry : checkpoint::list_steps(folder)) rows.push_back(row_of(entry));
  return rows;
}

std::optional<CheckpointRow> newest_checkpoint(const fs::path& folder) {
  const std::vector<checkpoint::StepEntry> entries = checkpoint::list_steps(folder);
  return entries.empty() ? std::nullopt : std::optional(row_of(entries.back()));
}

}  // namespace titan::cli
