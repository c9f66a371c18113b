#include "checkpoint/save/save_writer.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <thread>
#include <utility>

#include "checkpoint/format/stored_files.h"
#include "core/process.h"
#include "core/units.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::checkpoint::detail {
namespace {

namespace fs = std::filesystem;

// Checks that rank 0 sees the files that the ranks report: it doesn't if the file system isn't shared (any
// more).
void check_sizes(const fs::path& folder, const RankTree& tree, const std::vector<SaveReport>& reports) {
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const fs::path file = folder / file_name(static_cast<int64_t>(rank));
    const Storage::Status found = storage_of(file).status(file);
    const int64_t expected = reports[rank].file.num_bytes;
    TITAN_CHECK(found.kind == Storage::Kind::File && found.num_bytes == expected,
                tree.name_of(static_cast<int>(rank)), " wrote ", file.string(), " (", expected,
                " bytes), but on ", tree.name_of(0), " it",
                found.kind == Storage::Kind::File ? titan::str(" has ", found.num_bytes, " bytes")
                                                  : not_a_file(file));
  }
}

void remove_failed(const fs::path& pending) {
  if (!is_there(pending)) return;
  try {
    storage_of(pending).remove(pending);
    log::info(titan::str("removed ", pending.string(), ": its save failed"));
  } catch (const Error& error) {
    log::warning(titan::str(error.what(), "; the next run removes it"));
  }
}

// ---- checking that a path names the same folder on all hosts

constexpr dist::Label kOpenLabel{.phase = "checkpoint::open_folder"};
constexpr const char* kProbeName = ".probe";
// On a network file system, other hosts may see a new file late: NFS caches a folder's contents this long.
constexpr std::chrono::milliseconds kLongestDelay(60'000);
// A killed run's last process may still hold the folder's lock for a moment.
constexpr std::chrono::seconds kLastWriterEnds(3);

struct Greeting {
  std::string host, run_id = {}, problem = {};  // the last two are rank 0's
  bool has_writer = false;                      // the problem: another run writes to the folder
  static void fields(auto& wire, auto& self) { wire(self.host, self.run_id, self.problem, self.has_writer); }
};

bool has_probe(const fs::path& folder, const std::string& run_id) {
  try {
    return read_text(folder / kProbeName) == run_id;
  } catch (const Error&) {
    return false;
  }
}

std::string folder_problem(const fs::path& folder, const std::string& run_id,
                           std::chrono::milliseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + std::min(kLongestDelay, timeout / 2);
  while (!has_probe(folder, run_id)) {
    if (std::chrono::steady_clock::now() > end)
      return titan::str("doesn't see the file that rank 0 wrote in ", folder.string());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const std::string problem = storage_of(folder).write_problem(folder);
  return problem.empty() ? "" : titan::str("can't write to ", folder.string(), ": ", problem);
}

// Removes the probes of runs that were killed at this point; earlier versions also used temporary names.
void remove_probes(const fs::path& folder) {
  for (const std::string& name : storage_of(folder).list(folder)) {
    const bool half_written = name.starts_with(titan::str(".", kProbeName, ".")) && name.ends_with(".tmp");
    if (name == kProbeName || half_written) remove_quietly(folder / name);
  }
}

// Rank 0's part, before the others look for the probe.
Greeting prepare(const fs::path& folder, OpenedFolder& opened) {
  Greeting greeting{host_name(), random_id()};
  greeting.problem = problem_of([&] {
    const auto end = std::chrono::steady_clock::now() + kLastWriterEnds;
    while (!opened.lock) {
      try {
        opened.lock.emplace(folder);
      } catch (const FolderInUse&) {
        greeting.has_writer = std::chrono::steady_clock::now() >= end;
        if (greeting.has_writer) throw;
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      }
    }
    clean_leftovers(folder, *opened.lock);
    if (opened.lock->held()) remove_probes(folder);
    write_text(folder / kProbeName, greeting.run_id);
  });
  return greeting;
}

// Returns rank 0's greeting.
Greeting greet(dist::Group& group, const Greeting& own, OpenedFolder& opened) {
  Greeting first;
  for (const std::string& text : group.all_gather_text(to_wire(own), kOpenLabel)) {
    const auto greeting = from_wire<Greeting>(text);
    if (opened.hosts.empty()) first = greeting;
    opened.hosts.push_back(greeting.host);
  }
  opened.run_id = first.run_id;
  return first;
}

}  // namespace

// A rank that failed may have found only what the others had left, so the largest of the sizes counts.
std::string disk_full_text(const fs::path& folder, const std::vector<SaveReport>& reports) {
  int64_t needed = 0, free = -1;
  std::string why;
  for (const SaveReport& report : reports) {
    if (!report.failure.empty() && report.disk_full.empty()) return "";
    if (why.empty()) why = report.disk_full;
    needed += report.file.num_bytes;
    free = std::max(free, report.free_bytes);
  }
  if (why.empty()) return "";
  const std::string files =
      reports.size() == 1 ? "the file needs " : titan::str("the files of ", reports.size(), " ranks need ");
  return titan::str("there is no room in ", folder.string(), ": ", files, size_text(needed),
                    free < 0 ? "" : titan::str(", and ", size_text(free), " was free before"), ": ", why);
}

// ---- common to both kinds of saving

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
  report.failure = problem_of([&] {
    try {
      write_pieces(job, report);
    } catch (const DiskFull& full) {
      report.disk_full = full.reason;
      report.file.num_bytes = full.needed_bytes;
      throw;
    }
    enter(SavePhase::Gather);
  });
  phase_ = SavePhase::Gather;  // from here on it waits for the other ranks
  return report;
}

