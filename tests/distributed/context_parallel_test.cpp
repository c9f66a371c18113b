// Compares context parallelism with one rank: attention alone in all its forms, and a Llama's loss and every
// gradient.

#include "titan/parallel/context_parallel.h"

#include <dlfcn.h>

#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include "distributed/llama_case.h"
#include "distributed/unconnected_world.h"
#include "parallel/context/distributed_attention.h"
#include "parallel/peer_memory.h"
#include "titan/core/log.h"
#include "titan/models/llama3.h"
#include "titan/nn/containers.h"
#include "titan/parallel/activation_checkpoint.h"

namespace titan {
namespace {

using namespace titan::testing;  // NOLINT: the test's own names

constexpr uint64_t kContextSeed = 3;

struct Form {
  const char* name;
  ContextParallelOptions options;
};

DeviceMesh mesh() { return DeviceMesh::create(world(), {{"cp", world().size()}}); }

std::vector<Form> forms() {
  using Balancer = ContextLoadBalancer;
  using Rotate = ContextRotateMethod;
  using Attention = ContextAttention;
  std::vector<Form> forms{
      {"head-tail, all-gather", {Balancer::HeadTail, Rotate::AllGather, Attention::Ring}},
      {"head-tail, all-to-all", {Balancer::HeadTail, Rotate::AllToAll, Attention::Ring}},
      {"head-tail, gathered keys", {Balancer::HeadTail, Rotate::AllGather, Attention::AllGatherKv}},
      {"unbalanced, all-gather", {Balancer::None, Rotate::AllGather, Attention::Ring}},
      {"unbalanced, all-to-all", {Balancer::None, Rotate::AllToAll, Attention::Ring}},
      {"unbalanced, gathered keys", {Balancer::None, Rotate::AllGather, Attention::AllGatherKv}}};
  if (world().size() == 1 || !why_no_peer_memory(mesh()).empty()) return forms;
  forms.push_back({"head-tail, copies", {Balancer::HeadTail, Rotate::SymmetricMemory, Attention::Ring}});
  forms.push_back({"unbalanced, copies", {Balancer::None, Rotate::SymmetricMemory, Attention::Ring}});
  return forms;
}

double gradient_tolerance(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-10 : dtype == at::kFloat ? 1e-5 : 2e-2;
}

// ---- attention alone

struct Heads {
  int64_t batch, chunk, heads, kv_heads, size;  // `chunk`: tokens in a 2N-th of the sequence
};

void PrintTo(const Heads& h, std::ostream* out) {
  *out << h.batch << " x " << h.chunk << " x " << h.heads << "/" << h.kv_heads << " x " << h.size;
}

std::shared_ptr<context::DistributedAttention> make_attention(const context::SequenceLayout& layout,
                                                              const ContextParallelOptions& options) {
  return context::make_attention(mesh(), layout, options);
}

class ContextAttentionTest : public ::testing::TestWithParam<std::tuple<at::ScalarType, Heads>> {};

TEST_P(ContextAttentionTest, EqualsAttentionOverTheWholeSequence) {
  const auto& [dtype, heads] = GetParam();
  at::manual_seed(5);
  const int64_t length = heads.chunk * 2 * world().size();
  const auto make = [&, dtype = dtype, heads = heads](int64_t count) {
    return at::randn({heads.batch, length, count, heads.size}).to(device(), dtype);
  };
  const at::Tensor q = make(heads.heads), k = make(heads.kv_heads), v = make(heads.kv_heads),
                   grad = make(heads.heads);
  std::vector<at::Tensor> wide;
  for (const at::Tensor& t : {q, k, v}) wide.push_back(t.clone().to(at::kDouble).requires_grad_());
  const at::Tensor expected = ops::causal_attention(wide[0], wide[1], wide[2]);
  expected.backward(grad.to(at::kDouble));

  for (const Form& form : forms()) {
    const context::SequenceLayout layout(world().size(), form.options.load_balancer);
    context::ContextCore core(make_attention(layout, form.options), "test");
    const auto mine = [&](const at::Tensor& x) { return layout.part(x, 1, world().rank()); };
    // The second round reuses memory of the first.
    for (int round = 0; round < 2; ++round) {
      std::vector<at::Tensor> parts;
      for (const at::Tensor& t : {q, k, v}) parts.push_back(mine(t).requires_grad_());
      const at::Tensor out = core.attend(parts[0], parts[1], parts[2]);
      EXPECT_EQ(out.scalar_type(), dtype);
      EXPECT_LE(relative_error(out.detach(), mine(expected.detach())), gradient_tolerance(dtype))
          << form.name;
      out.backward(mine(grad));
      for (size_t i = 0; i < 3; ++i)
        EXPECT_LE(relative_error(parts[i].grad(), mine(wide[i].grad())), gradient_tolerance(dtype))
            << form.name << ", gradient of "
            << "qkv"[i];
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ContextAttentionTest,
                         ::testing::Combine(::testing::Values(at::kFloat, at::kDouble, at::kBFloat16),
                                            ::testing::Values(Heads{1, 1, 4, 2, 16}, Heads{2, 37, 4, 1, 16},
                                                              Heads{3, 50, 3, 3, 24},
                                                              Heads{1, 9, 2, 1, 20})));

// A head's features needn't be adjacent, and the gradient of a sum is one number everywhere.
TEST(ContextAttentionStrides, MayBeAny) {
  const int64_t length = 10;
  const auto make = [&](int64_t heads) { return at::randn({2, 16, heads, length}).transpose(1, 3); };
  const at::Tensor q = make(4), k = make(2), v = make(2);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16})
    for (const Form& form : forms()) {
      const context::SequenceLayout layout(world().size(), form.options.load_balancer);
      context::ContextCore core(make_attention(layout, form.options), "test");
      std::vector<at::Tensor> strided, plain;
      for (const at::Tensor& t : {q, k, v}) {
        strided.push_back(t.to(device(), dtype).detach().requires_grad_());
        plain.push_back(t.to(device(), dtype).contiguous().requires_grad_());
        ASSERT_NE(strided.back().stride(3), 1);
      }
      core.attend(strided[0], strided[1], strided[2]).sum().backward();
      const at::Tensor out = core.attend(plain[0], plain[1], plain[2]);
      out.backward(at::ones(out.sizes(), out.options()));
      for (size_t i = 0; i < 3; ++i)
        EXPECT_LE(relative_error(strided[i].grad(), plain[i].grad()), gradient_tolerance(dtype))
            << form.name << ", gradient of "
            << "qkv"[i];
    }
}

// Passes a tensor on, but no gradient back.
struct WithoutGradient : torch::autograd::Function<WithoutGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    return {at::Tensor()};
  }
};

