// Every operation gives the same results on a GPU as on the CPU, forward and backward.

#include <dlfcn.h>

#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <tuple>

#include <ATen/record_function.h>

#include "dist/device_backend.h"
#include "ops/attention.h"
#include "ops/operators.h"
#include "ops/reference_kernels.h"
#include "titan/ops/functional.h"
#include "titan/ops/linear.h"
#include "titan/ops/loss.h"
#include "unit/golden.h"
#include "unit/kernel_table.h"

namespace titan::ops {
namespace {

using Tensors = std::vector<at::Tensor>;

struct DeviceCase {
  const char* name;
  std::vector<std::vector<int64_t>> floating;  // inputs with gradients
  std::vector<std::vector<int64_t>> indices;   // int64 inputs below 7
  std::function<at::Tensor(const Tensors& inputs, const Tensors& indices)> run;
};

void PrintTo(const DeviceCase& value, std::ostream* out) { *out << value.name; }

// Depends on all statistics of a token.
struct MixedLoss final : TokenLoss {
  bool needs_mean() const override { return true; }
  TokenLosses evaluate(const TokenStatistics& tokens) const override {
    const at::Tensor one = at::ones_like(tokens.target);
    return {tokens.log_sum_exp.square() - 0.5 * tokens.target - tokens.mean, 2 * tokens.log_sum_exp,
            -0.5 * one, -one};
  }
};

// Attention within documents that end with token 0, on the device of `x`.
at::Tensor attention_in_documents(const Tensors& x, const Tensors& indices) {
  const Documents documents = documents_ending_with(0, indices[0].cpu(), /*pinned=*/x[0].is_cuda());
  return causal_attention(x[0], x[1], x[2], documents.to(x[0].device()));
}

const std::vector<DeviceCase>& cases() {
  static const std::vector<DeviceCase> all = {
      {"rms_norm",
       {{4, 6, 32}, {32}},
       {},
       [](const Tensors& x, const Tensors&) { return rms_norm(x[0], x[1], 1e-5); }},
      // More rows than thread blocks, whose sums of the weight's gradient are added.
      {"rms_norm_of_many_rows",
       {{300, 4096}, {4096}},
       {},
       [](const Tensors& x, const Tensors&) { return rms_norm(x[0], x[1], 1e-5); }},
      {"rms_norm_of_odd_rows",
       {{4, 33}, {33}},
       {},
       [](const Tensors& x, const Tensors&) { return rms_norm(x[0], x[1], 1e-5); }},
      {"add_rms_norm",
       {{300, 512}, {300, 512}, {512}},
       {},
       [](const Tensors& x, const Tensors&) {
         const NormedSum all = add_rms_norm(x[0], x[1], x[2], 1e-5);
         return all.sum * 0.5 + all.normed;
       }},
      {"add_rms_norm_to_nothing",
       {{4, 64}, {64}},
       {},
       [](const Tensors& x, const Tensors&) {
         const NormedSum all = add_rms_norm(x[0], {}, x[1], 1e-5);
         return all.sum * 0.5 + all.normed;
       }},
      {"add_rms_norm_of_odd_rows",
       {{4, 33}, {4, 33}, {33}},
       {},
       [](const Tensors& x, const Tensors&) {
         const NormedSum all = add_rms_norm(x[0], x[1], x[2], 1e-5);
         return all.sum * 0.5 + all.normed;
       }},
      {"rotary",
       {{2, 6, 4, 8}},
       {},
       [](const Tensors& x, const Tensors&) {
         return rotary(x[0], at::linspace(-1, 1, 48, x[0].options().dtype(at::kFloat)).view({6, 8}));
       }},
      {"rotary_at_positions",
       {{2, 6, 3, 128}},
       {{2, 6}},
       [](const Tensors& x, const Tensors& positions) {
         return rotary(x[0], at::linspace(-1, 1, 7 * 128, x[0].options().dtype(at::kFloat)).view({7, 128}),
                       positions[0]);
       }},
      {"rotary_at_positions_of_all_rows",
       {{2, 6, 3, 8}},
       {{6}},
       [](const Tensors& x, const Tensors& positions) {
         return rotary(x[0], at::linspace(-1, 1, 7 * 8, x[0].options().dtype(at::kFloat)).view({7, 8}),
                       positions[0]);
       }},
      {"joint_rotary",
       {{2, 6, 5, 16}, {2, 6, 2, 16}},
       {{2, 6}},
       [](const Tensors& x, const Tensors& positions) {
         const at::Tensor table = at::linspace(-1, 1, 7 * 16, x[0].options().dtype(at::kFloat)).view({7, 16});
         const auto [q, k] = joint_rotary(x[0], x[1], table, positions[0]);
         return at::cat({q, k}, 2);
       }},
      {"swiglu_of_many_blocks",
       {{100, 1024}, {100, 1024}},
       {},
       [](const Tensors& x, const Tensors&) { return swiglu(x[0], x[1]); }},
      {"swiglu", {{3, 40}, {3, 40}}, {}, [](const Tensors& x, const Tensors&) { return swiglu(x[0], x[1]); }},
      {"linear",
       {{5, 16}, {24, 16}, {24}},
       {},
       [](const Tensors& x, const Tensors&) { return linear(x[0], x[1], x[2], default_products()); }},
      {"causal_attention",
       {{2, 33, 4, 16}, {2, 33, 2, 16}, {2, 33, 2, 16}},
       {},
       [](const Tensors& x, const Tensors&) { return causal_attention(x[0], x[1], x[2]); }},
      {"causal_attention_of_odd_heads",
       {{2, 33, 4, 20}, {2, 33, 2, 20}, {2, 33, 2, 20}},
       {},
       [](const Tensors& x, const Tensors&) { return causal_attention(x[0], x[1], x[2]); }},
      {"causal_attention_in_documents",
       {{2, 33, 4, 16}, {2, 33, 2, 16}, {2, 33, 2, 16}},
       {{2, 33}},
       attention_in_documents},
      {"causal_attention_of_odd_heads_in_documents",
       {{2, 300, 4, 20}, {2, 300, 2, 20}, {2, 300, 2, 20}},
       {{2, 300}},
       attention_in_documents},
      // q, k and v are parts of one product's result.
      {"causal_attention_of_slices_in_documents",
       {{2, 33, 8, 16}},
       {{2, 33}},
       [](const Tensors& x, const Tensors& indices) {
         return attention_in_documents({x[0].narrow(2, 0, 4), x[0].narrow(2, 4, 2), x[0].narrow(2, 6, 2)},
                                       indices);
       }},
      {"embedding",
       {{7, 12}},
       {{3, 20}},
       [](const Tensors& x, const Tensors& indices) { return embedding(x[0], indices[0], nullptr); }},
      {"linear_cross_entropy",
       {{3, 20, 12}, {7, 12}},
       {{3, 20}},
       [](const Tensors& x, const Tensors& indices) {
         return linear_cross_entropy(x[0], x[1], indices[0],
                                     {.global_valid_tokens = 60, .products = default_products()});
       }},
      {"linear_cross_entropy_with_ignored_labels",
       {{3, 20, 12}, {4104, 12}},
       {{3, 20}},
       [](const Tensors& x, const Tensors& indices) {
         const at::Tensor labels = indices[0].masked_fill(indices[0].eq(3), kIgnoredLabel);
         return linear_cross_entropy(x[0] * 8, x[1], labels,
                                     {.global_valid_tokens = 60, .products = default_products()});
       }},
      {"smoothed_cross_entropy",
       {{3, 20, 12}, {64, 12}},
       {{3, 20}},
       [](const Tensors& x, const Tensors& indices) {
         return linear_cross_entropy(x[0], x[1], indices[0],
                                     {.global_valid_tokens = 60,
                                      .products = default_products(),
                                      .loss = std::make_shared<MixedLoss>()});
       }}};
  return all;
}

struct Outcome {
  at::Tensor output;
  Tensors gradients;
};

Outcome outcome_on(at::Device device, const DeviceCase& c, at::ScalarType dtype) {
  at::manual_seed(3);
  Tensors inputs, indices;
  for (const auto& sizes : c.floating) inputs.push_back(at::randn(sizes).to(device, dtype).requires_grad_());
  for (const auto& sizes : c.indices) indices.push_back(at::randint(7, sizes).to(device));
  Outcome outcome;
  outcome.output = c.run(inputs, indices);
  outcome.output.backward(at::linspace(-1, 1, outcome.output.numel())
                              .view(outcome.output.sizes())
                              .to(device, outcome.output.scalar_type()));
  for (const at::Tensor& input : inputs) outcome.gradients.push_back(input.grad().cpu());
  outcome.output = outcome.output.detach().cpu();
  return outcome;
}

class OnGpu : public ::testing::TestWithParam<std::tuple<DeviceCase, at::ScalarType>> {};

TEST_P(OnGpu, EqualsTheCpu) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  const auto& [c, dtype] = GetParam();
  const Outcome expected = outcome_on(at::kCPU, c, dtype),
                got = outcome_on(at::Device(at::kCUDA, 0), c, dtype);
  const double tolerance = dtype == at::kFloat ? 1e-5 : 1.5e-2;
  EXPECT_CLOSE(got.output, expected.output, tolerance);
  for (size_t i = 0; i < expected.gradients.size(); ++i)
    EXPECT_CLOSE(got.gradients[i], expected.gradients[i], tolerance) << "input " << i;
}

INSTANTIATE_TEST_SUITE_P(Operations, OnGpu,
                         ::testing::Combine(::testing::ValuesIn(cases()),
                                            ::testing::Values(at::kFloat, at::kBFloat16)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) +
                                  c10::toString(std::get<1>(info.param));
                         });

