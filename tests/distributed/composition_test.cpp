// Compares combinations of data, context and tensor parallelism, with activation checkpointing and
// accumulation, with the same model on one rank: the loss, the gradient norm, and every parameter's gradient.
// By default it runs enough combinations to cover each pair of settings, with --all all of them. The largest
// deviations are printed as JSON lines, which scripts/numerics.py collects. Each test has layouts for every
// number of ranks; 3 ranks use models whose sizes are multiples of 3.

#include <cmath>
#include <iterator>
#include <map>
#include <optional>
#include <set>

#include <gtest/gtest.h>

#include "distributed/outcome.h"
#include "job/settings.h"
#include "titan/core/error.h"

namespace titan {
namespace {

using namespace titan::testing;  // NOLINT: the test's own names

std::string name_of(const train::ParallelDims& dims) {
  return str("dp_replicate ", dims.dp_replicate, " dp_shard ", dims.dp_shard, " cp ", dims.row_degree(),
             " tp ", dims.tp);
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
        all.push_back({.dp_replicate = replicate,
                       .dp_shard = shard,
                       .rows = {{"cp", cp}},
                       .tp = size / replicate / shard / cp});
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
  bool reduce_every = true;  // reduce in every micro-batch; otherwise only in the last one
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
    const at::Tensor part_loss = loss_of(*model, part, num_valid);
    part_loss.backward();
    loss += part_loss.item<double>();
  }
  return outcome_of(*model, meshes.loss.group()->sum(loss, {.phase = "test::loss"}));
}

// || a - b || of all gradients together.
double distance(const Outcome& a, const Outcome& b) {
  double sum = 0;
  for (const auto& [name, gradient] : a.gradients)
    sum += (gradient.to(at::kDouble) - b.gradients.at(name).to(at::kDouble)).pow(2).sum().item<double>();
  return std::sqrt(sum);
}

// Rounding to 16 bits affects other summands in another layout, so twice one rank's distance from fp32 is
// allowed. One rank's norm may be right by chance, so the difference of norms is compared with the distance
// of the gradients, which it can't exceed.
void expect_as_close(const Outcome& got, const Outcome& one_rank, const Outcome& exact,
                     const std::string& what, Worst& worst) {
  EXPECT_LE(std::abs(got.loss - exact.loss), 2 * std::abs(one_rank.loss - exact.loss)) << what;
  EXPECT_LE(std::abs(got.norm - exact.norm), 2 * distance(one_rank, exact)) << what;
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
  const int64_t row_parts = variant.dims.row_degree();
  // Refused: documents, and sequences that the load balancer can't cut into two chunks for each rank.
  if (row_parts > 1 && (has_documents(llama) || llama.seq_len % (2 * row_parts) != 0)) return false;
  return problems.empty() && llama.rows % rows == 0;
}

// Tensor-parallel layouts also run without sequence and loss parallelism, and with overlap.
std::vector<TensorParallelOptions> tensor_options(const train::ParallelDims& dims) {
  if (dims.tp == 1) return {{}};
  return {{}, {.sequence_parallel = false}, {.loss_parallel = false}, {.overlap = true}};
}

// A variant's settings, as numbers.
std::vector<int> settings_of(const Variant& variant, size_t number_of_dims) {
  const TensorParallelOptions& tensor = variant.tensor;
  const int tensor_option = !tensor.sequence_parallel ? 1
                            : !tensor.loss_parallel   ? 2
                            : tensor.overlap          ? 3
                                                      : 0;
  return {static_cast<int>(number_of_dims), tensor_option, variant.micro_batches, variant.reduce_every,
          static_cast<int>(variant.checkpointing)};
}

// The order mixes the settings, so that few variants cover the pairs. With a single micro-batch the same
// settings repeat after half of the shifts.
std::vector<Variant> variants_of(const LlamaCase& llama) {
  std::vector<Variant> all;
  std::set<std::vector<int>> seen;
  PairwiseCover cover;
  const auto dims = all_dims(world().size());
  for (size_t shift = 0; shift < std::size(kCheckpointing) * 4; ++shift) {
    for (size_t d = 0; d < dims.size(); ++d) {
      const auto options = tensor_options(dims[d]);
      for (size_t t = 0; t < options.size(); ++t) {
        const size_t mixed = shift + d + t;
        const Variant variant{dims[d], options[t], 1 + static_cast<int>(mixed % 2), mixed % 4 != 3,
                              mixed / 2 % std::size(kCheckpointing)};
        const std::vector<int> settings = settings_of(variant, d);
        if (!fits(llama, variant) || !seen.insert(settings).second) continue;
        if (cover.add(settings) || all_cases()) all.push_back(variant);
      }
    }
  }
  TITAN_CHECK(!all.empty(), "'", llama.name, "' fits no layout of ", world().size(),
              " ranks, so its test would compare nothing");
  return all;
}

// ---- models

// Whether there are 3 (or 6) ranks, so that sizes must divide by 3.
bool in_thirds() { return world().size() % 3 == 0; }
int64_t by_ranks(int64_t usual, int64_t of_thirds) { return in_thirds() ? of_thirds : usual; }

// 4 heads and 2 key heads; 6 and 3 for a multiple of 3 ranks.
int64_t heads() { return by_ranks(4, 6); }
int64_t key_heads() { return by_ranks(4, 3); }

LlamaCase small(const std::string& name, std::map<std::string, config::Value> changes = {}) {
  LlamaCase llama = mini_llama();
  llama.name = name;
  llama.rows = by_ranks(8, 6);
  llama.seq_len = by_ranks(16, 12);
  llama.args["dim"] = by_ranks(64, 48);
  llama.args["n_heads"] = heads();
  llama.args["n_kv_heads"] = by_ranks(2, 3);
  for (auto& [key, value] : changes) llama.args[key] = value;
  return llama;
}

// Vocabulary and feed-forward aren't multiples of 2, 3 or 4, and each of 3 or 4 ranks has one key head.
LlamaCase odd_sizes() {
  return small("odd_sizes", {{"vocab_size", int64_t{251}},
                             {"multiple_of", int64_t{5}},
                             {"n_heads", by_ranks(8, 6)},
                             {"n_kv_heads", key_heads()}});
}
// There are 4 features between the products for 3 ranks and 5 for 4 ranks, so one rank has none.
LlamaCase tiny_feed_forward() {
  return small("tiny_feed_forward", {{"dim", by_ranks(8, 12)},
                                     {"n_kv_heads", key_heads()},
                                     {"multiple_of", int64_t{1}},
                                     {"ffn_dim_multiplier", in_thirds() ? 0.14 : 0.24}});
}
// The vocabulary has 4 tokens for 3 ranks and 5 for 4 ranks, so one rank has none.
LlamaCase tiny_vocabulary() {
  LlamaCase llama = small("tiny_vocabulary", {{"vocab_size", by_ranks(5, 4)}, {"n_kv_heads", key_heads()}});
  llama.loss = "label_smoothing";
  return llama;
}
LlamaCase tied() {
  LlamaCase llama = small("tied", {{"tie_embeddings", true}, {"n_kv_heads", key_heads()}});
  llama.loss = "z_loss";
  return llama;
}
LlamaCase one_row() {
  LlamaCase llama = small("one_row", {{"n_kv_heads", key_heads()}});
  llama.rows = 1;
  llama.seq_len = by_ranks(8, 6);
  return llama;
}

LlamaCase mini() { return small("mini"); }
LlamaCase documents() { return small("documents", in_documents()); }

// The model is built in the test, where the number of ranks is known.
struct CompositionCase {
  const char* name;
  LlamaCase (*make_llama)();
  Precision precision;
};

class Composition : public ::testing::TestWithParam<CompositionCase> {};

TEST_P(Composition, EqualsOneRank) {
  const auto& [name, make_llama, precision] = GetParam();
  const LlamaCase llama = make_llama();
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
    ::testing::Values(CompositionCase{"mini", mini, kFloat64}, CompositionCase{"mini", mini, kFloat32},
                      CompositionCase{"odd_sizes", odd_sizes, kFloat64},
                      CompositionCase{"odd_sizes", odd_sizes, kFloat32},
                      CompositionCase{"tiny_vocabulary", tiny_vocabulary, kFloat64},
                      CompositionCase{"tiny_feed_forward", tiny_feed_forward, kFloat64},
                      CompositionCase{"tied", tied, kFloat64}, CompositionCase{"one_row", one_row, kFloat64},
                      CompositionCase{"documents", documents, kFloat64},
                      CompositionCase{"documents", documents, kFloat32}),
    [](const auto& info) { return str(info.param.name, "_", info.param.precision.name); });

TEST(CompositionIn16Bits, IsAsCloseToFp32AsOneRank) {
  const LlamaCase llama = small("mini", {{"n_kv_heads", key_heads()}});
  const Batch batch = random_batch(llama, 1);
  const Outcome exact = run_on_one_rank(llama, batch, kFloat32),
                one_rank = run_on_one_rank(llama, batch, kBfloat16);
  Worst worst;
  for (const Variant& variant : variants_of(llama))
    expect_as_close(run_spread(llama, batch, kBfloat16, variant), one_rank, exact, name_of(variant), worst);
  worst.print("composition", llama.name, kBfloat16);
}

// ---- ignored labels

using Masking = void (*)(Batch&);

// Masks all rows that rank 0 of two (or three) data-parallel ranks reads.
void mask_one_rank(Batch& batch) { batch.labels.slice(0, 0, {}, by_ranks(2, 3)).fill_(-100); }
void keep_one_token(Batch& batch) {
  const int64_t label = batch.labels.max().item<int64_t>();
  batch.labels.fill_(-100);
  batch.labels[3][5] = label;
}

class CompositionMasks : public ::testing::TestWithParam<std::pair<const char*, Masking>> {};

TEST_P(CompositionMasks, EqualOneRank) {
  const LlamaCase llama = small("masked", {{"n_kv_heads", key_heads()}});
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

// All labels are ignored, so the loss and all gradients are 0, not NaN.
TEST(CompositionWithoutTokens, GivesZeros) {
  const LlamaCase llama = small("empty", {{"n_kv_heads", key_heads()}});
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

TEST(CompositionInit, EveryLayoutStartsFromTheSameBits) {
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