void SaveWriter::write_pieces(const SaveJob& job, SaveReport& report) {
  const FileIdentity identity{run_id_, job.step, tree_.rank(), tree_.size()};
  const auto& pieces = job.staging->pieces();
  TITAN_CHECK(job.staging_failure.empty(), job.staging_failure);
  job.staging->synchronize();
  enter(SavePhase::MakeFolder);
  const fs::path folder = pending_path(options_.folder, job.step, run_id_);
  storage_of(folder).make_folder(folder);
  if (is_local(folder)) report.free_bytes = free_bytes_of(folder).value_or(-1);
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
                    .library = library_text(),
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

Verdict SaveWriter::conclude(const SaveJob& job, const std::vector<Answer>& answers,
                             const std::function<Verdict(const std::vector<SaveReport>&)>& decide) const {
  try {
    std::vector<SaveReport> reports;
    std::vector<Answer> problems = answers;
    for (size_t i = 0; i < answers.size(); ++i) {
      if (answers[i].lost) continue;
      reports.push_back(from_wire<SaveReport>(answers[i].text));
      problems[i].text = reports.back().failure;
      if (reports.back().step != job.step)
        problems[i].text = titan::str("is saving step ", reports.back().step);
    }
    const Verdict verdict = merged_problems(tree_, problems);
    return verdict.text.empty() ? decide(reports) : verdict;
  } catch (const std::exception& error) {
    const bool lost =
        std::any_of(answers.begin(), answers.end(), [](const Answer& each) { return each.lost; });
    return {titan::str(tree_.name_of(0), ": ", error.what()), lost};
  }
}

std::string SaveWriter::summary(const char* what, int64_t step, int64_t num_bytes, double seconds) {
  char text[128];
  std::snprintf(text, sizeof(text), " in %.3g s (%.3g GB/s)", seconds,
                static_cast<double>(num_bytes) / 1e9 / std::max(seconds, 1e-9));
  return titan::str(what, " of step ", step, ": ", size_text(num_bytes), text);
}

// ---- one folder that all ranks share

SaveOutcome StepWriter::write(const SaveJob& job) {
  const auto start = std::chrono::steady_clock::now();
  const SaveReport own = write_file(job);
  const auto answers = tree_.gather(to_wire(own));
  int64_t num_bytes = 0;
  Verdict verdict;
  std::string late;
  if (is_root()) {
    verdict = conclude(job, answers, [&](const std::vector<SaveReport>& reports) {
      complete(job, reports);
      for (const SaveReport& report : reports) num_bytes += report.file.num_bytes;
      return Verdict{};
    });
    if (!verdict.text.empty() && !verdict.lost) {
      std::vector<SaveReport> reports;
      for (const Answer& answer : answers) reports.push_back(from_wire<SaveReport>(answer.text));
      if (std::string full = disk_full_text(options_.folder, reports); !full.empty())
        verdict.text = std::move(full);
    }
    if (!verdict.text.empty()) remove_failed(pending_path(options_.folder, job.step, run_id_));
  } else {
    late = problem_of([&] { enter(SavePhase::Verdict); });
    if (!late.empty()) late = titan::str(tree_.name_of(tree_.rank()), ", waiting for the verdict: ", late);
  }
  verdict = tree_.spread(std::move(verdict));
  if (verdict.text.empty()) verdict.text = late;
  if (!verdict.text.empty())
    return {titan::str("checkpoint of step ", job.step, ": ", verdict.text), verdict.lost};
  if (is_root()) log::info(summary("checkpoint", job.step, num_bytes, seconds_since(start)));
  return {};
}

void StepWriter::complete(const SaveJob& job, const std::vector<SaveReport>& reports) {
  TITAN_INTERNAL_ASSERT(static_cast<int>(reports.size()) == tree_.size(), "reports of ", reports.size(),
                        " ranks");
  const fs::path folder = pending_path(options_.folder, job.step, run_id_);
  enter(SavePhase::WriteManifest);
  check_sizes(folder, tree_, reports);
  write_text(folder / kManifestName, to_text(manifest_of(job, reports)));
  enter(SavePhase::Commit);
  commit_step(options_.folder, job.step, run_id_);
  enter(SavePhase::Verdict);
}

// The checkpoint is complete: failing to remove an older one is no reason to stop.
void StepWriter::prune(int64_t step) {
  if (!is_root() || options_.keep_latest <= 0) return;
  try {
    enter(SavePhase::Prune);
    std::vector<StepEntry> entries = list_steps(options_.folder);
    // Newer steps remain from a run that was rewound to an earlier one; they don't make the new step too old.
    std::erase_if(entries, [&](const StepEntry& entry) { return entry.step > step; });
    for (const StepEntry& entry : steps_to_prune(entries, options_.keep_latest)) {
      remove_step(entry, run_id_);
      log::info(titan::str("removed ", entry.path.string(), ": ", options_.keep_latest,
                           options_.keep_latest == 1 ? " newer step is kept" : " newer steps are kept"));
    }
  } catch (const std::exception& error) {
    log::error(titan::str("checkpoint of step ", step,
                          " is complete, but an older one couldn't be removed: ", error.what()));
  }
}

OpenedFolder open_to_read(dist::Group& group) {
  OpenedFolder opened;
  greet(group, {host_name(), random_id()}, opened);
  return opened;
}

OpenedFolder open_shared_folder(dist::Group& group, const fs::path& folder,
                                std::chrono::milliseconds timeout) {
  OpenedFolder opened;
  const bool is_root = group.rank() == 0;
  const Greeting first = greet(group, is_root ? prepare(folder, opened) : Greeting{host_name()}, opened);
  if (!first.problem.empty()) {
    const std::string text =
        titan::str("checkpoints can't be saved: ", rank_on(0, opened.hosts[0]), ": ", first.problem);
    if (first.has_writer) throw ConfigError(text);  // starting again wouldn't help
    throw Error(text);
  }
  const auto problems = group.all_gather_text(folder_problem(folder, opened.run_id, timeout), kOpenLabel);
  if (is_root) remove_quietly(folder / kProbeName);
  std::string all;
  for (size_t rank = 0; rank < problems.size(); ++rank)
    if (!problems[rank].empty())
      all += titan::str(all.empty() ? "" : "; ", rank_on(rank, opened.hosts[rank]), " ", problems[rank]);
  if (!all.empty())
    throw Error("all ranks must share the folder of the checkpoints and be able to write to it: " + all);
  return opened;
}

}  // namespace titan::checkpoint::detail
