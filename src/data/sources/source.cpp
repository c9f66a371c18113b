#include "data/sources/source.h"

#include <link.h>
#include <algorithm>

#include "core/hash.h"
#include "titan/core/error.h"
#include "titan/data/source.h"

namespace titan::data {
namespace {

namespace fs = std::filesystem;

// Stops at the loaded library whose name is libtorch_cpu.so.
int find_torch(dl_phdr_info* library, size_t, void* result) {
  fs::path path = library->dlpi_name;
  if (path.filename() != "libtorch_cpu.so") return 0;
  *static_cast<fs::path*>(result) = path;
  return 1;
}

}  // namespace

TextSource::TextSource(std::vector<FileEntry> files) : files_(std::move(files)) {
  int64_t bytes = 0;
  for (const auto& file : files_) bytes += file.size;
  fingerprint_ = str("text:", files_.size(), " files:", bytes, " bytes:", hex(fingerprint_files(files_)));
}

void TextSource::read(int64_t i, int64_t begin, int64_t count, std::string& text) const {
  read_range(files_[i], begin, count, text);
}

fs::path torch_headers() {
  fs::path library;
  dl_iterate_phdr(find_torch, &library);
  fs::path headers = library.parent_path().parent_path() / "include";
  if (library.empty() || !fs::is_directory(headers))
    throw ConfigError(str("data set 'cpp_headers': no headers beside the loaded LibTorch (looked for '",
                          headers.string(), "'); set training.dataset_path to a folder of C++ headers"));
  return headers;
}

namespace {

constexpr int kWords = 512;
constexpr int kFollowers = 4;  // words that may follow a word
constexpr int64_t kShortest = 256;
constexpr int64_t kLengths = 8192;  // documents have [kShortest, kShortest + kLengths) bytes

std::string make_word(uint64_t bits) {
  std::string word;
  for (uint64_t syllables = 1 + bits % 3; syllables > 0; --syllables) {
    bits = mix(bits);
    word += "bdfgklmnprstvz"[bits % 14];
    word += "aeiou"[(bits >> 8) % 5];
  }
  return word;
}

}  // namespace

SyntheticSource::SyntheticSource(int64_t num_documents, uint64_t seed)
    : num_documents_(num_documents), seed_(seed) {
  for (int i = 0; i < kWords; ++i) words_.push_back(make_word(mix(seed ^ mix(i))));
}

int64_t SyntheticSource::length(int64_t i) const {
  return kShortest + static_cast<int64_t>(mix(mix(seed_) ^ static_cast<uint64_t>(i)) % kLengths);
}

void SyntheticSource::read(int64_t i, int64_t begin, int64_t count, std::string& text) const {
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

std::string SyntheticSource::fingerprint() const {
  return str("synthetic:", num_documents_, " documents:seed ", seed_);
}

JsonlSource::JsonlSource(LineIndexRequest request)
    : files_(request.files), text_field_(request.text_field), index_(request) {
  fingerprint_ = str("jsonl:", files_.size(), " files:", index_.size(),
                     " documents:", hex(hash_bytes(text_field_, fingerprint_files(files_))));
}

void JsonlSource::read(int64_t i, int64_t begin, int64_t count, std::string& text) const {
  const LineEntry& entry = index_[i];
  const FileEntry& file = files_[entry.file];
  std::string line, problem;
  read_range(file, entry.offset, entry.line_bytes, line);
  auto document = text_of_line(line, text_field_, problem);
  TITAN_CHECK(document && static_cast<int64_t>(document->size()) == entry.text_bytes, file.path.string(),
              " has changed since it was indexed: the line at byte ", entry.offset, " is another one now ",
              problem);
  text.assign(*document, begin, count);
}

namespace {

using Extensions = config::StringList;

std::vector<FileEntry> files_of(const char* kind, const SourceRequest& request, const Extensions& usual) {
  if (request.path.empty())
    throw ConfigError(str("data set '", kind, "' needs training.dataset_path: a file, a folder or a glob"));
  const Extensions& extensions = request.settings.extensions;
  return list_files(request.path, extensions.empty() ? usual : extensions);
}

std::shared_ptr<const Source> make_text(const SourceRequest& request) {
  return std::make_shared<TextSource>(files_of("text", request, {}));
}

std::shared_ptr<const Source> make_cpp_headers(SourceRequest request) {
  if (request.path.empty()) request.path = torch_headers().string();
  return std::make_shared<TextSource>(files_of("cpp_headers", request, {".h", ".hpp", ".cuh"}));
}

std::shared_ptr<const Source> make_jsonl(const SourceRequest& request) {
  return std::make_shared<JsonlSource>(
      LineIndexRequest{.files = files_of("jsonl", request, {".jsonl", ".json"}),
                       .text_field = request.settings.text_field,
                       .skip_bad_lines = request.settings.on_bad_line == "skip",
                       .cache_folder = request.cache_folder});
}

std::shared_ptr<const Source> make_synthetic(const SourceRequest& request) {
  const DataSettings& settings = request.settings;
  return std::make_shared<SyntheticSource>(settings.synthetic_documents, seed_or_default(settings));
}

}  // namespace

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
