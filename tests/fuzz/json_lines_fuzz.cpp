// A JSON Lines file: indexed, then every document read by the index.

#include "data/sources/source.h"

#include "core/utf8.h"
#include "fuzz.h"
#include "scratch_folder.h"

namespace titan::fuzz {
namespace {

data::LineIndexRequest request_of(const std::filesystem::path& path, size_t size, bool skip_bad_lines) {
  data::FileEntry entry{
      .path = path, .name = path.filename().string(), .size = static_cast<int64_t>(size), .modified = 0};
  return {.files = {std::move(entry)},
          .text_field = "text",
          .skip_bad_lines = skip_bad_lines,
          .cache_folder = {}};
}

void read_all(const data::JsonlSource& source) {
  std::string text;
  for (int64_t i = 0; i < source.size(); ++i) {
    source.read(i, 0, source.length(i), text);
    require(data::valid_utf8_prefix(text) == text.size(), "a document is valid UTF-8");
  }
}

// As it is done in memory of exactly the line's size: a mapped file hides a byte read behind its end.
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
  accepted(kFile, [&] { read_all(data::JsonlSource(request_of(path, file.size(), false))); });
  accepted(kFile, [&] { read_all(data::JsonlSource(request_of(path, file.size(), true))); });
}

}  // namespace titan::fuzz