// The rank's outputs don't contribute to the loss, but its keys and values do through the other ranks.
TEST(ContextAttentionGradient, ARankWithoutAGradientParticipates) {
  at::manual_seed(6);
  const int size = world().size(), rank = world().rank();
  const context::SequenceLayout layout(size, ContextLoadBalancer::HeadTail);
  const at::Tensor whole = at::randn({1, 8 * size, 2, 8}, at::kDouble);
  at::Tensor of_rank_0 = at::zeros(whole.sizes(), at::kDouble);
  of_rank_0.index_fill_(1, layout.positions(0, 8, at::kCPU), 1);
  at::Tensor expected = whole.clone().requires_grad_();
  (ops::causal_attention(expected, expected, expected) * of_rank_0).sum().backward();

  for (const Form& form : forms()) {
    if (form.options.load_balancer == ContextLoadBalancer::None) continue;
    context::ContextCore core(make_attention(layout, form.options), "test");
    at::Tensor part = layout.part(whole, 1, rank).requires_grad_();
    const at::Tensor out = core.attend(part, part, part);
    (rank == 0 ? out : WithoutGradient::apply(out)).sum().backward();
    EXPECT_LE(relative_error(part.grad(), layout.part(expected.grad(), 1, rank)), 1e-12) << form.name;
  }
}

