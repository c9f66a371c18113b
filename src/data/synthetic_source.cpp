#include "synthetic_source.h"

#include "hash.h"
#include "titan/core/error.h"

namespace titan::data {
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

}  // namespace titan::data
