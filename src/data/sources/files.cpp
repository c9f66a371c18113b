#include "data/sources/files.h"

#include <fcntl.h>
#include <fnmatch.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <set>

#include "core/hash.h"
#include "core/json.h"
#include "core/process.h"
#include "core/units.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::data {
namespace {

namespace fs = std::filesystem;
using Components = std::vector<fs::path>;

bool is_hidden(const fs::path& path) { return path.filename().string().starts_with('.'); }

// Adds the paths below `folder` that match the components from `index` on to `found`.
void expand(const fs::path& folder, const Components& components, size_t index, std::set<fs::path>& found) {
  if (index == components.size()) {
    if (fs::exists(folder)) found.insert(folder);
    return;
  }
  const std::string component = components[index].string();
  if (!is_glob(component)) return expand(folder / component, components, index + 1, found);
  bool any_depth = component == "**";
  if (any_depth) expand(folder, components, index + 1, found);
  std::error_code error;  // something that can't be listed has no matches
  for (const auto& entry : fs::directory_iterator(folder.empty() ? "." : folder, error)) {
    fs::path inner = folder / entry.path().filename();
    if (any_depth && entry.is_directory(error) && !is_hidden(inner)) expand(inner, components, index, found);
    if (!any_depth && fnmatch(component.c_str(), entry.path().filename().c_str(), FNM_PERIOD) == 0)
      expand(inner, components, index + 1, found);
  }
}

// The part of a glob before its first component with a wildcard.
fs::path glob_base(const fs::path& pattern) {
  fs::path base;
  for (auto component = pattern.begin(); !is_glob(component->string()); ++component) base /= *component;
  return base;
}

constexpr size_t kSampledFiles = 256;
constexpr int64_t kSampleBytes = 4096;

bool has_extension(const fs::path& path, const std::vector<std::string>& extensions) {
  std::string name = path.filename().string();
  return extensions.empty() || std::any_of(extensions.begin(), extensions.end(),
                                           [&](const auto& ending) { return name.ends_with(ending); });
}

// Collects files, and problems to report together.
class Listing {
 public:
  Listing(fs::path base, const std::vector<std::string>& extensions)
      : base_(std::move(base)), extensions_(extensions) {}

  void add(const fs::path& path) {
    if (!fs::is_directory(path)) return add_file(path);
    std::error_code error;
    auto walk =
        fs::recursive_directory_iterator(path, fs::directory_options::follow_directory_symlink, error);
    for (; !error && walk != fs::recursive_directory_iterator(); walk.increment(error)) {
      if (is_hidden(walk->path()))
        walk.disable_recursion_pending();
      else if (has_extension(walk->path(), extensions_) && !walk->is_directory())
        add_file(walk->path());
    }
    if (error) problems_.push_back(str("cannot list ", path.string(), ": ", error.message()));
  }