// Operations that add with atomics on a GPU: two runs would differ there.
void expect_no_atomics(at::Device device, const std::function<at::Tensor(const Tensors&)>& backward) {
  static std::set<std::string> called;
  for (const int64_t num_tokens : {7, 1025, 3072, 5000}) {
    const at::Tensor tokens = at::randint(11, {num_tokens}, at::kLong), grad = at::randn({num_tokens, 6});
    const Tensors there = {grad.to(device), tokens.to(device)};
    called.clear();
    const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
        [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
          called.insert(call.name());
          return nullptr;
        }));
    const at::Tensor sums = backward(there);
    at::removeCallback(handle);
    EXPECT_TRUE(called.contains("aten::embedding_dense_backward"));
    for (const char* name : {"aten::index_add_", "aten::index_put_", "aten::scatter_add_"})
      EXPECT_FALSE(called.contains(name)) << name;
    EXPECT_CLOSE(sums.cpu(), at::zeros({11, 6}).index_add_(0, tokens, grad), 1e-4) << num_tokens;
    EXPECT_TRUE(sums.equal(backward(there))) << num_tokens;
  }
}

TEST(Embedding, TheCompositeGradientUsesNoAtomics) {
  expect_no_atomics(at::kCPU,
                    [](const Tensors& in) { return composite::embedding_backward(in[0], in[1], 11); });
}

