// titan checkpoint prune: removes what keep_latest_k would.

#include <cstdio>

#include "cli/checkpoint/arguments.h"
#include "cli/checkpoint/commands.h"
#include "cli/text.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

using namespace checkpoint;

// In the names of folders that are half removed, where a run's id stands otherwise.
constexpr const char* kRemover = "prune";

void show(const PruneArguments& arguments, const std::filesystem::path& folder) {
  for (const Leftover& leftover : list_leftovers(folder)) {
    if (lacks_successor(leftover, folder))
      std::printf("would bring back %s from %s, if no run writes here\n",
                  step_path(folder, leftover.step).c_str(), leftover.path.c_str());
    else
      std::printf("would remove %s, if no run writes here\n", leftover.path.c_str());
  }
  for (const StepEntry& step : steps_to_prune(list_steps(folder), arguments.keep))
    std::printf("would remove %s\n", step.path.c_str());
}

void prune(const PruneArguments& arguments, const std::filesystem::path& folder) {
  const FolderLock lock(folder);
  if (!lock.held() && !arguments.force)
    throw Error(str(folder.string(),
                    ": whether a run writes here can't be found out, as its file system has no "
                    "locks; --force, if none does"));
  clean_leftovers(folder, lock);
  for (const StepEntry& step : steps_to_prune(list_steps(folder), arguments.keep)) {
    remove_step(step, kRemover);
    std::printf("removed %s\n", step.path.c_str());
  }
}

}  // namespace

int checkpoint_prune(const Arguments& words) {
  const PruneArguments arguments = parse_prune_arguments(words);
  if (!arguments.help.empty()) return std::fputs(arguments.help.c_str(), stdout), 0;
  const auto folder = steps_folder(arguments.folder, "prune");
  const size_t before = list_steps(folder).size();
  arguments.dry_run ? show(arguments, folder) : prune(arguments, folder);
  const size_t removed = arguments.dry_run ? steps_to_prune(list_steps(folder), arguments.keep).size()
                                           : before - list_steps(folder).size();
  std::printf("%s of %zu %s\n", plural(static_cast<int64_t>(before - removed), "step").c_str(), before,
              arguments.dry_run ? "would stay" : "stay");
  return 0;
}

}  // namespace titan::cli
