#pragma once

#include <vector>

#include "file_list.h"
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

}  // namespace titan::data