TEST(EmbeddingOnGpu, TheGradientUsesNoAtomics) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  expect_no_atomics(at::Device(at::kCUDA, 0), [](const Tensors& in) {
    const at::Tensor weight = at::zeros({11, 6}, in[0].options()).requires_grad_();
    ops::embedding(weight, in[1]).backward(in[0]);
    return weight.grad();
  });
}

// The entry of LibTorch that attention calls, forward and backward, for each GPU, type and head size.
TEST(AttentionOnGpu, TakesTheFastestKernel) {
  dist::DeviceBackend* gpus = dist::open_cuda_plugin();
  if (!gpus) GTEST_SKIP() << "no GPU is visible";
  static std::set<std::string> called;
  const int capability = gpus->compute_capability(0) / 10;
  const int64_t largest_for_cudnn = capability == 9 ? 256 : capability == 10 ? 128 : 0;
  const auto expected = [&](at::ScalarType dtype, int64_t features, bool grouped,
                            bool reads_beyond) -> std::string {
    const bool is_16bit = dtype == at::kBFloat16 || dtype == at::kHalf;
    if (is_16bit && features % 8 == 0 && features <= largest_for_cudnn && !reads_beyond) return "cudnn";
    if (is_16bit && features % 8 == 0 && features <= 256) return "flash";
    if ((is_16bit && features % 8 == 0 && !grouped) || (dtype == at::kFloat && features % 4 == 0))
      return "efficient";
    return "tiles";
  };
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble})
    for (const int64_t features : {20, 36, 64, 96, 128, 192, 256, 512})
      for (const bool grouped : {false, true})
        // In a ring, half of the queries attend to all keys, or all queries to half of the keys.
        for (const auto& [causal, queries, keys] : {std::tuple{false, 40, 40},
                                                    {true, 40, 40},
                                                    {false, 20, 40},
                                                    {false, 40, 20},
                                                    {false, 40, 64},
                                                    {false, 40, 192},
                                                    {true, 192, 192},
                                                    {false, 40, 128}}) {
          const auto options = at::TensorOptions().device(at::kCUDA).dtype(dtype);
          const auto heads = [&](int64_t length, int64_t count) {
            return at::ones({1, length, count, features}, options).transpose(1, 2);
          };
          const QueriesKeysValues in{heads(queries, 4), heads(keys, grouped ? 2 : 4),
                                     heads(keys, grouped ? 2 : 4)};
          called.clear();
          const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
              [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
                called.insert(call.name());
                return nullptr;
              }));
          const KernelResult result = run_attention_kernel(in, causal);
          run_attention_kernel_backward(result.out, in, result, causal);
          at::removeCallback(handle);
          for (const char* kernel : {"cudnn", "flash", "efficient"})
            for (const char* backward : {"", "_backward"})
              EXPECT_EQ(called.contains(str("aten::_scaled_dot_product_", kernel, "_attention", backward)),
                        expected(dtype, features, grouped, !causal && keys % 128 == 64) == kernel)
                  << kernel << backward << " for " << dtype << " heads of " << features
                  << (grouped ? ", grouped" : "") << (causal ? ", causal" : "") << ", " << queries
                  << " queries, " << keys << " keys";
        }
}

