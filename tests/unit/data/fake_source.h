#pragma once

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "titan/core/error.h"
#include "titan/data/source.h"

namespace titan::data {

/// Documents in memory, with a record of all reads and, on request, one document that can't be read.
class FakeSource : public Source {
 public:
  explicit FakeSource(std::vector<std::string> documents) : documents_(std::move(documents)) {}

  int64_t size() const override { return static_cast<int64_t>(documents_.size()); }
  int64_t length(int64_t i) const override { return static_cast<int64_t>(documents_[i].size()); }
  void read(int64_t i, int64_t begin, int64_t count, std::string& text) const override {
    TITAN_CHECK(i != unreadable, "document ", i, " can't be read");
    text = documents_.at(i).substr(begin, count);
    std::lock_guard lock(mutex_);
    reads_.emplace_back(i, begin);
  }
  std::string fingerprint() const override { return str("fake:", documents_.size()); }

  std::vector<std::pair<int64_t, int64_t>> reads() const {
    std::lock_guard lock(mutex_);
    return reads_;
  }

  int64_t unreadable = -1;

 private:
  std::vector<std::string> documents_;
  mutable std::mutex mutex_;
  mutable std::vector<std::pair<int64_t, int64_t>> reads_;
};

/// `count` documents of different lengths, the i-th of which consists of numbers that name it.
inline std::vector<std::string> numbered_documents(int64_t count) {
  std::vector<std::string> documents;
  for (int64_t i = 0; i < count; ++i) {
    std::string text;
    for (int64_t k = 0; k < 1 + i * 7 % 23; ++k) text += std::to_string(i) + "." + std::to_string(k) + " ";
    documents.push_back(text);
  }
  return documents;
}

}  // namespace titan::data
