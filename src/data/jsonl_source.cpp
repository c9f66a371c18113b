#include "jsonl_source.h"

#include "hash.h"
#include "titan/core/error.h"

namespace titan::data {

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

}  // namespace titan::data