// Documents go through FlashAttention's entry for packed sequences wherever the table above has a fused kernel of 16
// bits with grouped heads, and otherwise through tiles.
TEST(AttentionOnGpu, PacksDocumentsForFlashAttention) {
  dist::DeviceBackend* gpus = dist::open_cuda_plugin();
  if (!gpus) GTEST_SKIP() << "no GPU is visible";
  static std::set<std::string> called;
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble})
    for (const int64_t features : {20, 36, 64, 128, 192, 256, 512}) {
      const auto options = at::TensorOptions().device(at::kCUDA).dtype(dtype);
      const auto heads = [&](int64_t count) { return at::ones({2, 40, count, features}, options); };
      const at::Tensor tokens = at::randint(9, {2, 40}, at::kLong);
      called.clear();
      const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
          [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
            called.insert(call.name());
            return nullptr;
          }));
      const at::Tensor q = heads(4), k = heads(2), v = heads(2);
      const KernelResult result = [&] {
        const Documents documents = documents_ending_with(0, tokens, /*pinned=*/true).to(at::kCUDA);
        const auto [out, sums] = causal_attention_by_libtorch(q, k, v, documents.starts, documents.longest);
        causal_attention_backward_by_libtorch(out, q, k, v, out, sums, documents.starts, documents.longest);
        return KernelResult{out, sums};
      }();
      at::removeCallback(handle);
      const bool packs =
          (dtype == at::kBFloat16 || dtype == at::kHalf) && features % 8 == 0 && features <= 256;
      for (const char* backward : {"forward", "backward"})
        EXPECT_EQ(called.contains(str("aten::_flash_attention_", backward)), packs)
            << backward << " for " << dtype << " heads of " << features;
      for (const std::string& name : called)
        EXPECT_FALSE(name.starts_with("aten::_scaled_dot_product")) << name << " doesn't know documents";
      // Equal values everywhere: each query's result is their mean.
      EXPECT_TRUE(result.out.isfinite().all().item<bool>());
      EXPECT_CLOSE(result.out.cpu(), at::ones({2, 40, 4, features}), 1e-2);
    }
}

