// Indexes a JSON Lines file, then reads every document by the index.

#include "data/sources/files.h"

#include "core/utf8.h"
#include "fuzz.h"
#include "scratch_folder.h"
#include "titan/data/source.h"

namespace titan::fuzz {
namespace {

void read_all(const std::filesystem::path& path, const char* on_bad_line) {
  data::SourceRequest request{.path = path.string(), .settings = {}, .cache_folder = {}};
  request.settings.on_bad_line = on_bad_line;
  const auto built = data::build_source("jsonl", request);
  const data::Source& source = *built;
  std::string text;
  for (int64_t i = 0; i < source.size(); ++i) {
    source.read(i, 0, source.length(i), text);
    require(valid_utf8_prefix(text) == text.size(), "a document is valid UTF-8");
  }
}

// Copies the line to memory of exactly its size: a mapped file would hide a read past the line's end.
void read_lines(std::string_view file) {
  while (!file.empty()) {
    const size_t end = std::min(file.find('\n'), file.size());
    const std::vector<char> line(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(end));
    std::string problem;
    const auto document = data::text_of_line({line.data(), line.size()}, "text", problem);
    require(document.has_value() == problem.empty(), "a line is a document or has a problem");
    file.remove_prefix(std::min(end + 1, file.size()));
  }
}

}  // namespace

void fuzz_input(std::string_view file) {
  static const ScratchFolder folder;
  constexpr const char* kFile = "strange.jsonl";
  read_lines(file);
  const auto path = folder.write(kFile, file);
  accepted(kFile, [&] { read_all(path, "stop"); });
  accepted(kFile, [&] { read_all(path, "skip"); });
}

}  // namespace titan::fuzz