// Counted by virtual GPUs. A receive that waits for its sender keeps multiprocessors from attention.
TEST(ContextAttentionRing, TakesFewMultiprocessors) {
  const auto start = reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "virtual_gpu_start_counting"));
  const auto count = reinterpret_cast<uint64_t (*)(const char*, const char*, const char*)>(
      dlsym(RTLD_DEFAULT, "virtual_gpu_count"));
  if (!count || world().backend() != "nccl") GTEST_SKIP() << "runs on virtual GPUs, with --nccl";
  const dist::World fresh(unconnected_world("ring"));
  const context::SequenceLayout layout(fresh.size(), ContextLoadBalancer::HeadTail);
  const auto ring = context::make_attention(DeviceMesh::create(fresh, {{"cp", fresh.size()}}), layout,
                                            {.rotate_method = ContextRotateMethod::AllToAll});
  const at::Tensor q = at::ones({1, 4, 2, 8}, options_of(at::kFloat)), kv = q.narrow(2, 0, 1).contiguous();
  start();
  const ops::AttentionSum sum = ring->forward(q, kv, kv, {"t"});
  ring->backward({q, kv, kv, sum.out_BSHD, sum.log_sum_exp_BHS}, q, {"t"});
  EXPECT_EQ(count("calls", nullptr, "communicator of at most 4 CTAs"), 2u) << "for keys and for gradients";
  EXPECT_EQ(count("calls", nullptr, "communicator"), 2u);
}

// ---- a Llama

struct CpLayout {
  int shard, cp;
};

std::vector<CpLayout> cp_layouts(int world_size) {
  if (world_size == 4) return {{1, 4}, {2, 2}};
  return {{1, world_size}};
}

train::Meshes meshes_of(const CpLayout& layout) {
  return train::build_meshes(world(), {.dp_shard = layout.shard, .rows = {{"cp", layout.cp}}});
}

std::unique_ptr<train::TrainableModel> build_spread_llama(const LlamaCase& llama, at::ScalarType dtype,
                                                          const train::Meshes& meshes,
                                                          const ContextParallelOptions& options,
                                                          FsdpOptions fsdp = {}) {
  auto model = build_llama(llama, dtype);
  fsdp.mesh = meshes.fsdp;
  llama_spec().parallelize(*model,
                           {.meshes = meshes, .fsdp = fsdp, .parallelisms = {context_parallelism(options)}});
  materialize(model->root(), kContextSeed);
  return model;
}

/// Runs whole rows on each group of cp ranks and returns this rank's share of the loss.
double run_rows(train::TrainableModel& model, const Batch& batch, const train::Meshes& meshes,
                bool backward = true) {
  const int64_t num_valid = batch.num_valid();
  const Batch rows = batch.rows(meshes.dp_rank(), meshes.dp_degree());
  at::Tensor loss = model.loss(rows.tokens.to(device()), rows.labels.to(device()), num_valid);
  if (backward) loss.backward();
  return loss.item<double>();
}

/// The loss over all ranks.
double run_spread(train::TrainableModel& model, const Batch& batch, const train::Meshes& meshes,
                  bool backward = true) {
  return world().everyone()->sum(run_rows(model, batch, meshes, backward), {.phase = "test::loss"});
}

void expect_equal_outcomes(train::TrainableModel& model, double loss, const LlamaStep& reference,
                           at::ScalarType dtype, const std::string& what, double& worst) {
  EXPECT_NEAR(loss, reference.loss, dtype == at::kDouble ? 1e-12 : 5e-6) << what;
  const auto list = parameters(model.root());
  EXPECT_EQ(list.size(), reference.gradients.size()) << what;
  for (const Parameter& parameter : list) {
    const double error = relative_error(full_gradient(parameter), reference.gradients.at(parameter.name));
    EXPECT_LE(error, gradient_tolerance(dtype)) << what << " " << parameter.name;
    worst = std::max(worst, error);
  }
}

/// Like random_batch, but also for few rows.
Batch batch_of(const LlamaCase& llama, uint64_t seed) {
  at::manual_seed(seed);
  const int64_t vocab_size = std::get<int64_t>(llama.args.at("vocab_size"));
  const auto draw = [&] { return at::randint(vocab_size, {llama.rows, llama.seq_len}, at::kLong); };
  Batch batch{draw(), draw()};
  for (int64_t row = 0; row < llama.rows; ++row)
    batch.labels[row].slice(0, 0, row * 5 % llama.seq_len).fill_(-100);
  return batch;
}

/// Sizes of mini, with fewer rows.
LlamaCase few_rows(int64_t rows, int64_t seq_len) {
  LlamaCase llama = mini_llama();
  llama.rows = rows;
  llama.seq_len = seq_len;
  return llama;
}

