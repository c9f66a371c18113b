#include "cli/sweep/run_state.h"

#include <nlohmann/json.hpp>

#include "cli/run/run_history.h"
#include "titan/config/differences.h"
#include "titan/core/error.h"
#include "titan/core/file.h"

namespace titan::cli::sweep {

namespace {

std::filesystem::path state_file(const std::filesystem::path& folder) { return folder / "sweep_run.json"; }

}  // namespace

std::optional<RunState> read_run_state(const std::filesystem::path& folder) {
  const auto file = state_file(folder);
  if (!std::filesystem::exists(file)) return std::nullopt;
  try {
    const auto object = nlohmann::json::parse(read_file(file));
    return RunState{.config = object.at("config"),
                    .finished = object.at("finished"),
                    .exit_code = object.at("exit_code"),
                    .seconds = object.at("seconds"),
                    .attempts = object.at("attempts")};
  } catch (const nlohmann::json::exception& error) {
    throw Error(str(file.string(), " isn't what titan sweep wrote: ", error.what()));
  }
}

void write_run_state(const std::filesystem::path& folder, const RunState& state) {
  make_folder(folder);
  const nlohmann::ordered_json object = {{"finished", state.finished},
                                         {"exit_code", state.exit_code},
                                         {"seconds", state.seconds},
                                         {"attempts", state.attempts},
                                         {"config", state.config}};
  write_file_atomic(state_file(folder), object.dump(2) + "\n");
}

bool went_through(const std::filesystem::path& folder) {
  const std::vector<ProcessLog> logs = newest_of_ranks(folder, 1, {.spans = false});
  if (!logs.empty()) return logs.front().last("stopped") == nullptr;
  // Without the log: what isn't logged any more is less than log_freq steps.
  const RunHistory run = read_history(folder);
  const std::string freq = run.setting("metrics.log_freq");
  return run.steps.last_step() + (freq.empty() ? 1 : std::stoll(freq)) > run.total_steps();
}

std::vector<std::string> differences_to_folder(const std::filesystem::path& folder,
                                               const std::string& config) {
  if (const auto state = read_run_state(folder)) return config::setting_differences(state->config, config);
  const auto resolved = folder / "config.toml";  // somebody else's run, unless it is the same
  if (!std::filesystem::exists(resolved)) return {};
  return config::setting_differences(read_file(resolved), config);
}

}  // namespace titan::cli::sweep
