#include "checkpoint/peer/peer_writer.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "checkpoint/format/stored_files.h"
#include "core/file.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::checkpoint::detail {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// Rank 0's answer to the reports: the manifest or a failure. The tree may append a problem to it.
constexpr char kManifest = 'M', kFailure = 'F', kEnd = '\0';

std::string manifest_in(const Verdict& verdict) {
  if (verdict.lost || verdict.text.empty() || verdict.text[0] != kManifest) return "";
  return verdict.text.substr(1, verdict.text.find(kEnd) - 1);
}

std::string failure_in(const Verdict& verdict) {
  const std::string& text = verdict.text;
  if (text.starts_with(kFailure)) return text.substr(1);
  const size_t end = text.find(kEnd);
  // The tree's addition to the manifest: "; rank 1 (host) is lost".
  return end == text.npos ? text : text.substr(std::min(text.size(), end + 3));
}

}  // namespace

PeerWriter::PeerWriter(SaveOptions options, std::string run_id, RankTree tree,
                       std::shared_ptr<dist::Group> copies)
    : SaveWriter(std::move(options), std::move(run_id), std::move(tree)),
      copies_(copies ? std::make_unique<PeerCopies>(std::move(copies)) : nullptr) {}

std::string PeerWriter::busy_reason() const {
  const std::string problem = copies_ ? copies_->busy_reason() : "";
  return problem.empty() ? "" : titan::str(tree_.name_of(tree_.rank()), ": ", problem);
}

SaveOutcome PeerWriter::write(const SaveJob& job) {
  const auto start = Clock::now();
  const auto answers = tree_.gather(to_bytes(write_file(job)));
  Verdict verdict = tree_.spread(is_root() ? manifest_or_failure(job, answers) : Verdict{});
  const std::string text = manifest_in(verdict);
  if (text.empty()) return give_up(job.step, {failure_in(verdict), verdict.lost});
  try {
    const Manifest manifest = parse_manifest(text, kManifestName);
    if (copies_) verdict = on_all([&] { copy_files(manifest); });
    if (!copies_ || verdict.text.empty()) verdict = on_all([&] { commit(manifest); });
    if (!verdict.text.empty()) return give_up(job.step, verdict);
    int64_t num_bytes = 0;
    for (const FileRecord& file : manifest.files) num_bytes += file.num_bytes;
    if (is_root())
      log::debug(summary("peer checkpoint", job.step, num_bytes,
                         std::chrono::duration<double>(Clock::now() - start).count()));
  } catch (const std::exception& error) {
    return {titan::str("peer checkpoint of step ", job.step, ": ", error.what()), /*lost=*/true};
  }
  return {};
}

Verdict PeerWriter::manifest_or_failure(const SaveJob& job, const std::vector<Answer>& answers) const {
  Verdict verdict = conclude(job, answers, [&](const std::vector<SaveReport>& reports) -> Verdict {
    const Manifest manifest = manifest_of(job, reports);
    if (manifest.finite) return {kManifest + to_text(manifest) + kEnd};
    return {"not all numbers of the state are finite"};
  });
  if (!verdict.text.ends_with(kEnd)) verdict.text.insert(verdict.text.begin(), kFailure);
  return verdict;
}

Verdict PeerWriter::on_all(const std::function<void()>& part) {
  const std::string problem = problem_of(part);
  set_phase(SavePhase::Verdict);
  return agree(tree_, problem);
}

void PeerWriter::copy_files(const Manifest& manifest) {
  const fs::path folder = pending_path(options_.folder, manifest.step, run_id_);
  std::vector<FileTransfer> transfers;
  const auto add = [&](int rank, int peer, bool sends) {
    transfers.push_back({.path = folder / file_name(rank),
                         .num_bytes = manifest.files.at(static_cast<size_t>(rank)).num_bytes,
                         .peer = peer,
                         .sends = sends});
  };
  if (const int target = options_.peers->copy_target(); target >= 0) add(tree_.rank(), target, true);
  for (const int source : options_.peers->copy_sources()) add(source, source, false);
  enter(SavePhase::CopyPiece);
  copies_->make(manifest.step, transfers, options_.timeout, [on_phase = options_.on_phase] {
    if (on_phase) on_phase(SavePhase::CopyPiece);
  });
}

void PeerWriter::commit(const Manifest& manifest) {
  if (!options_.peers->is_leader()) return;
  enter(SavePhase::WriteManifest);
  const fs::path folder = pending_path(options_.folder, manifest.step, run_id_);
  write_text(folder / kManifestName, to_text(manifest));
  enter(SavePhase::Commit);
  commit_step(options_.folder, manifest.step, run_id_);
}

// The ranks of a place are done with the folder once their answers have arrived.
SaveOutcome PeerWriter::give_up(int64_t step, const Verdict& verdict) const {
  if (!verdict.lost && options_.peers->is_leader())
    remove_quietly(pending_path(options_.folder, step, run_id_));
  return {titan::str("peer checkpoint of step ", step, ": ", verdict.text), verdict.lost};
}

void PeerWriter::prune(int64_t step) {
  if (!options_.peers->is_leader()) return;
  try {
    enter(SavePhase::Prune);
    for (const StepEntry& entry : list_steps(options_.folder))
      if (entry.step != step) remove_step(entry, run_id_);
  } catch (const std::exception& error) {
    log::warning(titan::str("peer checkpoint of step ", step,
                            " is complete, but the previous one couldn't be removed: ", error.what()));
  }
}

}  // namespace titan::checkpoint::detail
