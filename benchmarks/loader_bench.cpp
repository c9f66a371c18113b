// Speed of the data path, which reads, tokenizes and packs documents into batches, without a model.
//
//   loader_bench DATASET PATH TOKENIZER [--workers N] [--steps N] [--batch N] [--seq-len N] [--step-ms T]
//
// DATASET and PATH are like training.dataset and training.dataset_path ("" for none). Each step sleeps for T
// milliseconds (default 0) in place of computing. Prints one JSON object: build_s, tokens_per_s, and
// waiting_share, the share of the time spent waiting for data.

#include <chrono>
#include <iostream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "titan/core/error.h"
#include "titan/data/feed.h"
#include "titan/data/loader.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int run(const std::vector<std::string>& args) {
  TITAN_CHECK(args.size() >= 3 && args.size() % 2 == 1,
              "usage: loader_bench DATASET PATH TOKENIZER [--option value]...");
  std::map<std::string, int64_t> options = {
      {"--workers", 1}, {"--steps", 50}, {"--batch", 8}, {"--seq-len", 2048}, {"--step-ms", 0}};
  for (size_t i = 3; i < args.size(); i += 2) {
    TITAN_CHECK(options.contains(args[i]), "unknown option ", args[i]);
    options[args[i]] = std::stoll(args[i + 1]);
  }
  auto start = Clock::now();
  titan::data::FeedRequest request{.dataset = args[0],
                                   .source = {.path = args[1], .settings = {}, .cache_folder = {}},
                                   .tokenizer = titan::data::build_tokenizer(args[2]),
                                   .model_vocab_size = int64_t{1} << 30};
  titan::data::LoaderOptions shape{.local_batch_size = options["--batch"], .seq_len = options["--seq-len"]};
  shape.settings.num_workers = options["--workers"];
  titan::data::DataLoader loader(titan::data::build_feed(request), shape);
  double build_s = seconds_since(start);

  loader.next_step();  // starts the threads
  double waiting_s = 0;
  start = Clock::now();
  for (int64_t step = 0; step < options["--steps"]; ++step) {
    if (options["--step-ms"] > 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(options["--step-ms"]));
    auto asked = Clock::now();
    loader.next_step();
    waiting_s += seconds_since(asked);
  }
  double total_s = seconds_since(start);
  double tokens = static_cast<double>(options["--steps"] * options["--batch"] * options["--seq-len"]);
  std::cout << "{\"build_s\": " << build_s << ", \"tokens_per_s\": " << tokens / total_s
            << ", \"waiting_share\": " << waiting_s / total_s << "}" << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << "loader_bench: " << error.what() << std::endl;
    return 1;
  }
}
