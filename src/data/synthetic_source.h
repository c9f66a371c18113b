#pragma once

#include <vector>

#include "titan/data/source.h"

namespace titan::data {

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

}  // namespace titan::data
