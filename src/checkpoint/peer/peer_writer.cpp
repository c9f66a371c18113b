#include "checkpoint/peer/peer_writer.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <utility>

#include <ATen/ops/zeros.h>

#include "checkpoint/format/stored_files.h"
#include "checkpoint/save/rank_tree.h"
#include "core/file.h"
#include "core/units.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::checkpoint::detail {
namespace {

namespace fs = std::filesystem;

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

constexpr dist::Label kCopyLabel{.phase = "checkpoint::copy"};
// The values of the byte that follows each piece.
constexpr std::byte kContinues{0}, kEndsHere{1};

// A file in transit. It throws only if a peer is lost.
class MovingFile {
 public:
  MovingFile(const FileTransfer& transfer, const std::atomic<bool>* ends_early)
      : transfer_(transfer),
        ends_early_(ends_early),
        piece_(at::zeros({std::min(kTransferBytes, transfer.num_bytes) + 1}, at::kByte)) {
    attempt([&] {
      if (!transfer.sends) {
        output_ = storage_of(transfer.path).create(transfer.path, transfer.num_bytes);
        return;
      }
      input_.emplace(transfer.path);
      TITAN_CHECK(input_->num_bytes() == transfer.num_bytes, transfer.path.string(), " has ",
                  input_->num_bytes(), " bytes instead of ", transfer.num_bytes);
    });
  }

  bool done() const { return ended_ || offset_ == transfer_.num_bytes; }
  const std::string& problem() const { return problem_; }

  void start(dist::Group& group) {
    length_ = std::min(kTransferBytes, transfer_.num_bytes - offset_);
    const at::Tensor part = piece_.narrow(0, 0, length_ + 1);
    if (transfer_.sends) {
      if (ends_early_ && *ends_early_) fail(titan::str("was given up at byte ", offset_));
      attempt([&] { input_->read({bytes(), static_cast<size_t>(length_)}, offset_); });
      bytes()[length_] = problem_.empty() ? kContinues : kEndsHere;
      work_.emplace(group.send(part, transfer_.peer, kCopyLabel));
    } else {
      work_.emplace(group.receive(part, transfer_.peer, kCopyLabel));
    }
  }

  void wait() {
    work_->wait();
    work_.reset();
    ended_ = bytes()[length_] == kEndsHere;
    if (!transfer_.sends) {
      if (ended_)
        fail(titan::str("is incomplete: rank ", transfer_.peer, " stopped sending at byte ", offset_));
      attempt([&] {
        const std::span<const std::byte> part(bytes(), static_cast<size_t>(length_));
        output_->write({&part, 1}, offset_);
      });
    }
    offset_ += length_;
  }

  void finish() {
    if (output_) attempt([&] { output_->finish(); });
  }

 private:
  // Runs `part` unless there has been a problem.
  template <class Part>
  void attempt(Part part) {
    if (!problem_.empty()) return;
    try {
      part();
    } catch (const std::exception& error) {
      problem_ = error.what();
      output_.reset();
    }
  }

  void fail(const std::string& what) {
    attempt([&] {
      throw Error(titan::str(transfer_.path.string(), " (", transfer_.num_bytes, " bytes) ", what));
    });
  }

  std::byte* bytes() { return static_cast<std::byte*>(piece_.mutable_data_ptr()); }

  FileTransfer transfer_;
  const std::atomic<bool>* ends_early_;
  at::Tensor piece_;
  std::optional<InputFile> input_;
  std::unique_ptr<Storage::Writer> output_;
  std::optional<dist::Work> work_;
  int64_t offset_ = 0, length_ = 0;
  bool ended_ = false;  // the sender stopped before everything was sent
  std::string problem_;
};

}  // namespace

std::string transfer_files(dist::Group& group, const std::vector<FileTransfer>& transfers,
                           const TransferOptions& options) {
  std::vector<std::unique_ptr<MovingFile>> files;
  for (const FileTransfer& transfer : transfers)
    files.push_back(std::make_unique<MovingFile>(transfer, options.ends_early.get()));
  while (true) {
    std::vector<MovingFile*> moving;
    for (const auto& file : files)
      if (!file->done()) moving.push_back(file.get());
    if (moving.empty()) break;
    // A rank that sends to the next one also receives from the one before, so all have to start before any
    // can be waited for.
    for (MovingFile* file : moving) file->start(group);
    for (MovingFile* file : moving) file->wait();
    if (options.progress) options.progress();
  }
  std::string problem;
  for (const auto& file : files) {
    file->finish();
    if (problem.empty()) problem = file->problem();
  }
  return problem;
}

// Shared with the thread that copies, which may outlive the writer.
struct PeerWriter::Round {
  explicit Round(int64_t number) : step(number) {}

  void end(const std::string& lost) {
    const std::lock_guard lock(mutex);
    ended = true;
    connection_lost = lost;
  }

  const int64_t step;
  std::shared_ptr<std::atomic<bool>> given_up = std::make_shared<std::atomic<bool>>(false);
  std::string problem;  // why files are unusable; written before `ended`
  std::mutex mutex;     // guards the members below
  bool ended = false;
  std::string connection_lost;
};

PeerWriter::PeerWriter(SaveOptions options, std::string run_id, RankTree tree,
                       std::shared_ptr<dist::Group> copies)
    : SaveWriter(std::move(options), std::move(run_id), std::move(tree)), copies_(std::move(copies)) {}

std::string PeerWriter::busy_reason() const {
  std::shared_ptr<Round> round;
  {
    const std::lock_guard lock(mutex_);
    round = last_round_;
  }
  if (!round) return "";
  const std::string own = tree_.name_of(tree_.rank());
  const std::lock_guard lock(round->mutex);
  if (!round->ended) return titan::str(own, ": still sending the copies of step ", round->step);
  if (round->connection_lost.empty()) return "";
  return titan::str(own, ": can't send copies since those of step ", round->step,
                    " failed: ", round->connection_lost);
}

SaveOutcome PeerWriter::write(const SaveJob& job) {
  const auto start = std::chrono::steady_clock::now();
  const auto answers = tree_.gather(to_wire(write_file(job)));
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
    if (is_root()) log::debug(summary("peer checkpoint", job.step, num_bytes, seconds_since(start)));
  } catch (const std::exception& error) {
    return {titan::str("peer checkpoint of step ", job.step, ": ", error.what()), /*lost=*/true};
  }
  return {};
}

Verdict PeerWriter::manifest_or_failure(const SaveJob& job, const std::vector<Answer>& answers) const {
  Verdict verdict = conclude(job, answers, [&](const std::vector<SaveReport>& reports) -> Verdict {
    const Manifest manifest = manifest_of(job, reports);
    if (manifest.finite) return {kManifest + to_text(manifest) + kEnd};
    return {"the state has numbers that aren't finite"};
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
  const auto round = std::make_shared<Round>(manifest.step);
  {
    const std::lock_guard lock(mutex_);
    last_round_ = round;
  }
  const auto copy = [group = copies_, transfers, round, on_phase = options_.on_phase] {
    const auto progress = [&] {
      if (on_phase) on_phase(SavePhase::CopyPiece);
    };
    try {
      round->problem = transfer_files(*group, transfers, {progress, round->given_up});
    } catch (const std::exception& error) {
      round->end(error.what());
      throw;
    }
    round->end("");
  };
  if (!within_in_background(options_.timeout, copy)) {
    *round->given_up = true;
    throw Error(titan::str("the copies weren't made within ",
                           std::chrono::duration<double>(options_.timeout).count(), " s"));
  }
  if (!round->problem.empty()) throw Error(round->problem);
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
