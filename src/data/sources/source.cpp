#include "titan/data/source.h"

#include <link.h>

#include <algorithm>

#include "core/hash.h"
#include "data/sources/contents.h"
#include "data/sources/files.h"

namespace titan::data {
namespace {

namespace fs = std::filesystem;
using Extensions = config::StringList;

/// The extensions unless the config sets some.
Extensions usual_extensions(std::string_view kind) {
  if (kind == "jsonl") return {".jsonl", ".json"};
  if (kind == "cpp_headers") return {".h", ".hpp", ".cuh"};
  return {};
}

/// The files that the request's path and extensions select.
std::vector<FileEntry> files_of(const std::string& kind, const SourceRequest& request) {
  if (request.path.empty())
    throw ConfigError(str("data set '", kind, "' needs training.dataset_path: a file, a folder or a glob"));
  const Extensions& extensions = request.settings.extensions;
  auto files = list_files(request.path, extensions.empty() ? usual_extensions(kind) : extensions);
  if (request.settings.check_contents) check_contents(kind, files);
  if (total_bytes(files) == 0)
    throw ConfigError(str("the data set '", kind, "' has no text: ", files[0].path.string(),
                          files.size() > 1 ? " and the other files are empty" : " is empty"));
  return files;
}

// ---- text and cpp_headers

/// A document is a text file.
class TextSource : public Source {
 public:
  explicit TextSource(std::vector<FileEntry> files) : files_(std::move(files)) {
    fingerprint_ = str("text:", files_.size(), " files:", total_bytes(files_),
                       " bytes:", hex(fingerprint_files(files_)));
  }

  int64_t size() const override { return static_cast<int64_t>(files_.size()); }
  int64_t length(int64_t i) const override { return files_[i].size; }
  void read(int64_t i, int64_t begin, int64_t count, std::string& text) const override {
    read_range(files_[i], begin, count, text);
  }
  bool reads_fast() const override { return true; }
  std::string fingerprint() const override { return fingerprint_; }

 private:
  std::vector<FileEntry> files_;
  std::string fingerprint_;
};

std::shared_ptr<const Source> make_text(const SourceRequest& request) {
  return std::make_shared<TextSource>(files_of("text", request));
}

/// Stops at the loaded library named libtorch_cpu.so.
int find_torch(dl_phdr_info* library, size_t, void* result) {
  fs::path path = library->dlpi_name;
  if (path.filename() != "libtorch_cpu.so") return 0;
  *static_cast<fs::path*>(result) = path;
  return 1;
}

/// The include folder of the LibTorch that this process has loaded.
fs::path torch_headers() {
  fs::path library;
  dl_iterate_phdr(find_torch, &library);
  fs::path headers = library.parent_path().parent_path() / "include";
  if (library.empty() || !fs::is_directory(headers))
    throw ConfigError(str("data set 'cpp_headers': the loaded LibTorch has no headers at '", headers.string(),
                          "'; set training.dataset_path to a folder of C++ headers"));
  return headers;
}

std::shared_ptr<const Source> make_cpp_headers(SourceRequest request) {
  if (request.path.empty()) request.path = torch_headers().string();
  return std::make_shared<TextSource>(files_of("cpp_headers", request));
}

// ---- jsonl

std::string jsonl_fingerprint(const LineIndexRequest& request, std::string_view num_documents) {
  return str("jsonl:", request.files.size(), " files:", num_documents,
             " documents:", hex(hash_bytes(request.text_field, fingerprint_files(request.files))));
}

/// A document is the text member of the JSON object on one line.
class JsonlSource : public Source {
 public:
  explicit JsonlSource(const LineIndexRequest& request)
      : files_(request.files), text_field_(request.text_field), index_(request) {
    fingerprint_ = jsonl_fingerprint(request, std::to_string(index_.size()));
  }

  int64_t size() const override { return index_.size(); }
  int64_t length(int64_t i) const override { return index_[i].text_bytes; }
  void read(int64_t i, int64_t begin, int64_t count, std::string& text) const override {
    const LineEntry& entry = index_[i];
    const FileEntry& file = files_[entry.file];
    std::string line, problem;
    read_range(file, entry.offset, entry.line_bytes, line);
    auto document = text_of_line(line, text_field_, problem);
    TITAN_CHECK(document && static_cast<int64_t>(document->size()) == entry.text_bytes, file.path.string(),
                " has changed since it was indexed: the line at byte ", entry.offset, " is different now ",
                problem);
    text.assign(*document, begin, count);
  }
  bool reads_fast() const override { return true; }
  std::string fingerprint() const override { return fingerprint_; }

 private:
  std::vector<FileEntry> files_;
  std::string text_field_;
  LineIndex index_;
  std::string fingerprint_;
};

std::shared_ptr<const Source> make_jsonl(const SourceRequest& request) {
  return std::make_shared<JsonlSource>(
      LineIndexRequest{.files = files_of("jsonl", request),
                       .text_field = request.settings.text_field,
                       .skip_bad_lines = request.settings.on_bad_line == "skip",
                       .cache_folder = request.cache_folder,
                       .in_turn = request.in_turn});
}

// ---- synthetic

/// Made-up words, each document from its own counter-based random stream. Each word has a few likely
/// followers, so that a model has something to learn.
class SyntheticSource : public Source {
 public:
  SyntheticSource(int64_t num_documents, uint64_t seed) : num_documents_(num_documents), seed_(seed) {
    for (int i = 0; i < kWords; ++i) words_.push_back(make_word(mix(seed ^ mix(i))));
  }

