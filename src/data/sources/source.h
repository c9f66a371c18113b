#pragma once

#include <vector>

#include "data/sources/files.h"
#include "data/sources/line_index.h"
#include "titan/data/source.h"

namespace titan::data {

/// A document is a text file.
class TextSource : public Source {
 public:
  explicit TextSource(std::vector<FileEntry> files);

  int64_t size() const override { return static_cast<int64_t>(files_.size()); }
  int64_t length(int64_t i) const override { return files_[i].size; }
  void read(int64_t i, int64_t begin, int64_t count, std::string& text) const override;
  std::string fingerprint() const override { return fingerprint_; }

 private:
  std::vector<FileEntry> files_;
  std::string fingerprint_;
};

/// The include folder beside the LibTorch that this process runs on. Throws ConfigError when there is none.
std::filesystem::path torch_headers();

/// Texts of made-up words, each document from its own counter-based stream. A word is likely to be followed
/// by one of a few others, so that a model has something to learn and a loss curve something to show.
class SyntheticSource : public Source {
 public:
  SyntheticSource(int64_t num_documents, uint64_t seed);

  int64_t size() const override { return num_documents_; }
  int64_t length(int64_t i) const override;
  void read(int64_t i, int64_t begin, int64_t count, std::string& text) const override;
  std::string fingerprint() const override;

 private:
  int64_t num_documents_;
  uint64_t seed_;
  std::vector<std::string> words_;
};

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
