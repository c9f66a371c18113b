// A single text file of 1 GB feeds all lanes evenly: lanes are given parts of it, not files.

#include <algorithm>
#include <fstream>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "data/feed/feeds.h"
#include "titan/data/loader.h"
#include "titan/data/source.h"
#include "titan/data/tokenizer.h"
#include "unit/data/temporary_folder.h"

namespace titan::data {
namespace {

constexpr int64_t kBytes = 1'000'000'000;
constexpr int64_t kLanes = 8, kSeqLen = 8192;

void write_text(const std::filesystem::path& path) {
  std::string block;
  for (int64_t line = 0; block.size() < 1 << 20; ++line)
    block += "line " + std::to_string(line * 7919 % 100003) + " of a long text\n";
  std::ofstream file(path, std::ios::binary);
  for (int64_t written = 0; written < kBytes; written += static_cast<int64_t>(block.size()))
    file.write(block.data(), std::min<int64_t>(static_cast<int64_t>(block.size()), kBytes - written));
  ASSERT_TRUE(file.good()) << "the test needs 1 GB in the folder for temporary files";
}

TEST(LargeFile, FeedsAllLanesEvenly) {
  TemporaryFolder folder;
  write_text(folder.path() / "large.txt");
  const auto source = build_source(
      "text", {.path = (folder.path() / "large.txt").string(), .settings = {}, .cache_folder = {}});
  ASSERT_EQ(source->size(), 1);
  const auto feed = std::make_shared<PackedFeed>(source, std::make_shared<ByteTokenizer>(),
                                                 PackingOptions{.repeat = false});
  DataLoader loader(feed, {.global_batch_size = kLanes, .local_batch_size = kLanes, .seq_len = kSeqLen});

  std::vector<int64_t> tokens(kLanes, 0);
  for (bool more = true; more;) {
    const auto batch = loader.next();
    ASSERT_TRUE(batch.has_value());
    more = batch->valid_tokens > 0;
    const at::Tensor counts = batch->labels_BS.ne(-100).sum(1);
    for (int64_t lane = 0; lane < kLanes; ++lane)
      tokens[static_cast<size_t>(lane)] += counts[lane].item<int64_t>();
  }
  const auto [least, most] = std::minmax_element(tokens.begin(), tokens.end());
  EXPECT_GE(static_cast<double>(*least) / static_cast<double>(*most), 0.99);
  int64_t all = 0;
  for (const int64_t count : tokens) all += count;
  // A row takes seq_len + 1 tokens, as in TorchTitan: its first one is no label. BOS and EOS add a token each.
  const auto rows = static_cast<double>(kBytes) / (kSeqLen + 1);
  EXPECT_NEAR(static_cast<double>(all), static_cast<double>(kBytes) - rows, 1e4);
}

}  // namespace
}  // namespace titan::data