  int64_t size() const override { return num_documents_; }
  int64_t length(int64_t i) const override {
    return kShortest + static_cast<int64_t>(mix(mix(seed_) ^ static_cast<uint64_t>(i)) % kLengths);
  }
  void read(int64_t i, int64_t begin, int64_t count, std::string& text) const override {
    text.clear();
    uint64_t state = mix(mix(seed_ + 1) ^ static_cast<uint64_t>(i));
    uint64_t word = state % kWords;
    auto end = static_cast<size_t>(begin + count);
    while (text.size() < end) {
      text += words_[word];
      state = mix(state);
      text += state % 12 == 0 ? ".\n" : " ";
      word = mix(word * kFollowers + (state >> 32) % kFollowers) % kWords;
    }
    text.resize(end);
    text.erase(0, begin);
  }
  bool reads_fast() const override { return true; }
  std::string fingerprint() const override {
    return str("synthetic:", num_documents_, " documents:seed ", seed_);
  }

 private:
  static constexpr int kWords = 512;
  static constexpr int kFollowers = 4;  // words that may follow a word
  static constexpr int64_t kShortest = 256;
  static constexpr int64_t kLengths = 8192;  // documents have [kShortest, kShortest + kLengths) bytes

  static std::string make_word(uint64_t bits) {
    std::string word;
    for (uint64_t syllables = 1 + bits % 3; syllables > 0; --syllables) {
      bits = mix(bits);
      word += "bdfgklmnprstvz"[bits % 14];
      word += "aeiou"[(bits >> 8) % 5];
    }
    return word;
  }

  int64_t num_documents_;
  uint64_t seed_;
  std::vector<std::string> words_;
};

std::shared_ptr<const Source> make_synthetic(const SourceRequest& request) {
  const DataSettings& settings = request.settings;
  return std::make_shared<SyntheticSource>(settings.synthetic_documents, settings.seed_or_default());
}

}  // namespace

void check_files(const std::string& kind, const SourceRequest& request) {
  const bool reads_files = kind == "text" || kind == "jsonl" || kind == "cpp_headers";
  if (reads_files && !(kind == "cpp_headers" && request.path.empty())) files_of(kind, request);
}

std::string quick_fingerprint(const std::string& kind, const SourceRequest& request,
                              std::string_view before) {
  if (kind == "text" || kind == "cpp_headers" || kind == "synthetic")
    return build_source(kind, request)->fingerprint();
  if (kind != "jsonl") return std::string(before);
  constexpr std::string_view kBeforeCount = " files:";
  const size_t count = std::min(before.size(), before.find(kBeforeCount) + kBeforeCount.size());
  return jsonl_fingerprint({.files = files_of(kind, request), .text_field = request.settings.text_field},
                           before.substr(count, before.find(' ', count) - count));
}

// Large enough that every cut makes progress past a damaged character.
constexpr double kSmallestPiece = 64;

void describe(config::Table<DataSettings>& table) {
  table.field(
      "extensions", &DataSettings::extensions,
      "extensions of the files taken from a folder, with the dot; empty: those of the data set (cpp_headers, "
      "jsonl) or all");
  table.field("check_contents", &DataSettings::check_contents,
              "refuse files whose names or first bytes show that they hold something other than the data set "
              "reads: compressed files, Parquet, binary data, JSON Lines as text");
  table.field("text_field", &DataSettings::text_field, "jsonl: the member with a document's text");
  table.field("on_bad_line", &DataSettings::on_bad_line, "jsonl: what to do with a broken line",
              config::one_of({"stop", "skip"}));
  table.field("token_type", &DataSettings::token_type,
              "tokens: type of the ids in .bin files without a header, such as nanoGPT's",
              config::one_of({"uint16", "uint32"}));
  table.field("piece_bytes", &DataSettings::piece_bytes,
              "documents longer than this are cut into pieces that are dealt separately; a stored token id "
              "counts as four bytes",
              config::at_least(kSmallestPiece));
  table.field("shuffle", &DataSettings::shuffle,
              "deal documents in a pseudo-random order, a new one each epoch");
  table.field("seed", &DataSettings::seed,
              "seed of the shuffled order and of synthetic text; unset: debug.seed", config::at_least(0));
  table.field("synthetic_documents", &DataSettings::synthetic_documents,
              "documents of the data set 'synthetic'", config::at_least(1));
  table.field("cache_folder", &DataSettings::cache_folder,
              "where indexes are kept; empty: data_cache in job.dump_folder");
}

Registry<SourceFactory>& source_kinds() {
  // Made at first use, so that a user's shared object can add to it from a static initializer.
  static Registry<SourceFactory>& kinds = *[] {
    auto* built_in = new Registry<SourceFactory>("data set");
    built_in->add("text", make_text);
    built_in->add("jsonl", make_jsonl);
    built_in->add("synthetic", make_synthetic);
    built_in->add("cpp_headers", make_cpp_headers);
    return built_in;
  }();
  return kinds;
}

std::shared_ptr<const Source> build_source(const std::string& name, const SourceRequest& request) {
  std::string key = name;
  std::transform(key.begin(), key.end(), key.begin(), [](unsigned char c) { return std::tolower(c); });
  auto source = source_kinds().get(key)(request);
  TITAN_CHECK(source && source->size() > 0, "the data set '", key, "' has no documents");
  return source;
}

}  // namespace titan::data
