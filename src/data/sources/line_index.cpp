#include "data/sources/line_index.h"

#include <cstring>

#include "core/hash.h"
#include "core/json.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::data {
namespace {

namespace fs = std::filesystem;

constexpr char kMagic[8] = {'T', 'I', 'T', 'L', 'I', 'N', 'E', '1'};
constexpr int kReportedLines = 5;  // further broken lines are only counted

struct Header {
  char magic[8];
  uint64_t key;  // of the files, the member and the rule
  uint64_t entries;
  uint64_t checksum;  // of the entries' bytes
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

// Reads files line by line and collects documents and problems.
class Builder {
 public:
  explicit Builder(const LineIndexRequest& request) : request_(request) {}

  std::vector<LineEntry> run() {
    for (size_t i = 0; i < request_.files.size(); ++i) read_lines(static_cast<int32_t>(i));
    if (num_skipped_ > 0)
      log::warning_rank0(str("skipped ", num_skipped_, " broken lines of JSON Lines files", examples_));
    return std::move(entries_);
  }

 private:
  void read_lines(int32_t file) {
    if (request_.files[file].size == 0) return;  // an empty file can't be mapped
    MappedFile mapped(request_.files[file].path);
    std::string_view text = mapped.text();
    int64_t number = 0;
    for (size_t begin = 0; begin < text.size();) {
      size_t end = std::min(text.find('\n', begin), text.size());
      add({.offset = static_cast<int64_t>(begin),
           .line_bytes = static_cast<int64_t>(end - begin),
           .text_bytes = 0,
           .file = file},
          text.substr(begin, end - begin), ++number);
      begin = end + 1;
    }
  }

  void add(LineEntry entry, std::string_view line, int64_t number) {
    if (is_blank(line)) return;
    std::string problem;
    auto document = text_of_line(line, request_.text_field, problem);
    if (!document) return report(str(request_.files[entry.file].path.string(), ":", number, ": ", problem));
    entry.text_bytes = static_cast<int64_t>(document->size());
    entries_.push_back(entry);
  }

  void report(const std::string& problem) {
    if (!request_.skip_bad_lines)
      throw ConfigError(str(problem, " (data.on_bad_line = \"skip\" leaves such lines out)"));
    if (num_skipped_++ < kReportedLines) examples_ += "\n  " + problem;
  }

  const LineIndexRequest& request_;
  std::vector<LineEntry> entries_;
  int64_t num_skipped_ = 0;
  std::string examples_;
};

}  // namespace

namespace {

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
  std::optional<std::string> text_;  // of the last member of that name
};

}  // namespace

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
  if (path.empty() || !load(path, key)) {
    build(request);
    if (!path.empty()) save(path, key);
  }
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
    log::warning(str("index ", path.string(), " is damaged or of another version: building it again"));
    return false;
  }
  // The header is a multiple of the entries' alignment, and a mapping begins at a page.
  entries_ = {reinterpret_cast<const LineEntry*>(payload.data()), header.entries};
  mapped_ = std::move(mapped);
  return true;
}

void LineIndex::build(const LineIndexRequest& request) {
  built_ = Builder(request).run();
  entries_ = built_;
}

void LineIndex::save(const fs::path& path, uint64_t key) const {
  Header header{
      .magic = {}, .key = key, .entries = entries_.size(), .checksum = hash_bytes(bytes_of(entries_))};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  make_folder(path.parent_path());
  // Several ranks may do this at once: each writes the same bytes under its own temporary name.
  write_file_atomic(path, [&](const AppendBytes& append) {
    append(std::as_bytes(std::span(&header, 1)));
    append(std::as_bytes(entries_));
  });
}

}  // namespace titan::data