void expect_parity(const LlamaCase& llama, const Batch& batch, at::ScalarType dtype,
                   const std::vector<Form>& all_forms) {
  const LlamaStep reference = run_on_one_rank(llama, batch, dtype, kContextSeed);
  double worst = 0;
  for (const CpLayout& layout : cp_layouts(world().size())) {
    const train::Meshes meshes = meshes_of(layout);
    if (llama.rows % meshes.dp_degree() != 0) continue;
    for (const Form& form : all_forms) {
      auto model = build_spread_llama(llama, dtype, meshes, form.options);
      const std::string what = titan::str("dp_shard ", layout.shard, " cp ", layout.cp, ", ", form.name);
      expect_equal_outcomes(*model, run_spread(*model, batch, meshes), reference, dtype, what, worst);
    }
  }
  log::info_rank0(titan::str("worst difference of a gradient ", worst));
}

class ContextParallelParity : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(ContextParallelParity, LossAndEveryGradientMatchOneRank) {
  const LlamaCase llama = few_rows(4, 96);
  expect_parity(llama, batch_of(llama, 1), GetParam(), forms());
}

TEST_P(ContextParallelParity, OneRowOfOneTokenPerChunk) {
  const LlamaCase llama = few_rows(1, 2 * world().size());
  expect_parity(llama, batch_of(llama, 2), GetParam(), forms());
}

// Without a load balancer the sequence needn't be a multiple of twice the ranks.
TEST_P(ContextParallelParity, OddNumberOfTokensPerRank) {
  const LlamaCase llama = few_rows(2, 5 * world().size());
  expect_parity(llama, batch_of(llama, 7), GetParam(), {forms()[3], forms()[4], forms()[5]});
}

