// The ranks that hold copies of each parameter, for each way of replicating: a bit that flips on one rank is
// found where another rank has the same part, and that rank is named.

#include "guard/policies.h"

#include <gtest/gtest.h>

#include "distributed/llama_case.h"
#include "titan/train/run_end.h"

namespace titan::train {
namespace {

using titan::testing::world;

struct ReplicaCase {
  const char* name;
  ParallelDims dims;
  const char* parameter;  ///< one rank flips its first bit
  const char* found;      ///< the report if rank 1's flipped; empty: there is no copy
};

std::vector<ReplicaCase> cases() {
  constexpr const char* kWeight = "layers.0.attention.wq.weight";
  constexpr const char* kNorm = "layers.0.attention_norm.weight";
  if (world().size() == 2)
    return {{"Replicas",
             {.dp_replicate = 2},
             kWeight,
             "layers.0.attention.wq.weight: ranks 0, 1 differ from each other"},
            {"Shards", {.dp_shard = 2}, kWeight, ""},
            {"TensorParallelNorms",
             {.tp = 2},
             kNorm,
             "layers.0.attention_norm.weight: ranks 0, 1 differ from each other"},
            {"TensorParallelWeights", {.tp = 2}, kWeight, ""},
            {"ContextParallel", {.rows = {{"cp", 2}}}, kWeight, ""}};
  return {
      {"ReplicasOfShards", {.dp_replicate = 2, .dp_shard = 2}, kWeight, "ranks 1, 3 differ from each other"},
      {"TensorParallelReplicas", {.dp_replicate = 2, .tp = 2}, kWeight, "ranks 1, 3 differ from each other"},
      {"TensorParallelNormsOfReplicas",
       {.dp_replicate = 2, .tp = 2},
       kNorm,
       "rank 1 differs from the other 3"},
      {"TensorParallelNormsOfShards", {.dp_shard = 2, .tp = 2}, kNorm, "ranks 0, 1 differ from each other"}};
}

std::unique_ptr<TrainableModel> build(const Meshes& meshes) {
  auto model = titan::testing::build_llama(titan::testing::mini_llama(), at::kFloat);
  FsdpOptions fsdp;
  fsdp.mesh = meshes.fsdp;
  titan::testing::llama_spec().parallelize(*model, {.meshes = meshes, .fsdp = fsdp});
  materialize(model->root(), 1);
  return model;
}

std::string found_in(const std::vector<Parameter>& parameters) {
  try {
    check_replicas(world(), parameters, 7);
    return "";
  } catch (const UnsoundRun& error) {
    return error.what();
  }
}

TEST(ReplicaCheck, FindsABitThatFlips) {
  for (const ReplicaCase& which : cases()) {
    const Meshes meshes = build_meshes(world(), which.dims);
    const auto model = build(meshes);
    const std::vector<Parameter> parameters = titan::parameters(model->root());
    EXPECT_EQ(found_in(parameters), "") << which.name << ": no bit has flipped yet";
    const auto flipped = std::find_if(parameters.begin(), parameters.end(),
                                      [&](const Parameter& each) { return each.name == which.parameter; });
    ASSERT_NE(flipped, parameters.end()) << which.parameter;
    if (world().rank() == 1) *static_cast<uint8_t*>(flipped->data.local.detach().mutable_data_ptr()) ^= 1;
    const std::string found = found_in(parameters);
    if (std::string(which.found).empty())
      EXPECT_EQ(found, "") << which.name;
    else
      EXPECT_NE(found.find(which.found), std::string::npos) << which.name << ": " << found;
  }
}

}  // namespace
}  // namespace titan::train
