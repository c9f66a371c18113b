// Optimizer states in bf16 with stochastic rounding: a Llama's parameters and states after some steps have the bits that one rank gives them,
// whatever layout shares them.

#include <gtest/gtest.h>

#include "core/hash.h"
#include "distributed/llama_case.h"
#include "job/settings.h"
#include "titan/optim/clip.h"
#include "titan/optim/optimizer.h"

namespace titan {
namespace {

using namespace titan::testing;  // NOLINT: the test's own names

constexpr uint64_t kSeed = 5;

// The same on every rank, in any layout.
at::Tensor whole_gradient(const std::string& name, at::IntArrayRef shape, int step) {
  at::manual_seed(hash_bytes(name, static_cast<uint64_t>(step)));
  return at::randn(shape);
}

void set_gradients(const std::vector<Parameter>& list, int step) {
  for (const Parameter& parameter : list) {
    at::Tensor part = whole_gradient(parameter.name, parameter.data.global_shape, step);
    const Box& box = parameter.data.box;
    for (size_t dim = 0; dim < box.offset.size(); ++dim)
      part = part.narrow(static_cast<int64_t>(dim), box.offset[dim], box.length[dim]);
    at::Tensor local = parameter.data.local;
    local.mutable_grad() = part.contiguous().to(local.options().requires_grad(false)).view(local.sizes());
  }
}

std::map<std::string, at::Tensor> step(train::TrainableModel& model,
                                       const optim::OptimizerSettings& settings) {
  const std::vector<Parameter> list = parameters(model.root());
  optim::Optimizer optimizer(list, settings);
  const at::Tensor run = at::zeros({}, at::TensorOptions(device()).dtype(at::kFloat)),
                   factor = at::full({}, 0.25, run.options().dtype(at::kDouble));
  for (int i = 0; i < 3; ++i) {
    set_gradients(list, i);
    optimizer.step_unless(run, factor);
  }
  std::map<std::string, at::Tensor> wholes;
  for (const Parameter& parameter : list) wholes[parameter.name] = full_tensor(parameter.data).cpu();
  for (const auto& [name, state] : optimizer.state())
    for (const char* kept : {"exp_avg", "exp_avg_sq"})
      wholes[name + "." + kept] = full_tensor(state.at(kept)).cpu();
  return wholes;
}

std::vector<train::ParallelDims> all_dims(int size) {
  if (size == 2) return {{.dp_shard = 2}, {.dp_replicate = 2}, {.tp = 2}};
  return {{.dp_shard = 4}, {.dp_replicate = 2, .dp_shard = 2}, {.dp_shard = 2, .tp = 2}};
}

TEST(OptimizerRounding, IsThatOfOneRank) {
  for (const LlamaCase& llama : {mini_llama(), uneven_llama()})
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      // By default each model has one of the dtypes.
      if (!all_cases() && (llama.name == "uneven") != (dtype == at::kBFloat16)) continue;
      const optim::OptimizerSettings settings{
          .lr = 0.01, .state_dtype = "bfloat16", .stochastic_rounding = true, .seed = kSeed};
      auto alone = build_llama(llama, dtype);
      materialize(alone->root(), kSeed);
      const auto expected = step(*alone, settings);
      for (const train::ParallelDims& dims : all_dims(world().size())) {
        std::vector<train::KeyedProblem> problems;
        train::check_divisibility(dims, llama_spec().sizes(make_args(llama).get()), llama.seq_len, problems);
        if (!problems.empty()) continue;
        const train::Meshes meshes = train::build_meshes(world(), dims);
        auto model = build_llama(llama, dtype);
        llama_spec().parallelize(*model, {.meshes = meshes, .fsdp = {.mesh = meshes.fsdp}});
        materialize(model->root(), kSeed);
        const auto got = step(*model, settings);
        ASSERT_EQ(got.size(), expected.size());
        for (const auto& [name, whole] : expected)
          EXPECT_TRUE(at::equal(got.at(name), whole))
              << name << " of " << llama.name << " in " << dtype << ", dp_replicate " << dims.dp_replicate
              << " dp_shard " << dims.dp_shard << " tp " << dims.tp;
      }
    }
}

}  // namespace
}  // namespace titan