// A grid of the kernel for packed sequences has room for 65,535. Most of these are empty.
TEST(AttentionOnGpu, TilesMoreDocumentsThanAGridTakes) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  const Tensors x = {at::randn({1, 40, 4, 64}), at::randn({1, 40, 4, 64}), at::randn({1, 40, 4, 64}),
                     at::randn({1, 40, 4, 64})};
  at::Tensor starts = at::full({65'540}, 40, at::kInt);
  starts.narrow(0, 0, 65'536).fill_(0);
  starts[65'536] = 7;
  starts[65'537] = 8;
  starts[65'538] = 30;
  const auto results = [&](at::Device device) {
    const auto on = [&](const at::Tensor& t) { return t.to(device, at::kBFloat16); };
    const at::Tensor on_device = starts.to(device);
    const auto [out, sums] = causal_attention_by_libtorch(on(x[0]), on(x[1]), on(x[2]), on_device, 22);
    const auto [q, k, v] = causal_attention_backward_by_libtorch(on(x[3]), on(x[0]), on(x[1]), on(x[2]), out,
                                                                 sums, on_device, 22);
    return Tensors{out.cpu(), q.cpu(), k.cpu(), v.cpu()};
  };
  const Tensors on_gpu = results(at::kCUDA), on_cpu = results(at::kCPU);
  for (size_t i = 0; i < on_gpu.size(); ++i) EXPECT_CLOSE(on_gpu[i], on_cpu[i], 2e-2);
}

// Bytes that a kernel has read and written, each once: virtual GPUs count them in the run. At most 1.1 times the least possible,
// its inputs and outputs, and as docs/gpu_performance.md says.
TEST(KernelsOnGpu, ReadAndWriteEveryByteOnce) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  const auto start = reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "virtual_gpu_start_counting"));
  const auto count = reinterpret_cast<uint64_t (*)(const char*, const char*, const char*)>(
      dlsym(RTLD_DEFAULT, "virtual_gpu_count"));
  if (!start) GTEST_SKIP() << "only virtual GPUs count bytes";
  const auto bf16 = at::TensorOptions().device(at::kCUDA).dtype(at::kBFloat16);
  const at::Tensor x = at::ones({4096, 512}, bf16), weight = at::ones({512}, bf16);
  const at::Tensor table = at::ones({4096, 64}, bf16.dtype(at::kFloat));
  at::Tensor logits = at::ones({256, 4096}, bf16);
  const at::Tensor labels = at::ones({256}, bf16.dtype(at::kLong));

  start();
  const auto [y, rstd] =
      find_operator<decltype(composite::rms_norm)>("titan::rms_norm").call(x, weight, 1e-5);
  find_operator<decltype(composite::rms_norm_backward)>("titan::rms_norm_backward").call(y, x, weight, rstd);
  const auto [other_y, other_rstd, sum] =
      find_operator<decltype(composite::add_rms_norm)>("titan::add_rms_norm").call(x, y, weight, 1e-5);
  const auto rotate = find_operator<decltype(composite::rotary)>("titan::rotary");
  rotate.call({x.view({1, 4096, 8, 64}), y.view({1, 4096, 8, 64})}, table, std::nullopt, false);
  find_operator<decltype(composite::swiglu)>("titan::swiglu").call(x, y);
  find_operator<decltype(composite::swiglu_backward)>("titan::swiglu_backward").call(x, y, x.clone());
  find_operator<decltype(composite::cross_entropy_)>("titan::cross_entropy_").call(logits, labels, true);
  const at::Tensor stats =
      find_operator<decltype(composite::vocabulary_stats)>("titan::vocabulary_stats").call(logits, labels, 0);
  find_operator<decltype(composite::vocabulary_grad_)>("titan::vocabulary_grad_")
      .call(logits, labels, 0, stats[0], std::nullopt);

  const auto bytes = [](const at::Tensor& t) { return static_cast<double>(t.nbytes()); };
  testing::KernelTable table_of_docs;
  const auto expect_least = [&](const char* kernel, double least) {
    table_of_docs.add(kernel, count, least);
  };
  expect_least("rms_norm_kernel", 2 * bytes(x) + bytes(weight) + bytes(rstd));
  expect_least("add_rms_norm_kernel", 4 * bytes(x) + bytes(weight) + bytes(rstd));
  expect_least("rms_norm_backward_kernel", 3 * bytes(x) + bytes(weight) + bytes(rstd));
  const double rows_of_blocks =
      static_cast<double>(count("bytes_written", nullptr, "rms_norm_backward_kernel")) - bytes(x);
  EXPECT_GT(rows_of_blocks, 0);
  expect_least("sum_of_rows_kernel", rows_of_blocks + 2 * bytes(weight));
  expect_least("rotary_kernel", 4 * bytes(x) + bytes(table));
  expect_least("swiglu_kernel", 3 * bytes(x));
  expect_least("swiglu_backward_kernel", 5 * bytes(x));
  expect_least("cross_entropy_kernel", 2 * bytes(logits) + bytes(labels));
  expect_least("vocabulary_stats_kernel", bytes(logits) + bytes(labels) + bytes(stats));
  expect_least("vocabulary_grad_kernel", 2 * bytes(logits) + bytes(labels) + bytes(stats[0]));

  const AttentionSum attended = AttentionSum::of_no_keys(x.view({1, 4096, 4, 128}));
  at::Tensor out = attended.out_BSHD, sums = attended.log_sum_exp_BHS;
  start();
  find_operator<decltype(composite::merge_attention_)>("titan::merge_attention_")
      .call(out, sums, y.view({1, 4096, 4, 128}), at::zeros_like(sums));
  expect_least("merge_attention_kernel", 2 * bytes(out) + bytes(y) + 3 * bytes(sums));

  std::vector<at::Tensor> parts;
  for (int i = 0; i < 8; ++i) parts.push_back(at::ones_like(x));
  start();
  find_operator<decltype(composite::sum_of_parts)>("titan::sum_of_parts").call(parts);
  expect_least("sum_of_parts_kernel", 9 * bytes(x));

  // SwiGLU's output with its backward.
  start();
  find_operator<decltype(composite::swiglu_with_backward)>("titan::swiglu_with_backward")
      .call(x, y, x.clone());
  expect_least("swiglu_backward_kernel", 6 * bytes(x));
  EXPECT_EQ(count("launches", nullptr, "swiglu_backward_kernel"), 1u);

  // Parameters in fp32 with states in bf16.
  at::Tensor param = at::ones({4096, 512}, bf16.dtype(at::kFloat)), grad = at::ones_like(param),
             exp_avg = at::zeros_like(x), exp_avg_sq = at::zeros_like(x);
  const at::Tensor step = at::ones({}, param.options());
  start();
  find_operator<decltype(composite::adam_)>("titan::adam_")
      .call({param}, {grad}, {exp_avg}, {exp_avg_sq}, {step}, {1, 0, param.numel(), 0}, 0.01, 0.9, 0.95, 0.1,
            1e-8, true, true, std::nullopt, std::nullopt, std::nullopt);
  expect_least("adam_kernel", 3 * bytes(param) + 4 * bytes(x));

  // The norm's backward with another gradient to add.
  start();
  find_operator<decltype(composite::add_rms_norm_backward)>("titan::add_rms_norm_backward")
      .call(y, x, sum, weight, rstd);
  expect_least("rms_norm_backward_kernel", 4 * bytes(x) + bytes(weight) + bytes(rstd));
  table_of_docs.expect_equals_docs();
}

// A rank's part of several sequences has gaps between them.
TEST(ProductsOnGpu, WriteToAPlaceWithGaps) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  const auto start = reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "virtual_gpu_start_counting"));
  const auto count = reinterpret_cast<uint64_t (*)(const char*, const char*, const char*)>(
      dlsym(RTLD_DEFAULT, "virtual_gpu_count"));
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (const Pass pass : {Pass::Forward, Pass::Backward}) {
      const at::Tensor rows = at::randn({3 * 4, 24}).to(dtype),
                       weight = at::randn({16, 24}).to(dtype).mul_(0.1);
      const at::Tensor stored = pass == Pass::Forward ? weight : weight.t().contiguous();
      const at::Tensor whole = at::full({3, 10, 16}, 9, rows.options().device(at::kCUDA));
      if (start) start();
      ASSERT_TRUE(default_products()->put_product(whole.narrow(1, 4, 4), pass, rows.to(at::kCUDA),
                                                  stored.to(at::kCUDA)));
      if (start) {
        EXPECT_EQ(count("launches", nullptr, "aten::bmm"), 1u);
        EXPECT_EQ(count("launches", nullptr, nullptr), 1u + 2) << "besides the copies from the host";
      }
      at::Tensor expected = at::full({3, 10, 16}, 9, at::kDouble);
      expected.narrow(1, 4, 4).copy_(rows.to(at::kDouble).mm(weight.to(at::kDouble).t()).view({3, 4, 16}));
      EXPECT_CLOSE(whole.cpu(), expected, dtype == at::kFloat ? 1e-6 : 1e-2);
    }
}

