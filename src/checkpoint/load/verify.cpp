// [Note: verifying] Threads take spans of a few blocks from one queue, in the order of the files: so the disk
// is read forwards, and one large file keeps all threads busy. A file is open from its first span to its
// last.

#include <algorithm>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <tuple>

#include "checkpoint/format/names.h"
#include "checkpoint/format/rank_file.h"
#include "checkpoint/format/stored_files.h"
#include "checkpoint/load/open_files.h"
#include "core/threads.h"
#include "titan/checkpoint/saved_state.h"
#include "titan/core/error.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kSpanBlocks = 8;
constexpr size_t kMostNames = 5;

// For a message about a file whose path is shown already.
std::string without_path(std::string message, const fs::path& path) {
  if (message.starts_with(path.string())) message.erase(0, path.string().size());
  return message.substr(std::min(message.size(), message.find_first_not_of(": ")));
}

// A rank's file whose header was checked, and another descriptor that reads blocks without checking them.
class FileUnderCheck {
 public:
  FileUnderCheck(RankFile header, int64_t rank)
      : header_(std::move(header)), bytes_(header_.path()), rank_(rank) {}
  ~FileUnderCheck() { drop(0, 0); }
  FileUnderCheck(const FileUnderCheck&) = delete;
  FileUnderCheck& operator=(const FileUnderCheck&) = delete;

  const RankFile& header() const { return header_; }
  int64_t rank() const { return rank_; }

  // Fills `buffer`, or returns why it can't.
  std::string read(int64_t offset, std::span<std::byte> buffer) const {
    try {
      bytes_.read(buffer, offset);
    } catch (const Error& error) {
      return without_path(error.what(), header_.path());
    }
    return "";
  }

  // No page that was read stays in memory: a large checkpoint doesn't push everything else out. (What the
  // kernel keeps in a larger unit that extends beyond these bytes goes with the whole file.)
  void drop(int64_t offset, int64_t num_bytes) const { bytes_.drop(offset, num_bytes); }

 private:
  RankFile header_;
  detail::InputFile bytes_;
  int64_t rank_;
};

// Some blocks of a tensor's piece.
struct BlockSpan {
  std::shared_ptr<const FileUnderCheck> file;
  std::string tensor;
  const RankFile::Entry* entry = nullptr;  // of `file`
  int64_t first_block = 0;
  int64_t num_blocks = 0;
};

std::vector<BlockSpan> spans_of(const std::shared_ptr<const FileUnderCheck>& file) {
  std::vector<BlockSpan> spans;
  for (const std::string& name : file->header().names()) {
    const RankFile::Entry& entry = file->header().entry(name);
    const auto num_blocks = static_cast<int64_t>(entry.checksums.size());
    for (int64_t block = 0; block < num_blocks; block += kSpanBlocks)
      spans.push_back({file, name, &entry, block, std::min(kSpanBlocks, num_blocks - block)});
  }
  return spans;
}

// The tensors that are lost with a file: "; it has parts of 14 tensors: 'a', 'b', ...".
std::string tensors_text(const StateTable& table, int64_t rank) {
  const std::vector<Piece> pieces = table.pieces_of(rank);
  std::string text =
      titan::str("; it has parts of ", pieces.size(), pieces.size() == 1 ? " tensor" : " tensors");
  for (size_t i = 0; i < std::min(pieces.size(), kMostNames); ++i)
    text += titan::str(i == 0 ? ": '" : ", '", table.tensors()[pieces[i].tensor].name, "'");
  return text + (pieces.size() > kMostNames ? ", ..." : "");
}

int64_t total_bytes(const StateTable& table) {
  int64_t bytes = 0;
  for (const StateTensor& tensor : table.tensors()) {
    int64_t elements = 1;
    for (int64_t length : tensor.shape) elements *= length;
    bytes += elements * static_cast<int64_t>(c10::elementSize(tensor.dtype));
  }
  return bytes;
}

// Neighbouring blocks with the same problem.
bool continues(const Damage& last, const Damage& next) {
  return next.num_blocks > 0 && last.first_block + last.num_blocks == next.first_block &&
         std::tie(last.file, last.tensor, last.what) == std::tie(next.file, next.tensor, next.what);
}

class VerifyWork {
 public:
  // The arguments outlive it.
  VerifyWork(const fs::path& step_folder, const Manifest& manifest, const VerifyOptions& options)
      : folder_(step_folder), manifest_(manifest), options_(options), total_(total_bytes(manifest.table)) {}

  // Takes spans until none is left. By any number of threads.
  void run() {
    std::vector<std::byte> buffer;
    while (const auto span = next()) check(*span, buffer);
  }

