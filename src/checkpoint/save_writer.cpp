#include "save_writer.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <utility>

#include <torch/headeronly/version.h>

#include "agreement.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "titan/core/file.h"
#include "titan/core/log.h"
#include "titan/core/version.h"

namespace titan::checkpoint::detail {
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
  const double gigabytes = static_cast<double>(num_bytes) / 1e9;
  std::snprintf(text, sizeof(text), "%.3g GB in %.3g s (%.3g GB/s)", gigabytes, seconds,
                gigabytes / std::max(seconds, 1e-9));
  return titan::str(what, " of step ", step, ": ", text);
}

}  // namespace titan::checkpoint::detail
