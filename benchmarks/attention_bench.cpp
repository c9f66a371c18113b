// Attention as a context-parallel rank computes it, without communication: the blocks of a ring with
// head-tail chunks, and the two calls over gathered keys. The first block is attention over the rank's own
// tokens.
//
//   attention_bench [--dtype fp32|bf16|fp64] [--length TOKENS] [--ranks N] [--heads H] [--kv-heads K]
//                   [--size E] [--document TOKENS] [--repetitions R] [--device cpu|cuda]
//
// `length` is that of the whole sequence, batch 1. With `--document` it measures attention within documents of that
// many tokens instead. Prints one JSON object per line: median milliseconds of
// forward and backward, and GFLOP/s, which count only what the mask leaves of the products (2 forward, 5
// backward).

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>

#include "dist/stream.h"
#include "ops/attention.h"
#include "ops/operators.h"
#include "titan/core/error.h"
#include "titan/dist/world.h"
#include "titan/ops/functional.h"

namespace {

using namespace titan;

struct Options {
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  int64_t length = 4096, ranks = 2, heads = 12, kv_heads = 4, size = 64;
  int64_t document = 0;
  int repetitions = 5;
};

Options parse(const std::vector<std::string>& args) {
  Options options;
  const std::map<std::string, at::ScalarType> dtypes = {
      {"fp32", at::kFloat}, {"bf16", at::kBFloat16}, {"fp64", at::kDouble}};
  const std::map<std::string, int64_t*> numbers = {
      {"--length", &options.length},     {"--ranks", &options.ranks}, {"--heads", &options.heads},
      {"--kv-heads", &options.kv_heads}, {"--size", &options.size},   {"--document", &options.document}};
  bool known = args.size() % 2 == 0;
  for (size_t i = 0; i + 1 < args.size(); i += 2) {
    if (args[i] == "--dtype" && dtypes.count(args[i + 1])) {
      options.dtype = dtypes.at(args[i + 1]);
    } else if (args[i] == "--device") {
      options.device = at::Device(args[i + 1]);
    } else if (args[i] == "--repetitions") {
      options.repetitions = std::stoi(args[i + 1]);
    } else if (numbers.count(args[i])) {
      *numbers.at(args[i]) = std::stoll(args[i + 1]);
    } else {
      known = false;
    }
  }
  TITAN_CHECK(known && options.repetitions > 0 && options.length % (2 * options.ranks) == 0,
              "usage: attention_bench [--dtype fp32|bf16|fp64] [--length TOKENS, a multiple of 2 x ranks] "
              "[--ranks N] [--heads H] [--kv-heads K] [--size E] [--document TOKENS] [--repetitions R] "
              "[--device cpu|cuda]");
  return options;
}

// Median milliseconds of `run`.
double time_of(const Options& options, const std::function<void()>& run) {
  std::vector<double> times;
  for (int i = 0; i < options.repetitions + 1; ++i) {
    const auto stream = dist::Stream::current(options.device);
    stream.synchronize();
    const auto start = std::chrono::steady_clock::now();
    run();
    stream.synchronize();
    const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
    if (i > 0) times.push_back(taken.count());
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

at::Tensor random(const Options& options, int64_t rows, int64_t heads) {
  return at::randn({1, rows, heads, options.size},
                   at::TensorOptions().dtype(options.dtype).device(options.device));
}

// `pairs` of a query and a key that it sees.
void print(const Options& options, const char* name, int64_t queries, int64_t keys, double pairs,
           double forward_ms, double backward_ms) {
  const double flops = 2 * pairs * static_cast<double>(options.heads * options.size);  // per product
  std::printf(
      "{\"block\": \"%s\", \"queries\": %ld, \"keys\": %ld, \"forward_ms\": %.3f, \"backward_ms\": %.3f, "
      "\"forward_gflops\": %.1f, \"backward_gflops\": %.1f}\n",
      name, static_cast<long>(queries), static_cast<long>(keys), forward_ms, backward_ms,
      2 * flops / forward_ms * 1e-6, 5 * flops / backward_ms * 1e-6);
}

// Measures attention within documents of `options.document` tokens; the last one may be shorter.
void measure_documents(const Options& options) {
  const at::Tensor tokens = at::arange(1, options.length + 1).remainder(options.document).unsqueeze(0);
  const ops::Documents documents = ops::documents_ending_with(0, tokens).to(options.device);
  const at::Tensor q = random(options, options.length, options.heads),
                   k = random(options, options.length, options.kv_heads),
                   v = random(options, options.length, options.kv_heads),
                   grad = random(options, options.length, options.heads);
  const auto forward =
      ops::find_operator<decltype(ops::causal_attention_by_libtorch)>("titan::causal_attention");
  const auto backward = ops::find_operator<decltype(ops::causal_attention_backward_by_libtorch)>(
      "titan::causal_attention_backward");
  at::Tensor out, sums;
  const double forward_ms = time_of(
      options, [&] { std::tie(out, sums) = forward.call(q, k, v, documents.starts, documents.longest); });
  const double backward_ms =
      time_of(options, [&] { backward.call(grad, q, k, v, out, sums, documents.starts, documents.longest); });
  const auto pairs_in = [](int64_t length) { return static_cast<double>(length * (length + 1) / 2); };
  print(options, "documents", options.length, options.length,
        static_cast<double>(options.length / options.document) * pairs_in(options.document) +
            pairs_in(options.length % options.document),
        forward_ms, backward_ms);
}

// Measures `queries` queries over `keys` keys; query i sees keys 0 to first_query + i.
void measure(const Options& options, const char* name, int64_t queries, int64_t keys, int64_t first_query) {
  const at::Tensor q = random(options, queries, options.heads), k = random(options, keys, options.kv_heads),
                   v = random(options, keys, options.kv_heads),
                   grad = random(options, queries, options.heads);
  const auto sum = ops::AttentionSum::of_no_keys(q);
  const double forward_ms = time_of(options, [&] { ops::attend(sum, {q, k, v}, first_query); });
  const at::Tensor out = sum.out_BSHD.to(options.dtype);
  const auto grads = ops::AttentionGradients::zeros(q, k);
  const double backward_ms = time_of(options, [&] {
    ops::attend_backward(grads, grad, {q, k, v}, {out, sum.log_sum_exp_BHS}, first_query);
  });
  double pairs = 0;
  for (int64_t i = 0; i < queries; ++i) pairs += static_cast<double>(std::min(keys, first_query + i + 1));
  print(options, name, queries, keys, pairs, forward_ms, backward_ms);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse({argv + 1, argv + argc});
    if (options.device.is_cuda())
      dist::init({.device = "cuda"});  // opens the plugin, before the first tensor
    if (options.document > 0) {
      measure_documents(options);
      return 0;
    }
    const int64_t mine = options.length / options.ranks, chunk = mine / 2;
    measure(options, "ring: own keys", mine, mine, 0);
    measure(options, "ring: keys of a rank before", mine, chunk, chunk);
    measure(options, "ring: keys of a rank after", chunk, mine, mine);
    measure(options, "gathered: rank 0's first chunk", chunk, chunk, 0);
    measure(options, "gathered: rank 0's last chunk", chunk, options.length, options.length - chunk);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