// Parts of the keys, the first of which comes to no keys. Sums and results are slices, as those of a rank's second chunk are; the part is what
// attention kernels return.
TEST(KernelsOnGpu, MergeAttentionAsTheComposite) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  const auto merge = find_operator<decltype(composite::merge_attention_)>("titan::merge_attention_");
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (const int64_t size : {128, 80, 20, 6}) {
      const at::Tensor q = at::empty({2, 9, 5, size});
      const AttentionSum expected = AttentionSum::of_no_keys(q), got = AttentionSum::of_no_keys(q.cuda());
      for (int part = 0; part < 3; ++part) {
        const at::Tensor out = heads_first(at::randn({2, 5, 4, size}).to(dtype)),
                         sums = at::randn({2, 5, 4}) * 4;
        AttentionSum of_cpu = expected.rows(5, 4), of_gpu = got.rows(5, 4);
        merge.call(of_cpu.out_BSHD, of_cpu.log_sum_exp_BHS, out, sums);
        merge.call(of_gpu.out_BSHD, of_gpu.log_sum_exp_BHS, out.cuda(), sums.cuda());
      }
      EXPECT_CLOSE(got.out_BSHD.cpu(), expected.out_BSHD, 1e-6);
      EXPECT_TRUE(got.log_sum_exp_BHS.cpu().narrow(2, 0, 5).isneginf().all().item<bool>());
      EXPECT_CLOSE(got.rows(5, 4).log_sum_exp_BHS.cpu(), expected.rows(5, 4).log_sum_exp_BHS, 1e-6);
    }
}