  // After all threads have returned.
  VerifyReport report() {
    std::stable_sort(found_.begin(), found_.end(), [](const Found& a, const Found& b) {
      return std::tie(a.rank, a.offset) < std::tie(b.rank, b.offset);
    });
    VerifyReport report{.damages = {},
                        .num_files = manifest_.table.world_size(),
                        .num_tensors = static_cast<int64_t>(manifest_.table.tensors().size()),
                        .num_bytes = done_};
    for (Found& found : found_) {
      if (!report.damages.empty() && continues(report.damages.back(), found.damage))
        ++report.damages.back().num_blocks;
      else
        report.damages.push_back(std::move(found.damage));
    }
    return report;
  }

 private:
  struct Found {
    int64_t rank = 0;
    int64_t offset = 0;  // in the file
    Damage damage;
  };

  std::optional<BlockSpan> next() {
    const std::lock_guard lock(mutex_);
    while (spans_.empty() && rank_ < manifest_.table.world_size()) open_next();
    if (spans_.empty()) return std::nullopt;
    BlockSpan span = std::move(spans_.front());
    spans_.pop_front();
    return span;
  }

  void open_next() {
    const int64_t rank = rank_++;
    try {
      auto file =
          std::make_shared<const FileUnderCheck>(detail::open_rank_file(folder_, manifest_, rank), rank);
      for (const auto& [name, what] : detail::header_problems(file->header(), manifest_.table, rank))
        found_.push_back({rank, 0, {file->header().path(), name, 0, 0, what}});
      for (BlockSpan& span : spans_of(file)) spans_.push_back(std::move(span));
    } catch (const Error& error) {
      const fs::path path = folder_ / file_name(rank);
      const std::string what = without_path(error.what(), path) + tensors_text(manifest_.table, rank);
      found_.push_back({rank, 0, {path, "", 0, 0, what}});
    }
  }

  void check(const BlockSpan& span, std::vector<std::byte>& buffer) {
    const RankFile::Entry& entry = *span.entry;
    for (int64_t block = span.first_block; block < span.first_block + span.num_blocks; ++block) {
      const int64_t begin = block * kBlockBytes, length = std::min(kBlockBytes, entry.num_bytes - begin);
      buffer.resize(static_cast<size_t>(length));
      std::string what = span.file->read(entry.offset + begin, buffer);
      if (what.empty() && detail::checksum_of(buffer) != entry.checksums[static_cast<size_t>(block)])
        what = "the bytes don't match their checksum";
      const std::lock_guard lock(mutex_);
      if (!what.empty())
        found_.push_back({span.file->rank(),
                          entry.offset + begin,
                          {span.file->header().path(), span.tensor, block, 1, std::move(what)}});
      done_ += length;
      if (options_.progress) options_.progress(done_, total_);
    }
    span.file->drop(entry.offset + span.first_block * kBlockBytes, span.num_blocks * kBlockBytes);
  }

  const fs::path& folder_;
  const Manifest& manifest_;
  const VerifyOptions& options_;
  const int64_t total_;

  std::mutex mutex_;
  int64_t rank_ = 0;
  std::deque<BlockSpan> spans_;
  std::vector<Found> found_;
  int64_t done_ = 0;
};

VerifyReport manifest_report(const fs::path& path, const std::string& what) {
  VerifyReport report;
  report.damages.push_back({path, "", 0, 0, without_path(what, path)});
  return report;
}

}  // namespace

std::string to_string(const Damage& damage) {
  const std::string tensor = damage.tensor.empty() ? "" : titan::str(": tensor '", damage.tensor, "'");
  std::string blocks;
  if (damage.num_blocks == 1) blocks = titan::str(", block ", damage.first_block);
  if (damage.num_blocks > 1)
    blocks = titan::str(", blocks ", damage.first_block, " to ", damage.first_block + damage.num_blocks - 1);
  return titan::str(damage.file.string(), tensor, blocks, ": ", damage.what);
}

VerifyReport verify_step(const fs::path& step_folder, const VerifyOptions& options) {
  const Storage::Kind kind = detail::kind_of(step_folder);
  if (kind == Storage::Kind::Nothing || kind == Storage::Kind::File)
    throw Error(titan::str("there is no folder ", step_folder.string()));
  const fs::path path = step_folder / kManifestName;
  if (!detail::is_file(path)) return manifest_report(path, detail::not_a_file(path).substr(1));
  Manifest manifest;
  try {
    manifest = read_manifest(step_folder);
  } catch (const Error& error) {
    return manifest_report(path, error.what());
  }
  VerifyWork work(step_folder, manifest, options);
  const int num_threads = std::max(1, options.num_threads);
  run_tasks(num_threads, static_cast<size_t>(num_threads), [&](size_t) { work.run(); });
  VerifyReport report = work.report();
  if (const auto problem = detail::step_name_problem(step_folder, manifest))
    report.damages.insert(report.damages.begin(), {path, "", 0, 0, without_path(*problem, path)});
  return report;
}

}  // namespace titan::checkpoint
