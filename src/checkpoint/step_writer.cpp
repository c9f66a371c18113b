#include "step_writer.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <system_error>

#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "titan/core/file.h"
#include "titan/core/log.h"

namespace titan::checkpoint::detail {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// What the ranks' messages say is what rank 0 sees: a file system that isn't shared (any more) ends here.
void check_sizes(const fs::path& folder, const RankTree& tree, const std::vector<SaveReport>& reports) {
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const fs::path file = folder / file_name(static_cast<int64_t>(rank));
    std::error_code error;
    const auto size = fs::file_size(file, error);
    const auto expected = static_cast<uintmax_t>(reports[rank].file.num_bytes);
    TITAN_CHECK(!error && size == expected, tree.name_of(static_cast<int>(rank)), " wrote ", file.string(),
                " (", expected, " bytes), but on ", tree.name_of(0), " it ",
                error ? "can't be read: " + error.message() : titan::str("has ", size, " bytes"));
  }
}

}  // namespace

SaveOutcome StepWriter::write(const SaveJob& job) {
  const auto start = Clock::now();
  const SaveReport own = write_file(job);
  const auto answers = tree_.gather(to_bytes(own));
  Verdict verdict = is_root() ? conclude(job, answers) : Verdict{};
  std::string late;
  try {
    if (!is_root()) enter(SavePhase::Verdict);
  } catch (const std::exception& error) {
    late = titan::str(tree_.name_of(tree_.rank()), ", waiting for the verdict: ", error.what());
  }
  verdict = tree_.spread(std::move(verdict));
  if (verdict.text.empty()) verdict.text = late;
  if (!verdict.text.empty())
    return {titan::str("checkpoint of step ", job.step, ": ", verdict.text), verdict.lost};
  if (is_root()) {
    int64_t num_bytes = 0;
    for (const Answer& answer : answers) num_bytes += parse_report(answer.text).file.num_bytes;
    log::info(summary("checkpoint", job.step, num_bytes,
                      std::chrono::duration<double>(Clock::now() - start).count()));
  }
  return {};
}

Verdict StepWriter::conclude(const SaveJob& job, const std::vector<Answer>& answers) {
  Verdict verdict;
  try {
    const std::vector<SaveReport> reports = reports_of(job, answers, verdict);
    if (verdict.text.empty()) complete(job, reports);
  } catch (const std::exception& error) {
    verdict.text = titan::str(tree_.name_of(0), ": ", error.what());
    verdict.lost = std::any_of(answers.begin(), answers.end(), [](const Answer& each) { return each.lost; });
  }
  if (!verdict.text.empty()) {
    std::error_code ignored;  // the next run tries again
    fs::remove_all(pending_path(options_.folder, job.step, run_id_), ignored);
  }
  return verdict;
}

void StepWriter::complete(const SaveJob& job, const std::vector<SaveReport>& reports) {
  TITAN_INTERNAL_ASSERT(static_cast<int>(reports.size()) == tree_.size(), "reports of ", reports.size(),
                        " ranks");
  const fs::path folder = pending_path(options_.folder, job.step, run_id_);
  enter(SavePhase::WriteManifest);
  check_sizes(folder, tree_, reports);
  write_file_atomic(folder / kManifestName, to_text(manifest_of(job, reports)));
  enter(SavePhase::Commit);
  commit_step(options_.folder, job.step, run_id_);
  enter(SavePhase::Verdict);
}

// The checkpoint is complete: that an older one can't be removed is no reason to stop.
void StepWriter::prune(int64_t step) {
  if (!is_root() || options_.keep_latest <= 0) return;
  try {
    enter(SavePhase::Prune);
    std::vector<StepEntry> entries = list_steps(options_.folder);
    // Newer ones are of a run that this one went back behind: what was saved a moment ago isn't too old for
    // them.
    std::erase_if(entries, [&](const StepEntry& entry) { return entry.step > step; });
    for (const StepEntry& entry : steps_to_prune(entries, options_.keep_latest)) remove_step(entry, run_id_);
  } catch (const std::exception& error) {
    log::error(titan::str("checkpoint of step ", step,
                          " is complete, but an older one couldn't be removed: ", error.what()));
  }
}

}  // namespace titan::checkpoint::detail
