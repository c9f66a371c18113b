// Activation checkpointing in unusual steps on several ranks: backwards inside a module, exceptions in a
// recompute, layers that one rank's backward skips, and sharded modules inside a checkpointed one.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "dist/stream.h"
#include "dist/work_graph.h"
#include "distributed/toy_case.h"
#include "titan/core/error.h"
#include "titan/parallel/activation_checkpoint.h"
#include "unit/parallel/checkpoint_case.h"

namespace titan {
namespace {

using namespace testing;  // NOLINT: the test's own names

/// Computes a slope with its own backward.
class SlopedImpl : public nn::Module {
 public:
  SlopedImpl() { weight = register_parameter("weight", BlockImpl::values({6, 6}, options_of(at::kDouble))); }
  at::Tensor forward(const at::Tensor& x) {
    check_entered_through_ref();
    if (--calls_until_failure == 0) throw std::runtime_error("the layer fails");
    const at::Tensor inner = x.detach().requires_grad_();
    const at::Tensor slope = torch::autograd::grad({at::tanh(inner).sum()}, {inner})[0];
    return x + at::tanh(at::linear(x, weight)) * slope;
  }
  at::Tensor weight;
  int calls_until_failure = 0;  // 0: none
};
TITAN_MODULE(Sloped);

class NetImpl : public nn::Module {
 public:
  NetImpl() {
    for (int i = 0; i < 4; ++i) {
      layers.emplace_back();
      register_module("layer" + std::to_string(i), layers.back());
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const Sloped& layer : layers) x = layer(x);
    return x;
  }
  std::vector<Sloped> layers;
};
TITAN_MODULE(Net);

class CheckpointPaths : public ::testing::Test {
 protected:
  int size = world().size(), rank = world().rank();
  at::Tensor batch = input_rows(12, 6, at::kDouble);
  at::Tensor mine = my_rows(batch, rank, size);
  FsdpOptions fsdp{.mesh = mesh_of(layouts(size).front())};

  Net sharded_net() const {
    Net net;
    for (const Sloped& layer : net->layers) {
      checkpoint_activations(layer, FullRecompute{});
      fully_shard(layer, fsdp);
    }
    fully_shard(net, fsdp);
    return net;
  }
  // Runs one step and compares each gradient with one rank's.
  void expect_right_step(const Net& net, const std::string& what) const {
    const Net reference;
    loss_of(reference(batch)).backward();
    const auto expected = reference->named_parameters();
    for (const Parameter& parameter : parameters(net)) parameter.data.local.mutable_grad().reset();
    loss_of(net(mine)).backward();
    for (const Parameter& parameter : parameters(net)) {
      DTensor gradient = parameter.data;
      gradient.local = parameter.data.local.grad();
      EXPECT_LE(relative_error(full_tensor(gradient), expected[parameter.name].grad()), 1e-12)
          << what << " " << parameter.name;
    }
    EXPECT_EQ(fsdp_stats(net).gathered_groups, 0) << what;
  }
};

class NoisyImpl : public nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    check_entered_through_ref();
    return x * at::empty_like(x).uniform_();
  }
};
TITAN_MODULE(Noisy);

// On a device that records steps. Each draw of a recording has a place of its own in the random numbers.
TEST(CheckpointRecording, RefusesRandomNumbersThatARecomputeHasToRepeat) {
  const at::Device device = world().device();
  if (!device.is_cuda()) GTEST_SKIP() << "a CPU records nothing";
  const dist::Stream stream = dist::Stream::create(device);
  const dist::StreamGuard on_stream(stream);
  const at::Tensor x = at::ones({6, 6}, at::device(device)).requires_grad_();
  for (const bool repeats : {false, true}) {
    const Noisy layer;
    checkpoint_activations(layer, FullRecompute{}, {.preserve_rng_state = repeats});
    layer(x).sum().backward();
    dist::WorkGraph graph(device);
    const auto record = [&] { graph.record([&] { layer(x).sum().backward(); }); };
    if (repeats)
      EXPECT_THAT(record,
                  ::testing::ThrowsMessage<ConfigError>(::testing::HasSubstr("draws random numbers")));
    else
      EXPECT_NO_THROW(record());
  }
}

TEST_F(CheckpointPaths, NestedBackwardDoesNotEndFsdpsBackward) {
  const Net net = sharded_net();
  for (int step = 0; step < 3; ++step) expect_right_step(net, str("step ", step));
}

TEST_F(CheckpointPaths, RecoversFromARecomputeThatThrows) {
  Net net = sharded_net();
  for (int attempt = 0; attempt < 2; ++attempt) {
    const at::Tensor loss = loss_of(net(mine));
    net->layers[1]->calls_until_failure = 1;
    EXPECT_THROW(loss.backward(), std::runtime_error);
    discard_gradients(net);
    expect_right_step(net, str("attempt ", attempt));
  }
}

TEST_F(CheckpointPaths, RefusesAModuleShardedInsideACheckpointedOne) {
  Toy model = sharded_toy({}, at::kDouble, fsdp);
  checkpoint_activations(model, FullRecompute{});
  const at::Tensor loss = loss_of(model(my_rows(input_rows(12, 6, at::kDouble), rank, size)));
  try {
    loss.backward();
    FAIL() << "blocks were gathered inside a backward";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("wrap the module that is recomputed"), std::string::npos)
        << error.what();
  }
}

// That rank has no measurement of the layer, so the other ranks must not decide.
TEST_F(CheckpointPaths, BudgetWaitsForARankWhoseBackwardSkipsALayer) {
  const ToyOptions options{.num_blocks = 4};
  const auto kept_by = [&](Toy& model) {
    MemoryMeter meter;
    const at::Tensor y = model(mine);
    const int64_t bytes = meter.bytes();
    loss_of(y).backward();
    return bytes;
  };
  Toy plain(options, at::kDouble), full(options, at::kDouble), model(options, at::kDouble);
  checkpoint_activations({full->blocks.begin(), full->blocks.end()}, FullRecompute{});
  checkpoint_activations({model->blocks.begin(), model->blocks.end()},
                         MemoryBudget{.fraction = 1, .group = world().everyone()});
  kept_by(plain);  // LibTorch's own first allocations
  const int64_t everything = kept_by(plain), inputs = kept_by(full);
  EXPECT_LT(inputs, everything);

  model->path.detached = rank == size - 1 ? 1 : -1;
  kept_by(model);
  model->path.detached = -1;
  EXPECT_EQ(kept_by(model), inputs) << "one rank hasn't measured the layer";
  EXPECT_EQ(kept_by(model), everything);
}

}  // namespace
}  // namespace titan
