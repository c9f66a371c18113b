#include "data/word_cache.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>

namespace titan::data {
namespace {

// Whatever was overwritten in between, what the cache gives is what was remembered for just this word.
TEST(WordCache, NeverMistakesAWord) {
  WordCache cache;
  std::map<std::string, std::vector<int32_t>> known;
  std::mt19937 random(3);
  int found = 0;
  for (int i = 0; i < 200'000; ++i) {
    std::string word(1 + random() % 60, 'a');
    for (size_t k = 0; k < 3; ++k) word[random() % word.size()] = static_cast<char>(random() % 4 * 64);
    std::vector<int32_t> ids;
    auto entry = known.find(word);
    if (cache.append(word, ids)) {
      ASSERT_NE(entry, known.end()) << "a word that was never remembered";
      ASSERT_EQ(ids, entry->second);
      ++found;
      continue;
    }
    if (entry == known.end()) {
      std::vector<int32_t> fresh(1 + random() % 25);
      for (auto& id : fresh) id = random() % 100'000;
      entry = known.emplace(word, fresh).first;
    }
    cache.remember(word, entry->second);
  }
  EXPECT_GT(found, 1000);
}

}  // namespace
}  // namespace titan::data