  std::vector<FileEntry> finish(const std::string& path) && {
    if (!problems_.empty()) throw ConfigError(problems_);
    if (files_.empty()) throw ConfigError(str("no files at '", path, "'", ending_with()));
    std::sort(files_.begin(), files_.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
    return std::move(files_);
  }

 private:
  void add_file(const fs::path& path) {
    struct stat status {};
    if (stat(path.c_str(), &status) != 0 || faccessat(AT_FDCWD, path.c_str(), R_OK, AT_EACCESS) != 0) {
      problems_.push_back(str("cannot read ", path.string(), ": ", errno_text(errno)));
      return;
    }
    if (!S_ISREG(status.st_mode)) return;
    int64_t modified = int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
    files_.push_back({path, path.lexically_relative(base_).generic_string(), status.st_size, modified});
  }

  std::string ending_with() const {
    std::string list;
    for (const auto& extension : extensions_) list += (list.empty() ? " ending with " : ", ") + extension;
    return list;
  }

  fs::path base_;
  const std::vector<std::string>& extensions_;
  std::vector<FileEntry> files_;
  std::vector<std::string> problems_;
};

// A file descriptor for the length of a scope.
class OpenFile {
 public:
  explicit OpenFile(const fs::path& path) : descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    TITAN_CHECK(descriptor_ >= 0, "cannot read ", path.string(), ": ", errno_text(errno));
  }
  ~OpenFile() { close(descriptor_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

// ---- the index of JSON Lines files

constexpr char kMagic[8] = {'T', 'I', 'T', 'L', 'I', 'N', 'E', '1'};
constexpr int kReportedLines = 5;  // further broken lines are only counted

struct Header {
  char magic[8];
  uint64_t key;  // key_of() the request
  uint64_t entries;
  uint64_t checksum;  // hash of the entries' bytes
};

uint64_t key_of(const LineIndexRequest& request) {
  uint64_t key = hash_bytes(request.text_field, request.skip_bad_lines);
  for (const auto& file : request.files) {
    key = hash_bytes(fs::absolute(file.path).lexically_normal().string(), key);
    key = mix(mix(key ^ static_cast<uint64_t>(file.size)) ^ static_cast<uint64_t>(file.modified));
  }
  return key;
}

std::string_view bytes_of(std::span<const LineEntry> entries) {
  return {reinterpret_cast<const char*>(entries.data()), entries.size_bytes()};
}

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r") == line.npos; }

/// Finds one string member of an object, without building a tree.
class TextMember final : public JsonEvents {
 public:
  explicit TextMember(const std::string& name) : name_(name) {}

  std::string null() override { return scalar(); }
  std::string boolean(bool) override { return scalar(); }
  std::string integer(int64_t) override { return scalar(); }
  std::string large_integer(uint64_t) override { return scalar(); }
  std::string real(double) override { return scalar(); }
  std::string text(std::string& value) override {
    if (depth_ == 1 && is_member_) text_ = std::move(value);
    return depth_ == 0 ? kNoObject : "";
  }
  std::string key(std::string& key) override {
    if (depth_ == 1) is_member_ = key == name_;
    if (depth_ == 1 && is_member_) found_ = true;
    return "";
  }
  std::string open(bool is_array) override {
    if (depth_ == 0 && is_array) return kNoObject;
    if (depth_++ == 1 && is_member_) text_.reset();
    return "";
  }
  std::string close() override {
    --depth_;
    return "";
  }
  std::string syntax_error(size_t, const std::string& reason) override { return "broken JSON: " + reason; }

  bool found() const { return found_; }
  std::optional<std::string> take() { return std::move(text_); }

 private:
  std::string scalar() {
    if (depth_ == 1 && is_member_) text_.reset();
    return depth_ == 0 ? kNoObject : "";
  }

  static constexpr const char* kNoObject = "not a JSON object";
  const std::string& name_;
  size_t depth_ = 0;
  bool is_member_ = false, found_ = false;
  std::optional<std::string> text_;  // the last member of that name
};

// For another rank that reads all files: that long even from slow storage.
std::chrono::seconds time_limit(const std::vector<FileEntry>& files) {
  constexpr int64_t kLeastBytesPerSecond = 5'000'000;
  constexpr std::chrono::seconds kLeast{300};
  return kLeast + std::chrono::seconds(total_bytes(files) / kLeastBytesPerSecond);
}

// Finds the documents of all files. Throws ConfigError for a broken line, or counts and skips it.
std::vector<LineEntry> find_documents(const LineIndexRequest& request) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<LineEntry> documents;
  int64_t num_skipped = 0;
  std::string examples;
  for (size_t i = 0; i < request.files.size(); ++i) {
    const FileEntry& file = request.files[i];
    if (file.size == 0) continue;  // an empty file can't be mapped
    const MappedFile mapped(file.path);
    const std::string_view text = mapped.text();
    int64_t number = 0;
    for (size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
      end = std::min(text.find('\n', begin), text.size());
      const std::string_view line = text.substr(begin, end - begin);
      ++number;
      if (is_blank(line)) continue;
      std::string problem;
      if (const auto document = text_of_line(line, request.text_field, problem)) {
        documents.push_back({.offset = static_cast<int64_t>(begin),
                             .line_bytes = static_cast<int64_t>(line.size()),
                             .text_bytes = static_cast<int64_t>(document->size()),
                             .file = static_cast<int32_t>(i)});
        continue;
      }
      problem = str(file.path.string(), ":", number, ": ", problem);
      if (!request.skip_bad_lines)
        throw ConfigError(str(problem, " (data.on_bad_line = \"skip\" leaves such lines out)"));
      if (num_skipped++ < kReportedLines) examples += "\n  " + problem;
    }
  }
  if (num_skipped > 0)
    log::warning(str("skipped ", num_skipped, " broken lines of JSON Lines files", examples));
  // Each rank that reads the files says so: with a cache that all of them see, it is one.
  log::info(str("indexed ", documents.size(), " documents of JSON Lines, ",
                size_text(total_bytes(request.files)), ", in ", std::lround(seconds_since(start)), " s"));
  return documents;
}

}  // namespace

bool is_glob(const std::string& path) { return path.find_first_of("*?[") != path.npos; }

std::vector<fs::path> expand_glob(const std::string& pattern) {
  const fs::path path(pattern);
  std::set<fs::path> found;
  expand({}, {path.begin(), path.end()}, 0, found);
  return {found.begin(), found.end()};
}

int64_t total_bytes(const std::vector<FileEntry>& files) {
  int64_t bytes = 0;
  for (const FileEntry& file : files) bytes += file.size;
  return bytes;
}

std::vector<FileEntry> list_files(const std::string& path, const std::vector<std::string>& extensions) {
  bool glob = is_glob(path) && !fs::exists(path);
  if (!glob && !fs::exists(path)) throw ConfigError(str("no files at '", path, "': it does not exist"));
  fs::path base = glob                     ? glob_base(path)
                  : fs::is_directory(path) ? fs::path(path)
                                           : fs::path(path).parent_path();
  Listing listing(base, extensions);
  if (!glob)
    listing.add(path);
  else
    for (const auto& match : expand_glob(path)) listing.add(match);
  return std::move(listing).finish(path);
}

uint64_t fingerprint_files(const std::vector<FileEntry>& files) {
  uint64_t hash = files.size();
  for (const auto& file : files) hash = hash_bytes(file.name, mix(hash ^ static_cast<uint64_t>(file.size)));
  // Reading everything would take as long as an epoch, and a file that changes usually changes its size.
  size_t stride = files.size() / kSampledFiles + 1;
  std::string sample;
  for (size_t i = 0; i < files.size(); i += stride) {
    int64_t count = std::min(kSampleBytes, files[i].size);
    for (int64_t begin : {int64_t{0}, (files[i].size - count) / 2, files[i].size - count}) {
      read_range(files[i], begin, count, sample);
      hash = hash_bytes(sample, hash);
    }
  }
  return hash;
}

void read_range(const FileEntry& file, int64_t begin, int64_t count, std::string& bytes) {
  OpenFile open_file(file.path);
  bytes.resize(count);
  for (int64_t done = 0; done < count;) {
    ssize_t got = pread(open_file.descriptor(), bytes.data() + done, count - done, begin + done);
    if (got < 0 && errno == EINTR) continue;
    TITAN_CHECK(got >= 0, "cannot read ", file.path.string(), ": ", errno_text(errno));
    TITAN_CHECK(got > 0, file.path.string(), " has become shorter than the ", file.size,
                " bytes it had at the start");
    done += got;
  }
}

// ---- the index of JSON Lines files

std::optional<std::string> text_of_line(std::string_view line, const std::string& text_field,
                                        std::string& problem) {
  TextMember member(text_field);
  problem = read_json(line, member);
  auto text = member.take();
  if (problem.empty() && !member.found())
    problem = str("no member '", text_field, "' (data.text_field names it)");
  else if (problem.empty() && !text)
    problem = str("member '", text_field, "' is not a string");
  return problem.empty() ? std::move(text) : std::nullopt;
}

LineIndex::LineIndex(const LineIndexRequest& request) {
  uint64_t key = key_of(request);
  fs::path path =
      request.cache_folder.empty() ? fs::path() : request.cache_folder / str("jsonl-", hex(key), ".index");
  const auto load_or_build = [&] {
    if (!path.empty() && load(path, key)) return;
    built_ = find_documents(request);
    entries_ = built_;
    if (!path.empty()) save(path, key);
  };
  if (request.in_turn && !path.empty())
    request.in_turn(load_or_build, time_limit(request.files));
  else
    load_or_build();
  if (entries_.empty())
    throw ConfigError(str("no documents in ", request.files[0].path.string(),
                          request.files.size() > 1 ? " and the other files" : ""));
}

bool LineIndex::load(const fs::path& path, uint64_t key) {
  if (!fs::exists(path) || fs::file_size(path) < sizeof(Header)) return false;
  MappedFile mapped(path);
  Header header;
  std::memcpy(&header, mapped.bytes().data(), sizeof header);
  auto payload = mapped.text().substr(sizeof header);
  bool whole = std::memcmp(header.magic, kMagic, sizeof kMagic) == 0 && header.key == key &&
               payload.size() % sizeof(LineEntry) == 0 &&
               payload.size() / sizeof(LineEntry) == header.entries && hash_bytes(payload) == header.checksum;
  if (!whole) {
    log::warning(str("index ", path.string(), " is damaged or has another version: rebuilding it"));
    return false;
  }
  // The header's size is a multiple of the entries' alignment, and a mapping begins at a page.
  entries_ = {reinterpret_cast<const LineEntry*>(payload.data()), header.entries};
  mapped_ = std::move(mapped);
  return true;
}

void LineIndex::save(const fs::path& path, uint64_t key) const {
  Header header{
      .magic = {}, .key = key, .entries = entries_.size(), .checksum = hash_bytes(bytes_of(entries_))};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  make_folder(path.parent_path());
  // Other runs may do this at once: each writes the same bytes under its own temporary name.
  write_file_atomic(path, [&](const AppendBytes& append) {
    append(std::as_bytes(std::span(&header, 1)));
    append(std::as_bytes(entries_));
  });
}

}  // namespace titan::data
