#pragma once

#include "line_index.h"
#include "titan/data/source.h"

namespace titan::data {

/// A document is the text member of one line's JSON object.
class JsonlSource : public Source {
 public:
  explicit JsonlSource(LineIndexRequest request);

  int64_t size() const override { return index_.size(); }
  int64_t length(int64_t i) const override { return index_[i].text_bytes; }
  void read(int64_t i, int64_t begin, int64_t count, std::string& text) const override;
  std::string fingerprint() const override { return fingerprint_; }

 private:
  std::vector<FileEntry> files_;
  std::string text_field_;
  LineIndex index_;
  std::string fingerprint_;
};

}  // namespace titan::data
