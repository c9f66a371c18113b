#include "titan/checkpoint/verify.h"

#include <algorithm>
#include <future>

#include "folder_calls.h"
#include "step_name.h"
#include "titan/core/error.h"
#include "verify_work.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string blocks_text(const Damage& damage) {
  const int64_t last = damage.first_block + damage.num_blocks - 1;
  if (damage.num_blocks == 0) return "";
  if (damage.num_blocks == 1) return titan::str(", block ", damage.first_block);
  return titan::str(", blocks ", damage.first_block, " to ", last);
}

VerifyReport manifest_report(const fs::path& folder, const std::string& what) {
  const fs::path path = folder / kManifestName;
  VerifyReport report;
  report.damages.push_back({path, "", 0, 0, detail::without_path(what, path)});
  return report;
}

void run(detail::VerifyWork& work, int num_threads) {
  std::vector<std::future<void>> threads;
  for (int i = 1; i < num_threads; ++i)
    threads.push_back(std::async(std::launch::async, [&work] { work.run(); }));
  work.run();
  for (auto& thread : threads) thread.get();
}

}  // namespace

std::string to_string(const Damage& damage) {
  const std::string tensor = damage.tensor.empty() ? "" : titan::str(": tensor '", damage.tensor, "'");
  return titan::str(damage.file.string(), tensor, blocks_text(damage), ": ", damage.what);
}

VerifyReport verify_step(const fs::path& step_folder, const VerifyOptions& options) {
  if (!fs::is_directory(step_folder)) throw Error(titan::str("there is no folder ", step_folder.string()));
  const fs::path path = step_folder / kManifestName;
  if (!titan::detail::is_own_file(path))
    return manifest_report(step_folder, titan::detail::is_there(path) ? "is no regular file" : "is missing");
  Manifest manifest;
  try {
    manifest = read_manifest(step_folder);
  } catch (const Error& error) {
    return manifest_report(step_folder, error.what());
  }
  detail::VerifyWork work(step_folder, manifest, options);
  run(work, std::max(1, options.num_threads));
  VerifyReport report = work.report();
  if (const auto problem = detail::name_problem(step_folder, manifest))
    report.damages.insert(report.damages.begin(), {path, "", 0, 0, detail::without_path(*problem, path)});
  return report;
}

}  // namespace titan::checkpoint
