// [Note: verifying]
// Threads take spans of a few blocks from one queue, in the order of the files: so the disk is read forwards,
// and one large file keeps all threads busy. A file is open from its first span to its last.

#include <algorithm>
#include <cstddef>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "checkpoint/format/input_file.h"
#include "checkpoint/format/names.h"
#include "checkpoint/format/rank_file.h"
#include "checkpoint/load/open_files.h"
#include "core/durable.h"
#include "titan/checkpoint/saved_state.h"
#include "titan/core/error.h"

namespace titan::checkpoint::detail {

/// A rank's file whose header was believed, and a descriptor by which its blocks are read without belief.
class FileUnderCheck;

/// Some blocks of a tensor's piece.
struct BlockSpan {
  std::shared_ptr<const FileUnderCheck> file;
  std::string tensor;
  const RankFile::Entry* entry = nullptr;  ///< of `file`
  int64_t first_block = 0;
  int64_t num_blocks = 0;
};

class VerifyWork {
 public:
  /// The arguments have to live as long.
  VerifyWork(const std::filesystem::path& step_folder, const Manifest& manifest,
             const VerifyOptions& options);

  /// Takes spans until none is left. By any number of threads.
  void run();
  /// When all are back.
  VerifyReport report();

 private:
  struct Found {
    int64_t rank = 0;
    int64_t offset = 0;  // in the file
    Damage damage;
  };

  std::optional<BlockSpan> next();
  void open_next();
  void check(const BlockSpan& span, std::vector<std::byte>& buffer);
  void add(Found found);
  void count(int64_t bytes);

  const std::filesystem::path& folder_;
  const Manifest& manifest_;
  const VerifyOptions& options_;
  const int64_t total_;
  std::mutex mutex_;
  int64_t rank_ = 0;
  std::deque<BlockSpan> spans_;
  std::vector<Found> found_;
  int64_t done_ = 0;
};

/// A message about a file, for where its path stands already.
std::string without_path(std::string message, const std::filesystem::path& path);

namespace fs = std::filesystem;

class FileUnderCheck {
 public:
  FileUnderCheck(RankFile header, int64_t rank)
      : header_(std::move(header)), bytes_(header_.path()), rank_(rank) {}
  ~FileUnderCheck() { drop(0, 0); }
  FileUnderCheck(const FileUnderCheck&) = delete;
  FileUnderCheck& operator=(const FileUnderCheck&) = delete;

  const RankFile& header() const { return header_; }
  int64_t rank() const { return rank_; }

  /// Fills `buffer`. Why it couldn't; empty: it could.
  std::string read(int64_t offset, std::span<std::byte> buffer) const {
    try {
      bytes_.read(buffer, offset);
    } catch (const Error& error) {
      return without_path(error.what(), header_.path());
    }
    return "";
  }

  /// Of what was read no page stays in memory: a large checkpoint doesn't drive everything else out of it.
  /// (What the kernel keeps in a larger unit that reaches out of these bytes goes with the whole file.)
  void drop(int64_t offset, int64_t num_bytes) const { bytes_.drop(offset, num_bytes); }

 private:
  RankFile header_;
  InputFile bytes_;
  int64_t rank_;
};

namespace {

constexpr int64_t kSpanBlocks = 8;
constexpr size_t kMostNames = 5;

// "; it has parts of 14 tensors: 'a', 'b', ...": what is lost with a file.
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

// Neighbouring blocks of which the same is said.
bool continues(const Damage& last, const Damage& next) {
  return next.num_blocks > 0 && last.first_block + last.num_blocks == next.first_block &&
         std::tie(last.file, last.tensor, last.what) == std::tie(next.file, next.tensor, next.what);
}

}  // namespace

VerifyWork::VerifyWork(const fs::path& step_folder, const Manifest& manifest, const VerifyOptions& options)
    : folder_(step_folder), manifest_(manifest), options_(options), total_(total_bytes(manifest.table)) {}

void VerifyWork::run() {
  std::vector<std::byte> buffer;
  while (const auto span = next()) check(*span, buffer);
}

std::optional<BlockSpan> VerifyWork::next() {
  const std::lock_guard lock(mutex_);
  while (spans_.empty() && rank_ < manifest_.table.world_size()) open_next();
  if (spans_.empty()) return std::nullopt;
  BlockSpan span = std::move(spans_.front());
  spans_.pop_front();
  return span;
}

void VerifyWork::open_next() {
  const int64_t rank = rank_++;
  try {
    auto file = std::make_shared<const FileUnderCheck>(open_rank_file(folder_, manifest_, rank), rank);
    for (const auto& [name, what] : header_problems(file->header(), manifest_.table, rank))
      found_.push_back({rank, 0, {file->header().path(), name, 0, 0, what}});
    for (BlockSpan& span : spans_of(file)) spans_.push_back(std::move(span));
  } catch (const Error& error) {
    const fs::path path = folder_ / file_name(rank);
    found_.push_back(
        {rank, 0, {path, "", 0, 0, without_path(error.what(), path) + tensors_text(manifest_.table, rank)}});
  }
}

void VerifyWork::check(const BlockSpan& span, std::vector<std::byte>& buffer) {
  const RankFile::Entry& entry = *span.entry;
  for (int64_t block = span.first_block; block < span.first_block + span.num_blocks; ++block) {
    const int64_t begin = block * kBlockBytes, length = std::min(kBlockBytes, entry.num_bytes - begin);
    buffer.resize(static_cast<size_t>(length));
    std::string what = span.file->read(entry.offset + begin, buffer);
    if (what.empty() && checksum_of(buffer) != entry.checksums[static_cast<size_t>(block)])
      what = "the checksum isn't that of what was written";
    if (!what.empty())
      add({span.file->rank(),
           entry.offset + begin,
           {span.file->header().path(), span.tensor, block, 1, std::move(what)}});
    count(length);
  }
  span.file->drop(entry.offset + span.first_block * kBlockBytes, span.num_blocks * kBlockBytes);
}

void VerifyWork::add(Found found) {
  const std::lock_guard lock(mutex_);
  found_.push_back(std::move(found));
}

void VerifyWork::count(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  done_ += bytes;
  if (options_.progress) options_.progress(done_, total_);
}

VerifyReport VerifyWork::report() {
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

std::string without_path(std::string message, const fs::path& path) {
  if (message.starts_with(path.string())) message.erase(0, path.string().size());
  return message.substr(std::min(message.size(), message.find_first_not_of(": ")));
}

}  // namespace titan::checkpoint::detail

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
