#include "titan/data/source.h"

#include <algorithm>

#include "jsonl_source.h"
#include "synthetic_source.h"
#include "text_source.h"
#include "titan/core/error.h"

namespace titan::data {
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