// All labels of rank 0's tokens are ignored, and so are all labels of one row.
TEST_P(ContextParallelParity, RankWithoutLabels) {
  const LlamaCase llama = few_rows(2, 48);
  const std::vector<Form> balanced = {forms()[0], forms()[1], forms()[2]};
  Batch batch = batch_of(llama, 3);
  const context::SequenceLayout layout(world().size(), ContextLoadBalancer::HeadTail);
  batch.labels.index_fill_(1, layout.positions(0, llama.seq_len / world().size(), at::kCPU), -100);
  batch.labels[1].fill_(-100);
  expect_parity(llama, batch, GetParam(), balanced);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, ContextParallelParity, ::testing::Values(at::kFloat, at::kDouble),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

// With bfloat16 parameters, results are as close to one rank's fp32 as one rank's bfloat16 results are.
TEST(ContextParallelBf16, IsNearOneRank) {
  const LlamaCase llama = few_rows(4, 96);
  const Batch batch = batch_of(llama, 4);
  const LlamaStep reference = run_on_one_rank(llama, batch, at::kFloat, kContextSeed);
  const FsdpOptions bf16{.mesh = {}, .param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  auto single = build_llama(llama, at::kFloat);
  const train::Meshes alone;
  llama_spec().parallelize(*single, {.meshes = alone, .fsdp = bf16});
  materialize(single->root(), kContextSeed);
  forward_backward(*single, batch, 0, 1, 1);
  std::map<std::string, double> distance;
  for (const Parameter& parameter : parameters(single->root()))
    distance[parameter.name] =
        relative_error(parameter.data.local.grad(), reference.gradients.at(parameter.name));
  const train::Meshes meshes = meshes_of({1, world().size()});
  for (const Form& form : forms()) {
    auto model = build_spread_llama(llama, at::kFloat, meshes, form.options, bf16);
    EXPECT_NEAR(run_spread(*model, batch, meshes), reference.loss, 5e-3) << form.name;
    for (const Parameter& parameter : parameters(model->root()))
      EXPECT_LE(relative_error(full_gradient(parameter), reference.gradients.at(parameter.name)),
                2 * distance.at(parameter.name))
          << form.name << " " << parameter.name;
  }
}

// Validation runs without gradients and over sequences of another length, between training steps.
TEST(ContextParallelLengths, MayDifferBetweenCalls) {
  const LlamaCase llama = few_rows(2, 48);
  const LlamaCase shorter = few_rows(2, 4 * world().size());
  const Batch batch = batch_of(llama, 5), other = batch_of(shorter, 6);
  const LlamaStep reference = run_on_one_rank(llama, batch, at::kDouble, kContextSeed);
  auto single = build_llama(llama, at::kDouble);
  materialize(single->root(), kContextSeed);
  const train::Meshes meshes = meshes_of({1, world().size()});
  double worst = 0;
  for (const Form& form : forms()) {
    auto model = build_spread_llama(llama, at::kDouble, meshes, form.options);
    for (int round = 0; round < 2; ++round) {
      forget_gradients(*model);
      expect_equal_outcomes(*model, run_spread(*model, batch, meshes), reference, at::kDouble, form.name,
                            worst);
      at::NoGradGuard no_grad;
      const double expected =
          single->loss(other.tokens.to(device()), other.labels.to(device()), other.num_valid())
              .item<double>();
      EXPECT_NEAR(run_spread(*model, other, meshes, /*backward=*/false), expected, 1e-12) << form.name;
    }
  }
}

// ---- with other parallelisms and checkpoints

std::vector<train::ParallelDims> composed_dims(int world_size) {
  if (world_size < 4) return {{.rows = {{"cp", world_size}}}};
  return {{.rows = {{"cp", 2}}, .tp = 2},
          {.dp_replicate = 2, .rows = {{"cp", 2}}},
          {.dp_shard = 2, .rows = {{"cp", 2}}}};
}

struct Checkpoint {
  const char* name;
  std::optional<ModulePolicy> policy;
};

std::unique_ptr<train::TrainableModel> build_composed(const LlamaCase& llama, at::ScalarType dtype,
                                                      const train::Meshes& meshes, const Form& form,
                                                      const TensorParallelOptions& tensor,
                                                      const Checkpoint& checkpoint) {
  auto model = build_llama(llama, dtype);
  for (const auto& module : model->root().module().modules())
    if (auto layer = std::dynamic_pointer_cast<models::TransformerBlockImpl>(module);
        layer && checkpoint.policy)
      checkpoint_activations(layer, *checkpoint.policy);
  llama_spec().parallelize(*model, {.meshes = meshes,
                                    .fsdp = {.mesh = meshes.fsdp},
                                    .tensor = tensor,
                                    .parallelisms = {context_parallelism(form.options)}});
  materialize(model->root(), kContextSeed);
  return model;
}

class ContextParallelComposed : public ::testing::TestWithParam<at::ScalarType> {};

// A checkpoint changes no bit: the recompute runs the ring as the forward did, or reuses its result.
TEST_P(ContextParallelComposed, EqualsOneRankAndCheckpointsChangeNoBit) {
  const at::ScalarType dtype = GetParam();
  const LlamaCase llama = few_rows(4, 48);
  const Batch batch = batch_of(llama, 8);
  const LlamaStep reference = run_on_one_rank(llama, batch, dtype, kContextSeed);
  double worst = 0;
  for (const train::ParallelDims& dims : composed_dims(world().size())) {
    const train::Meshes meshes = train::build_meshes(world(), dims);
    std::vector<TensorParallelOptions> tensors{{}};
    if (dims.tp > 1) tensors.push_back({.sequence_parallel = false});
    for (const TensorParallelOptions& tensor : tensors)
      for (const Form& form : {forms()[0], forms()[1], forms()[2]}) {
        std::map<std::string, at::Tensor> plain;
        for (const Checkpoint& checkpoint :
             {Checkpoint{"no checkpoint", {}}, Checkpoint{"full", FullRecompute{}},
              Checkpoint{"op", SelectiveOp{}}}) {
          const std::string what = titan::str("dp_replicate ", dims.dp_replicate, " dp_shard ", dims.dp_shard,
                                              " cp ", dims.row_degree(), " tp ", dims.tp,
                                              tensor.sequence_parallel ? "" : " whole sequences", ", ",
                                              form.name, ", ", checkpoint.name);
          auto model = build_composed(llama, dtype, meshes, form, tensor, checkpoint);
          const double share = run_rows(*model, batch, meshes);
          const double loss = meshes.loss.group()->sum(share, {.phase = "test::loss"});
          expect_equal_outcomes(*model, loss, reference, dtype, what, worst);
          for (const Parameter& parameter : parameters(model->root())) {
            const at::Tensor gradient = parameter.data.local.grad();
            const auto [known, is_first] = plain.try_emplace(parameter.name, gradient);
            if (!is_first) EXPECT_TRUE(at::equal(gradient, known->second)) << what << " " << parameter.name;
          }
        }
      }
  }
  log::info_rank0(titan::str("worst difference of a gradient ", worst));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, ContextParallelComposed, ::testing::Values(at::kFloat, at::kDouble),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

// ---- a user's module

// Computes attention and positions by itself.
class OwnAttentionImpl : public nn::Module, public nn::AttentionUser, public nn::PositionUser {
 public:
  OwnAttentionImpl() {
    at::manual_seed(9);
    tokens_ = register_parameter("tokens", at::randn({11, 12}, at::kDouble));
    positions_ = register_parameter("positions", at::randn({64, 12}, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& tokens_BS) {
    const int64_t length = tokens_BS.size(1);
    const at::Tensor where = where_ ? where_->of(length, at::kCPU) : at::arange(length);
    const at::Tensor x_BSHE =
        (at::embedding(tokens_, tokens_BS) + at::embedding(positions_, where)).unflatten(-1, {3, 4});
    const at::Tensor out_BSHE =
        core_ ? core_->attend(x_BSHE, x_BSHE, x_BSHE) : ops::causal_attention(x_BSHE, x_BSHE, x_BSHE);
    return out_BSHE.pow(2).sum();
  }
  void set_attention_core(std::shared_ptr<nn::AttentionCore> core) override { core_ = std::move(core); }
  void set_token_positions(std::shared_ptr<nn::TokenPositions> where) override { where_ = std::move(where); }

 private:
  at::Tensor tokens_, positions_;
  std::shared_ptr<nn::AttentionCore> core_;
  std::shared_ptr<nn::TokenPositions> where_;
};
TITAN_MODULE(OwnAttention);

// As for micro-batches in a pipeline, and for models that alternate: calls share only a layer's working
// memory.
TEST(ContextParallelCustomModule, BackwardsMayRunInAnyOrder) {
  const int size = world().size();
  const auto cp = meshes_of({1, size}).rows;
  const at::Tensor tokens = at::randint(11, {2, 8 * size}, at::kLong),
                   shorter = at::randint(11, {3, 2 * size}, at::kLong);
  const OwnAttention single;
  (single(tokens) + single(shorter)).backward();
  for (const Form& form : forms()) {
    const OwnAttention one, other;
    context_parallel(one, cp, form.options);
    context_parallel(other, cp, form.options);
    const at::Tensor first = one(tokens), of_other = other(tokens), second = one(shorter),
                     last = other(shorter);
    for (const at::Tensor& loss : {first, last, second, of_other}) loss.backward();
    for (const OwnAttention& model : {one, other})
      for (size_t i = 0; i < 2; ++i) {
        const at::Tensor gradient = model->parameters()[i].grad();
        world().everyone()->all_reduce(gradient, dist::ReduceOp::Sum, {.phase = "test::gradient"}).wait();
        EXPECT_LE(relative_error(gradient, single->parameters()[i].grad()), 1e-12) << form.name;
      }
  }
}

TEST(ContextParallelCustomModule, NeedsOnlyTwoInterfaces) {
  const int64_t length = 4 * world().size();
  const at::Tensor tokens = at::randint(11, {2, length}, at::kLong);
  const OwnAttention single;
  const at::Tensor expected = single(tokens);
  expected.backward();
  for (const Form& form : forms()) {
    const OwnAttention model;
    context_parallel(model, meshes_of({1, world().size()}).rows, form.options);
    EXPECT_TRUE(is_context_parallel(model));
    const at::Tensor share = model(tokens);
    share.backward();
    EXPECT_NEAR(world().everyone()->sum(share.item<double>(), {.phase = "test::loss"}),
                expected.item<double>(), 1e-9);
    for (size_t i = 0; i < 2; ++i) {
      const at::Tensor gradient = model->parameters()[i].grad();
      world().everyone()->all_reduce(gradient, dist::ReduceOp::Sum, {.phase = "test::gradient"}).wait();
      EXPECT_LE(relative_error(gradient, single->parameters()[i].grad()), 1e-12) << form.name;
    }
  }
}

// ---- refused calls and modules

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(ContextParallelRefuses, SequencesThatDoNotDivide) {
  const int size = world().size();
  const LlamaCase llama = few_rows(2, 6 * size);
  auto model = build_spread_llama(llama, at::kFloat, meshes_of({1, size}), {});
  const int64_t length = 5 * size;  // an odd number of chunks
  const at::Tensor tokens = at::zeros({2, length}, at::TensorOptions(at::kLong).device(device()));
  const std::string message = message_of([&] { model->loss(tokens, tokens, 1); });
  EXPECT_NE(message.find(titan::str("a sequence of ", length, " tokens can't be cut into ", 2 * size,
                                    " chunks, 2 for each of ", size, " ranks; ", 4 * size, " or ", 6 * size,
                                    " would do, as would this one without a load balancer")),
            std::string::npos)
      << message;
}

// The failed call has entered the root, whose gathers for it must not block the next call.
TEST(ContextParallelAfterARefusal, AcceptsTheNextCall) {
  const int size = world().size();
  const LlamaCase llama = few_rows(2, 6 * size);
  const Batch batch = batch_of(llama, 10);
  const LlamaStep reference = run_on_one_rank(llama, batch, at::kDouble, kContextSeed);
  const train::Meshes meshes = meshes_of({1, size});
  auto model = build_spread_llama(llama, at::kDouble, meshes, {});
  const at::Tensor tokens = at::zeros({2, 5 * size}, at::TensorOptions(at::kLong).device(device()));
  EXPECT_THROW(model->loss(tokens, tokens, 1), Error);
  double worst = 0;
  expect_equal_outcomes(*model, run_spread(*model, batch, meshes), reference, at::kDouble, "after a refusal",
                        worst);
}

TEST(ContextParallelRefuses, SequencesOfTwoLengths) {
  const int size = world().size();
  auto model = build_spread_llama(few_rows(2, 8 * size), at::kFloat, meshes_of({1, size}), {});
  const at::TensorOptions options = at::TensorOptions(at::kLong).device(device());
  const std::string message = message_of([&] {
    model->loss(at::zeros({2, 4 * size}, options), at::zeros({2, 8 * size}, options), 1);
  });
  EXPECT_NE(message.find(titan::str("int64 tensors of [batch, ", 4 * size, "] and [batch, ", 8 * size, "]")),
            std::string::npos)
      << message;
}

TEST(ContextParallelRefuses, ToBeAppliedTwice) {
  const DeviceMesh cp = meshes_of({1, world().size()}).rows;
  const OwnAttention model;
  context_parallel(model, cp);
  const std::string message = message_of([&] { context_parallel(model, cp); });
  EXPECT_NE(message.find("are spread over ranks already"), std::string::npos) << message;
}

// Otherwise the ring's blocks would leave tokens out.
TEST(ContextParallelRefuses, ModulesThatChangeTheNumberOfTokens) {
  const context::SequenceLayout layout(world().size(), ContextLoadBalancer::HeadTail);
  context::ContextCore core(make_attention(layout, {}), "layers.0.attention");
  const auto tokens = [](int64_t count) { return at::zeros({1, count, 2, 8}, options_of(at::kFloat)); };
  const std::string odd = message_of([&] { core.attend(tokens(5), tokens(5), tokens(5)); });
  EXPECT_NE(odd.find("module 'layers.0.attention' attends with 5 tokens of this rank, which holds 2 chunks"),
            std::string::npos)
      << odd;
  const std::string two = message_of([&] { core.attend(tokens(4), tokens(6), tokens(6)); });
  EXPECT_NE(two.find("got [1, 4, 2, 8], [1, 6, 2, 8], [1, 6, 2, 8]"), std::string::npos) << two;
}

TEST(ContextParallelRefuses, CopiesBetweenRanksThatShareNoMemory) {
  if (why_no_peer_memory(mesh()).empty()) GTEST_SKIP() << "these ranks share memory";
  const OwnAttention model;
  std::string problem;
  try {
    context_parallel(model, mesh(), {.rotate_method = ContextRotateMethod::SymmetricMemory});
  } catch (const ConfigError& error) {
    problem = error.what();
  }
  EXPECT_NE(problem.find("context_parallel_rotate_method = \"symmetric_memory\": the backend is"),
            std::string::npos)
      << problem;
}

TEST(ContextParallelRefuses, CallsWithoutTokens) {
  const int size = world().size();
  const OwnAttention model;
  context_parallel(model, meshes_of({1, size}).rows);
  const std::string message = message_of([&] { model(at::zeros({2, 4 * size}, at::kDouble)); });
  EXPECT_NE(message.find("without an int64 tensor of [batch, sequence]"), std::string::npos) << message;
}

TEST(ContextParallelRefuses, ModulesWithoutAttention) {
  const nn::Sequential model(nn::Linear(4, 4, nn::LinearOptions{}));
  const std::string message = message_of([&] {
    context_parallel(model, meshes_of({1, world().size()}).rows);
  });
  EXPECT_NE(message.find("attends through a core"), std::string::npos) << message;
}

}  // namespace
}  // namespace titan