TEST(KernelsOnGpu, SumOfPartsAsTheComposite) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  const auto sum = find_operator<decltype(composite::sum_of_parts)>("titan::sum_of_parts");
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble})
    for (const int64_t size : {4096, 20, 6})
      for (const int count : {1, 2, 8, 9, 16, 17}) {
        std::vector<at::Tensor> parts, on_gpu;
        for (int i = 0; i < count; ++i) {
          parts.push_back(at::randn({3, size}).to(dtype));
          on_gpu.push_back(parts.back().cuda());
        }
        EXPECT_TRUE(at::equal(sum.call(on_gpu).cpu(), sum.call(parts)))
            << dtype << " " << size << " " << count;
      }
}

TEST(KernelsOnGpu, NaNsInOnePackOfLogitsStayInTheLoss) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  at::Tensor logits = at::zeros({2, 4096}, at::TensorOptions().device(at::kCUDA).dtype(at::kBFloat16));
  logits.select(0, 1).narrow(0, 64, 8).fill_(std::numeric_limits<float>::quiet_NaN());
  const at::Tensor labels = at::ones({2}, logits.options().dtype(at::kLong));
  const at::Tensor stats = find_operator<decltype(composite::vocabulary_stats)>("titan::vocabulary_stats")
                               .call(logits, labels, 0)
                               .cpu();
  EXPECT_NEAR(stats[0][0].item<double>(), std::log(4096.0), 1e-5);
  EXPECT_TRUE(std::isnan(stats[0][1].item<double>()));
  const at::Tensor loss =
      find_operator<decltype(composite::cross_entropy_)>("titan::cross_entropy_").call(logits, labels, true);
  EXPECT_TRUE(std::isnan(loss.item<double>()));
}

