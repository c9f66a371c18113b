// Every product of data, context and tensor parallelism, with activation checkpointing and accumulation,
// against the same model on one rank: the loss, the gradient norm, and every parameter's gradient. By default
// as many combinations as it takes for each pair of settings to meet; with --all all of them. The largest
// deviations are printed as JSON lines, which scripts/numerics.py collects.

#include <cmath>
#include <iterator>
#include <map>
#include <optional>

#include <gtest/gtest.h>

#include "distributed/outcome.h"
#include "titan/core/error.h"

namespace titan {
namespace {

using namespace titan::testing;  // NOLINT: these are the test's own words

std::string name_of(const train::ParallelDims& dims) {
  return str("dp_replicate ", dims.dp_replicate, " dp_shard ", dims.dp_shard, " cp ", dims.cp, " tp ",
             dims.tp);
}

std::vector<int> divisors(int number) {
  std::vector<int> result;
  for (int i = 1; i <= number; ++i)
    if (number % i == 0) result.push_back(i);
  return result;
}

std::vector<train::ParallelDims> all_dims(int size) {
  std::vector<train::ParallelDims> all;
  for (const int replicate : divisors(size))
    for (const int shard : divisors(size / replicate))
      for (const int cp : divisors(size / replicate / shard))
        all.push_back(
            {.dp_replicate = replicate, .dp_shard = shard, .cp = cp, .tp = size / replicate / shard / cp});
  return all;
}

struct Checkpointing {
  const char* name;
  std::optional<LayersPolicy> policy;
};
const Checkpointing kCheckpointing[] = {{"none", {}}, {"full", FullRecompute{}}, {"op", SelectiveOp{}}};

struct Variant {
  train::ParallelDims dims;
  TensorParallelOptions tensor;
  int micro_batches = 1;
  bool reduce_every = true;  // micro-batch; else the last one's reduction is of their sum
  size_t checkpointing = 0;
};

std::string name_of(const Variant& variant) {
  return str(name_of(variant.dims), variant.tensor.sequence_parallel ? "" : " without sequence parallel",
             variant.tensor.loss_parallel ? "" : " without loss parallel",
             variant.tensor.overlap ? " overlapped" : "", " micro-batches ", variant.micro_batches,
             " checkpointing ", kCheckpointing[variant.checkpointing].name);
}

std::unique_ptr<train::TrainableModel> build(const LlamaCase& llama, const Precision& precision,
                                             const Variant& variant, const train::Meshes& meshes) {
  auto model = build_llama(llama, precision.dtype);
  FsdpOptions fsdp = fsdp_options(precision);
  fsdp.mesh = meshes.fsdp;
  fsdp.reduce_every_micro_batch = variant.reduce_every;
  llama_spec().parallelize(*model, {.meshes = meshes,
                                    .fsdp = fsdp,
                                    .tensor = variant.tensor,
                                    .activations = {kCheckpointing[variant.checkpointing].policy, {}}});
  materialize(model->root(), kSeed);
  return model;
}

Outcome run_spread(const LlamaCase& llama, const Batch& batch, const Precision& precision,
                   const Variant& variant) {
  const train::Meshes meshes = train::build_meshes(world(), variant.dims);
  const auto model = build(llama, precision, variant, meshes);
  const int64_t num_valid = batch.num_valid();
  const Batch mine = batch.rows(meshes.dp_rank(), meshes.dp_degree());
  double loss = 0;
  for (int m = 0; m < variant.micro_batches; ++m) {
    set_last_micro_batch(model->root(), m + 1 == variant.micro_batches);
    const Batch part = mine.rows(m, variant.micro_batches);
    const at::Tensor part_loss = model->loss(part.tokens.to(device()), part.labels.to(device()), num_valid);
    part_loss.backward();
    loss += part_loss.item<double>();
  }
  return outcome_of(*model, meshes.loss.group()->sum(loss, {.phase = "test::loss"}));
}

// Rounding to 16 bits hits other summands in another layout: as far from fp32 as one rank's is allowed twice.
void expect_as_close(const Outcome& got, const Outcome& one_rank, const Outcome& exact,
                     const std::string& what, Worst& worst) {
  EXPECT_LE(std::abs(got.loss - exact.loss), 2 * std::abs(one_rank.loss - exact.loss)) << what;
  ++worst.layouts;
  worst.loss = std::max(worst.loss, std::abs(got.loss - exact.loss));
  worst.norm = std::max(worst.norm, std::abs(got.norm - exact.norm) / exact.norm);
  for (const auto& [name, gradient] : got.gradients) {
    const at::Tensor& wanted = exact.gradients.at(name);
    const double error = relative_error(gradient, wanted);
    EXPECT_LE(error, 2 * relative_error(one_rank.gradients.at(name), wanted)) << what << " " << name;
    if (error <= worst.gradient) continue;
    worst.gradient = error;
    worst.parameter = name;
  }
}

bool fits(const LlamaCase& llama, const Variant& variant) {
  const auto sizes = llama_spec().sizes(make_args(llama).get());
  std::vector<train::KeyedProblem> problems;
  train::check_divisibility(variant.dims, sizes, llama.seq_len, problems);
  const int rows = variant.dims.batch_degree() * variant.micro_batches;
  return problems.empty() && llama.rows % rows == 0;
}

// Of tensor-parallel ones also without sequence and loss parallelism, and overlapped.
std::vector<TensorParallelOptions> tensor_options(const train::ParallelDims& dims) {
  if (dims.tp == 1) return {{}};
  return {{}, {.sequence_parallel = false}, {.loss_parallel = false}, {.overlap = true}};
}

// What a variant sets, as numbers.
std::vector<int> settings_of(const Variant& variant, size_t number_of_dims) {
  const TensorParallelOptions& tensor = variant.tensor;
  const int tensor_option = !tensor.sequence_parallel ? 1
                            : !tensor.loss_parallel   ? 2
                            : tensor.overlap          ? 3
                                                      : 0;
  return {static_cast<int>(number_of_dims), tensor_option, variant.micro_batches, variant.reduce_every,
          static_cast<int>(variant.checkpointing)};
}

// The order mixes the settings, so that few variants cover the pairs.
std::vector<Variant> variants_of(const LlamaCase& llama) {
  std::vector<Variant> all;
  PairwiseCover cover;
  const auto dims = all_dims(world().size());
  for (size_t shift = 0; shift < std::size(kCheckpointing) * 4; ++shift) {
    for (size_t d = 0; d < dims.size(); ++d) {
      const auto options = tensor_options(dims[d]);
      for (size_t t = 0; t < options.size(); ++t) {
        const size_t mixed = shift + d + t;
        const Variant variant{dims[d], options[t], 1 + static_cast<int>(mixed % 2), mixed % 4 != 3,
                              mixed / 2 % std::size(kCheckpointing)};
        if (fits(llama, variant) && (cover.add(settings_of(variant, d)) || all_cases()))
          all.push_back(variant);
      }
    }
  }
  return all;
}

// ---- models

LlamaCase small(const std::string& name, std::map<std::string, config::Value> changes = {}, int64_t rows = 8,
                int64_t seq_len = 16) {
  LlamaCase llama = mini_llama();
  llama.name = name;
  llama.rows = rows;
  llama.seq_len = seq_len;
  for (auto& [key, value] : changes) llama.args[key] = value;
  return llama;
}

// Neither the vocabulary nor the feed-forward divides by 2 or 4, and at 4 ranks each has one key head.
LlamaCase odd_sizes() {
  return small("odd_sizes", {{"vocab_size", int64_t{251}},
                             {"multiple_of", int64_t{5}},
                             {"n_heads", int64_t{8}},
                             {"n_kv_heads", int64_t{4}}});
}
// Of 4 ranks one has none of the 5 features between the products.
LlamaCase tiny_feed_forward() {
  return small("tiny_feed_forward", {{"dim", int64_t{8}},
                                     {"n_kv_heads", int64_t{4}},
                                     {"multiple_of", int64_t{1}},
                                     {"ffn_dim_multiplier", 0.24}});
}
// Of 5 tokens over 4 ranks one rank has none.
LlamaCase tiny_vocabulary() {
  return small("tiny_vocabulary", {{"vocab_size", int64_t{5}}, {"n_kv_heads", int64_t{4}}});
}
LlamaCase tied() { return small("tied", {{"tie_embeddings", true}, {"n_kv_heads", int64_t{4}}}); }
LlamaCase thirds() {
  return small("thirds", {{"n_heads", int64_t{6}}, {"n_kv_heads", int64_t{3}}, {"dim", int64_t{48}}}, 6, 12);
}
LlamaCase one_row() { return small("one_row", {{"n_kv_heads", int64_t{4}}}, 1, 8); }

struct CompositionCase {
  LlamaCase llama;
  Precision precision;
};

class Composition : public ::testing::TestWithParam<CompositionCase> {};

TEST_P(Composition, EqualsOneRank) {
  const auto& [llama, precision] = GetParam();
  const Batch batch = random_batch(llama, 1);
  const Outcome reference = run_on_one_rank(llama, batch, precision);
  Worst worst;
  for (const Variant& variant : variants_of(llama))
    expect_equal(run_spread(llama, batch, precision, variant), reference,
                 precision.dtype == at::kDouble ? 1e-10 : 1e-5, name_of(variant), worst);
  worst.print("composition", llama.name, precision);
}

INSTANTIATE_TEST_SUITE_P(
    Models, Composition,
    ::testing::Values(CompositionCase{small("mini"), kFloat64}, CompositionCase{small("mini"), kFloat32},
                      CompositionCase{odd_sizes(), kFloat64}, CompositionCase{odd_sizes(), kFloat32},
                      CompositionCase{tiny_vocabulary(), kFloat64},
                      CompositionCase{tiny_feed_forward(), kFloat64}, CompositionCase{tied(), kFloat64},
                      CompositionCase{thirds(), kFloat64}, CompositionCase{one_row(), kFloat64}),
    [](const auto& info) { return info.param.llama.name + "_" + info.param.precision.name; });

TEST(CompositionIn16Bits, IsAsCloseToFp32AsOneRank) {
  const LlamaCase llama = small("mini", {{"n_kv_heads", int64_t{4}}});
  const Batch batch = random_batch(llama, 1);
  const Outcome exact = run_on_one_rank(llama, batch, kFloat32),
                one_rank = run_on_one_rank(llama, batch, kBfloat16);
  Worst worst;
  for (const Variant& variant : variants_of(llama))
    expect_as_close(run_spread(llama, batch, kBfloat16, variant), one_rank, exact, name_of(variant), worst);
  worst.print("composition", llama.name, kBfloat16);
}

// ---- labels that don't count

using Masking = void (*)(Batch&);

// All of the rows that rank 0 of a data-parallel pair reads.
void mask_one_rank(Batch& batch) { batch.labels.slice(0, 0, {}, 2).fill_(-100); }
void keep_one_token(Batch& batch) {
  const int64_t label = batch.labels.max().item<int64_t>();
  batch.labels.fill_(-100);
  batch.labels[3][5] = label;
}

class CompositionMasks : public ::testing::TestWithParam<std::pair<const char*, Masking>> {};

TEST_P(CompositionMasks, EqualOneRank) {
  const LlamaCase llama = small("masked", {{"n_kv_heads", int64_t{4}}});
  Batch batch = random_batch(llama, 2);
  GetParam().second(batch);
  const Outcome reference = run_on_one_rank(llama, batch, kFloat64);
  Worst worst;
  for (const Variant& variant : variants_of(llama))
    expect_equal(run_spread(llama, batch, kFloat64, variant), reference, 1e-10, name_of(variant), worst);
}

INSTANTIATE_TEST_SUITE_P(Labels, CompositionMasks,
                         ::testing::Values(std::pair{"OfOneRank", &mask_one_rank},
                                           std::pair{"AllButOne", &keep_one_token}),
                         [](const auto& info) { return std::string(info.param.first); });

// No token counts: the loss is 0 and so is every gradient, not NaN.
TEST(CompositionWithoutTokens, GivesZeros) {
  const LlamaCase llama = small("empty", {{"n_kv_heads", int64_t{4}}});
  Batch batch = random_batch(llama, 2);
  batch.labels.fill_(-100);
  for (const Variant& variant : variants_of(llama)) {
    const Outcome outcome = run_spread(llama, batch, kFloat32, variant);
    EXPECT_EQ(outcome.loss, 0) << name_of(variant);
    for (const auto& [name, gradient] : outcome.gradients)
      EXPECT_TRUE(gradient.eq(0).all().item<bool>()) << name_of(variant) << " " << name;
  }
}

// ---- initial weights

TEST(CompositionInit, EveryLayoutStartsFromOneRanksBits) {
  const LlamaCase llama = odd_sizes();
  auto single = build_llama(llama, at::kFloat);
  materialize(single->root(), kSeed);
  const auto expected = parameters(single->root());
  for (const Variant& variant : variants_of(llama)) {
    const train::Meshes meshes = train::build_meshes(world(), variant.dims);
    const auto model = build(llama, kFloat32, variant, meshes);
    const auto list = parameters(model->root());
    ASSERT_EQ(list.size(), expected.size());
    for (size_t i = 0; i < list.size(); ++i)
      EXPECT_TRUE(at::equal(full_tensor(list[i].data), expected[i].data.local))
          << name_of(variant) << " " << list[i].name;
  }
}

}  // namespace
}  // namespace titan
