#include "checkpoint/save/save_writer.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <system_error>
#include <utility>

#include <torch/headeronly/version.h>

#include "checkpoint/save/rank_tree.h"
#include "core/units.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "titan/core/file.h"
#include "titan/core/log.h"
#include "titan/core/version.h"

namespace titan::checkpoint::detail {

std::string to_bytes(const SaveReport& report) {
  WireWriter out;
  out.number(report.step);
  out.text(report.failure);
  out.number(report.file.num_bytes);
  out.text(report.file.header_digest);
  out.number(report.finite);
  out.number(report.num_threads);
  out.number(static_cast<int64_t>(report.texts.size()));
  for (const std::string& text : report.texts) out.text(text);
  return out.take();
}

SaveReport parse_report(const std::string& bytes) {
  WireReader in(bytes);
  SaveReport report;
  report.step = in.number();
  report.failure = in.text();
  report.file.num_bytes = in.number();
  report.file.header_digest = in.text();
  report.finite = in.number() != 0;
  report.num_threads = in.number();
  for (int64_t left = in.number(); left > 0; --left) report.texts.push_back(in.text());
  return report;
}

namespace {

namespace fs = std::filesystem;

}  // namespace

SaveWriter::SaveWriter(SaveOptions options, std::string run_id, RankTree tree)
    : options_(std::move(options)), run_id_(std::move(run_id)), tree_(std::move(tree)) {}

void SaveWriter::enter(SavePhase phase) {
  phase_ = phase;
  if (options_.on_phase) options_.on_phase(phase);
}

SaveReport SaveWriter::write_file(const SaveJob& job) {
  SaveReport report;
  report.step = job.step;
  report.num_threads = job.num_threads;
  for (const auto& [key, merge] : job.merges) report.texts.push_back(job.texts.at(key));
  try {
    write_pieces(job, report);
    enter(SavePhase::Gather);
  } catch (const std::exception& error) {
    report.failure = error.what();
    if (report.failure.empty()) report.failure = "an error without a message";
    phase_ = SavePhase::Gather;  // what it waits for now are the others
  }
  return report;
}

void SaveWriter::write_pieces(const SaveJob& job, SaveReport& report) {
  const FileIdentity identity{run_id_, job.step, tree_.rank(), tree_.size()};
  const auto& pieces = job.staging->pieces();
  TITAN_CHECK(job.staging_failure.empty(), job.staging_failure);
  job.staging->synchronize();
  enter(SavePhase::MakeFolder);
  const fs::path folder = pending_path(options_.folder, job.step, run_id_);
  make_folder(folder);
  enter(SavePhase::WriteFile);
  std::atomic<int64_t> left = 0;
  for (const PieceToWrite& piece : pieces) left += static_cast<int64_t>(piece.data.nbytes());
  WriteOptions write{.num_threads = options_.num_threads};
  if (options_.on_phase) {
    write.progress = [&](int64_t num_bytes) {
      enter(SavePhase::WriteChunk);
      if ((left -= num_bytes) == 0) enter(SavePhase::SyncFile);
    };
  }
  const WrittenFile file = write_rank_file(folder / file_name(tree_.rank()), identity, pieces, write);
  report.file = file.record;
  report.finite = file.finite;
}

Manifest SaveWriter::manifest_of(const SaveJob& job, const std::vector<SaveReport>& reports) const {
  Manifest manifest{.run_id = run_id_,
                    .step = job.step,
                    .library = titan::str("titan ", kVersion, ", torch ", TORCH_VERSION),
                    .num_threads = job.num_threads,
                    .config = options_.config,
                    .texts = job.texts,
                    .table = job.table,
                    .files = {}};
  for (const SaveReport& report : reports) {
    manifest.files.push_back(report.file);
    manifest.finite = manifest.finite && report.finite;
  }
  const auto other = std::find_if(reports.begin(), reports.end(), [&](const SaveReport& report) {
    return report.num_threads != job.num_threads;
  });
  if (other != reports.end())
    log::warning(titan::str("checkpoint of step ", job.step, ": rank 0 computes with ", job.num_threads,
                            " threads, others with ", other->num_threads,
                            ": a resumed run may differ in the last bits"));
  size_t position = 0;
  for (const auto& [key, merge] : job.merges) {
    std::vector<std::string> texts;
    for (const SaveReport& report : reports) texts.push_back(report.texts.at(position));
    manifest.texts[key] = merge(texts);
    ++position;
  }
  return manifest;
}

std::vector<SaveReport> SaveWriter::reports_of(const SaveJob& job, const std::vector<Answer>& answers,
                                               Verdict& verdict) const {
  std::vector<SaveReport> reports;
  std::vector<Answer> problems = answers;
  for (size_t i = 0; i < answers.size(); ++i) {
    if (answers[i].lost) continue;
    reports.push_back(parse_report(answers[i].text));
    problems[i].text = reports.back().failure;
    if (reports.back().step != job.step)
      problems[i].text = titan::str("is at the checkpoint of step ", reports.back().step);
  }
  verdict = merged_problems(tree_, problems);
  return reports;
}

std::string SaveWriter::summary(const char* what, int64_t step, int64_t num_bytes, double seconds) {
  char text[128];
  std::snprintf(text, sizeof(text), " in %.3g s (%.3g GB/s)", seconds,
                static_cast<double>(num_bytes) / 1e9 / std::max(seconds, 1e-9));
  return titan::str(what, " of step ", step, ": ", size_text(num_bytes), text);
}

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
