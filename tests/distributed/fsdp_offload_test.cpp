// Compares shards in host memory ([Note: host shards]) with the plain engine and with one rank. On a CPU the
// "device" memory is other host memory, which tests everything except the streams.

#include <gtest/gtest.h>

#include <filesystem>

#include <ATen/ATen.h>

#include "distributed/toy_case.h"
#include "parallel/fsdp/gradient_collector.h"
#include "tensor/memory.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/nn/layers.h"
#include "titan/optim/clip.h"
#include "titan/optim/optimizer.h"

namespace titan {
namespace {

using namespace testing;  // NOLINT: the test's own names

Toy offloaded_toy(const ToyOptions& options, at::ScalarType dtype, FsdpOptions fsdp) {
  fsdp.cpu_offload = true;
  Toy model(options, dtype);
  for (auto& block : model->blocks) fsdp::fully_shard_beside_any_device({block}, fsdp);
  fsdp::fully_shard_beside_any_device({model}, fsdp);
  materialize(model, 0);
  return model;
}

// A GPU sums in a different order than the CPU.
void expect_same(const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
  if (testing::device().is_cpu()) {
    EXPECT_TRUE(at::equal(got, expected)) << what;
  } else {
    EXPECT_LE(relative_error(got, expected), 1e-5) << what;
  }
}

class FsdpOffload : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  double tolerance() const { return GetParam() == at::kDouble ? 1e-12 : 1e-5; }
};

TEST_P(FsdpOffload, EqualsOneRankOverLayoutsPoliciesAndMicroBatches) {
  expect_one_ranks_gradients(offloaded_toy, GetParam(), tolerance());
}

// Gradients that weren't set to none accumulate on the host.
TEST_P(FsdpOffload, AccumulatesGradientsOverSteps) {
  const int size = testing::world().size(), rank = testing::world().rank();
  const ToyOptions options;
  const at::Tensor batch = input_rows(12, options.dim, GetParam());
  Toy reference(options, GetParam());
  Toy model = offloaded_toy(options, GetParam(), {.mesh = mesh_of({1, size})});
  for (int step = 0; step < 3; ++step) {
    loss_of(reference(batch)).backward();
    loss_of(model(my_rows(batch, rank, size))).backward();
    expect_equal_gradients(model, reference, tolerance(), str("step ", step));
  }
}
INSTANTIATE_TEST_SUITE_P(Dtypes, FsdpOffload, ::testing::Values(at::kFloat, at::kDouble));

// Results are bit-equal to the plain engine's, because the copies don't round.
TEST(FsdpOffloadMixed, UsesThePlainEnginesDtypes) {
  const int size = testing::world().size(), rank = testing::world().rank();
  const ToyOptions options;
  const at::Tensor rows = my_rows(input_rows(12, options.dim, at::kFloat), rank, size);
  for (const at::ScalarType reduce : {at::kFloat, at::kBFloat16}) {
    const FsdpOptions fsdp{.mesh = mesh_of({1, size}), .param_dtype = at::kBFloat16, .reduce_dtype = reduce};
    Toy plain = sharded_toy(options, at::kFloat, fsdp), offloaded = offloaded_toy(options, at::kFloat, fsdp);
    for (int step = 0; step < 2; ++step) {
      forget_gradients(plain);
      forget_gradients(offloaded);
      run_micro_batches(plain, rows, 2);
      run_micro_batches(offloaded, rows, 2);
      const auto expected = parameters(plain), got = parameters(offloaded);
      for (size_t i = 0; i < got.size(); ++i) {
        const at::Tensor &grad = got[i].data.local.grad(), &wanted = expected[i].data.local.grad();
        const std::string what = titan::str(got[i].name, " reduced in ", reduce, ", step ", step);
        // A single rank has nothing to reduce, and keeps gradients in the shards' dtype.
        if (reduce == at::kFloat) {
          expect_same(grad, wanted, what);
        } else {
          EXPECT_LE(relative_error(grad, wanted), 1e-2) << what;
        }
      }
    }
  }
}

TEST(FsdpOffloadMemory, ComputeParametersAreTemporaryCopies) {
  const int size = testing::world().size(), rank = testing::world().rank();
  const ToyOptions options{.num_blocks = 6};
  const at::Tensor rows = my_rows(input_rows(12, options.dim, at::kFloat), rank, size);
  Toy model = offloaded_toy(options, at::kFloat, {.mesh = mesh_of({1, size})});
  int64_t allocations = 0;
  for (int step = 0; step < 6; ++step) {
    forget_gradients(model);
    loss_of(model(rows)).backward();
    const FsdpStats stats = fsdp_stats(model);
    EXPECT_LE(stats.max_gathered_groups, 3) << "two blocks and the root, on one rank too";
    if (step >= 2 && device().is_cpu()) EXPECT_EQ(stats.communication_buffer_allocations, allocations);
    allocations = stats.communication_buffer_allocations;
    for (const Parameter& parameter : parameters(model)) {
      EXPECT_TRUE(parameter.data.local.is_cpu());
      EXPECT_TRUE(is_deferred(parameter.compute)) << parameter.name;
    }
  }
}

// Optimizer, clipping and the model's file treat shards like any others.
TEST(FsdpOffloadTraining, StepsClippingAndFilesMatchThePlainEngine) {
  const int size = testing::world().size(), rank = testing::world().rank();
  const ToyOptions options;
  const at::Tensor rows = my_rows(input_rows(12, options.dim, at::kFloat), rank, size);
  const FsdpOptions fsdp{.mesh = mesh_of({1, size})};
  Toy plain = sharded_toy(options, at::kFloat, fsdp), offloaded = offloaded_toy(options, at::kFloat, fsdp);
  std::vector<optim::Optimizer> optimizers;
  for (const Toy* model : {&plain, &offloaded})
    optimizers.emplace_back(parameters(*model), optim::OptimizerSettings{});
  for (int step = 0; step < 3; ++step) {
    double norms[2];
    for (int i = 0; i < 2; ++i) {
      Toy& model = i == 0 ? plain : offloaded;
      optimizers[static_cast<size_t>(i)].zero_grad();
      loss_of(model(rows)).backward();
      norms[i] = optim::clip_grad_norm(parameters(model), 0.1).norm;
      optimizers[static_cast<size_t>(i)].step();
    }
    EXPECT_NEAR(norms[0], norms[1], testing::device().is_cpu() ? 0 : 1e-5) << "step " << step;
  }
  const auto expected = parameters(plain), got = parameters(offloaded);
  for (size_t i = 0; i < got.size(); ++i) expect_same(got[i].data.local, expected[i].data.local, got[i].name);

  const auto saved = std::filesystem::path(::testing::TempDir()) / str("offloaded_", size);
  if (testing::world().rank() == 0) std::filesystem::remove_all(saved);
  save_model(got, testing::world(), saved, {.export_dtype = at::kFloat});
  Toy loaded = offloaded_toy(options, at::kFloat, fsdp);
  load_model(parameters(loaded), saved);
  const auto read = parameters(loaded);
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_TRUE(at::equal(read[i].data.local, got[i].data.local)) << got[i].name;
  EXPECT_TRUE(at::equal(loaded(rows), offloaded(rows))) << "the next gather reads the loaded values";
}

TEST(FsdpOffloadTraining, InitialWeightsMatchThePlainEngineBitForBit) {
  const FsdpOptions fsdp{.mesh = mesh_of({1, testing::world().size()}), .cpu_offload = true};
  const nn::LinearOptions deferred_linear{.init = nn::Init::normal(0, 1),
                                          .construct = deferred(testing::device(), at::kFloat)};
  nn::Linear plain(5, 7, deferred_linear), offloaded(5, 7, deferred_linear);
  fully_shard(plain, {.mesh = fsdp.mesh});
  fsdp::fully_shard_beside_any_device({offloaded}, fsdp);
  EXPECT_TRUE(is_deferred(parameters(offloaded)[0].data.local));
  for (nn::Linear* linear : {&plain, &offloaded}) materialize(*linear, 5);
  EXPECT_TRUE(at::equal(parameters(offloaded)[0].data.local, parameters(plain)[0].data.local.cpu()));
}

TEST(FsdpOffloadOptions, IsRefusedOnACpu) {
  if (!testing::device().is_cpu()) GTEST_SKIP() << "this rank has a GPU";
  Toy model(ToyOptions{}, at::kFloat);
  try {
    fully_shard(model, {.mesh = mesh_of({1, testing::world().size()}), .cpu_offload = true});
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("beside a GPU, but parameter 'scale'"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace titan