// The reference makes several wide copies of a chunk's logits, and so may not take the large chunks of the kernels.
TEST(KernelsOnGpu, LargeChunksOfLogitsAreForTheLossKernelOnly) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  const auto on_gpu = at::TensorOptions().device(at::kCUDA).dtype(at::kBFloat16);
  const at::Tensor hidden = at::ones({64, 16}, on_gpu).requires_grad_(), weight = at::ones({32, 16}, on_gpu),
                   labels = at::ones({64}, on_gpu.dtype(at::kLong));
  const auto num_chunks = [&] {
    static int chunks = 0;
    chunks = 0;
    const auto handle =
        at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& call)
                                                                  -> std::unique_ptr<at::ObserverContext> {
                                     chunks += std::string(call.name()) == "titan::cross_entropy_";
                                     return nullptr;
                                   }).scopes({at::RecordScope::FUNCTION}));
    linear_cross_entropy(
        hidden, weight, labels,
        {.global_valid_tokens = 64, .chunk_bytes = 8 * 32 * 2, .products = default_products()});
    at::removeCallback(handle);
    return chunks;
  };
  EXPECT_EQ(num_chunks(), 1);
  const ReferenceKernels reference;
  EXPECT_EQ(num_chunks(), 8);
}

// The cases themselves, also without a GPU: fp32 against float64 on the CPU.
class InFp32 : public ::testing::TestWithParam<DeviceCase> {};

TEST_P(InFp32, IsNearFloat64) {
  const DeviceCase& c = GetParam();
  const Outcome expected = outcome_on(at::kCPU, c, at::kDouble), got = outcome_on(at::kCPU, c, at::kFloat);
  EXPECT_CLOSE(got.output, expected.output, 1e-5);
  for (size_t i = 0; i < expected.gradients.size(); ++i)
    EXPECT_CLOSE(got.gradients[i], expected.gradients[i], 1e-5) << "input " << i;
}

INSTANTIATE_TEST_SUITE_P(Operations, InFp32, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace titan::ops
