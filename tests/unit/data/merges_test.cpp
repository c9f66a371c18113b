#include <gtest/gtest.h>
#include <map>
#include <random>
#include <string>

#include "data/tokenizer/merges.h"

namespace titan::data {
namespace {

// Merges over the alphabet {0, 1, 2, 3}: random pairs of known tokens become new ones.
MergeTable random_table(int num_merges, uint32_t seed) {
  std::mt19937 random(seed);
  MergeTable table(num_merges);
  for (int i = 0; i < num_merges; ++i) {
    int known = 4 + i;
    table.add(random() % known, random() % known, {static_cast<uint32_t>(i), 4 + i});
  }
  return table;
}

// The definition: repeatedly merges the leftmost pair of the lowest rank.
std::vector<int32_t> merge_plainly(const MergeTable& table, std::vector<int32_t> ids) {
  for (;;) {
    size_t best = ids.size();
    uint32_t rank = Merge::kNever;
    for (size_t i = 0; i + 1 < ids.size(); ++i)
      if (uint32_t r = table.find(ids[i], ids[i + 1]).rank; r < rank) best = i, rank = r;
    if (best == ids.size()) return ids;
    ids[best] = table.find(ids[best], ids[best + 1]).id;
    ids.erase(ids.begin() + best + 1);
  }
}

TEST(Merges, ShortAndLongWordsFollowTheDefinition) {
  WordMerger merger;
  std::mt19937 random(7);
  for (uint32_t seed = 0; seed < 30; ++seed) {
    MergeTable table = random_table(60, seed);
    for (size_t length : {0, 1, 2, 3, 17, 48, 49, 200, 1000}) {
      std::vector<int32_t> word(length);
      for (auto& id : word) id = random() % 4;
      auto merged = word;
      merger.merge(table, merged);
      EXPECT_EQ(merged, merge_plainly(table, word)) << "seed " << seed << ", length " << length;
    }
  }
}

TEST(Merges, UnknownPairsNeverMerge) {
  MergeTable table(1);
  table.add(1, 2, {0, 5});
  EXPECT_EQ(table.find(1, 2).id, 5);
  EXPECT_EQ(table.find(2, 1).rank, Merge::kNever);
  EXPECT_EQ(MergeTable().find(0, 0).rank, Merge::kNever);
}

// Whatever was overwritten in between, the cache returns only ids that were remembered for this very word.
TEST(WordCache, NeverConfusesTwoWords) {
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
