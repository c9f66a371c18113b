// The logic of offloading, with CPU memory on both sides: which tensors are moved, when their device memory
// is freed, and when they are fetched. No GPU has run it.

#include "parallel/activation_checkpoint/offload.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "unit/parallel/checkpoint_case.h"
#include "unit/parallel/lambda_module.h"

namespace titan::activations {
namespace {

using namespace testing;

std::shared_ptr<Offloader> offload(const std::vector<nn::AnyRef>& layers, int64_t layers_kept,
                                   int64_t min_bytes = 1024) {
  install_saved_tensor_hooks();
  auto offloader = std::make_shared<Offloader>(
      OffloadSettings{.device = at::kCPU, .page_locked = false, .min_bytes = min_bytes});
  const auto num_layers = static_cast<int64_t>(layers.size());
  for (int64_t i = 0; i < num_layers; ++i)
    layers[static_cast<size_t>(i)].host().checkpoint_hook =
        std::make_shared<OffloadHook>(offloader, i == 0, i >= num_layers - layers_kept);
  return offloader;
}

TEST(Offload, GivesTheSameBits) {
  for (const int64_t layers_kept : {0, 1, 3}) {
    const auto args = small_llama(3);
    const StepResult expected = run_steps(models::Llama3(args));
    const models::Llama3 model(args);
    const auto offloader = offload(layers_of(model), layers_kept);
    EXPECT_TRUE(bit_equal(run_steps(model), expected)) << layers_kept;
    EXPECT_TRUE(bit_equal(run_steps(model, 2), expected)) << layers_kept;
    EXPECT_EQ(offloader->stats.copies > 0, layers_kept < 3);
  }
}

// y = exp(exp(x)) * exp(x), for which autograd saves two storages.
class TwiceImpl : public nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor inner = x.exp();
    hidden = inner.storage().getWeakStorageImpl();
    return inner.view({-1}).exp().view(x.sizes()) * inner;
  }
  c10::weak_intrusive_ptr<c10::StorageImpl> hidden{c10::intrusive_ptr<c10::StorageImpl>()};
};
TITAN_MODULE(Twice);

struct Chain {
  Twice layers[3];
  std::shared_ptr<Offloader> offloader = offload({layers[0], layers[1], layers[2]}, 1);
  at::Tensor x = at::linspace(-1, 0, 1024).view({32, 32}).requires_grad_();
};

TEST(Offload, UsesHostMemoryAgain) {
  HostBuffers buffers(/*page_locked=*/false);
  at::Tensor first = buffers.take(4096);
  const void* const address = first.const_data_ptr();
  EXPECT_NE(buffers.take(4096).const_data_ptr(), address);
  buffers.give_back(std::move(first));
  EXPECT_EQ(buffers.take(8192).numel(), 8192) << "of another size";
  EXPECT_EQ(buffers.take(4096).const_data_ptr(), address);
  buffers.give_back(buffers.take(8192));
  for (int i = 0; i < 4096; ++i) buffers.give_back(buffers.take(16));
  EXPECT_EQ(buffers.num_idle(), 2u);
  buffers.give_back(buffers.take(16));
  EXPECT_EQ(buffers.num_idle(), 1u) << "the size that nobody asks for is freed";

  Chain chain;
  const auto step = [&] {
    chain.layers[2](chain.layers[1](chain.layers[0](chain.x) * 0.01) * 0.01).sum().backward();
  };
  step();
  const size_t num_buffers = chain.offloader->buffers->num_idle();
  EXPECT_GE(num_buffers, 2u);
  step();
  EXPECT_EQ(chain.offloader->buffers->num_idle(), num_buffers) << "the second step made new ones";
}

TEST(Offload, MovesEachStorageOnce) {
  Chain chain;
  const at::Tensor y = chain.layers[0](chain.x);
  // inner (as exp's output, as a view for the second exp's input, and for the product) and exp(inner).
  EXPECT_EQ(chain.offloader->stats.copies, 2);
  EXPECT_EQ(chain.offloader->stats.copied_bytes, 2 * 4096);
}

TEST(Offload, FreesDeviceMemoryOneLayerLater) {
  Chain chain;
  at::Tensor y = chain.layers[0](chain.x) * 0.01;
  EXPECT_FALSE(chain.layers[0]->hidden.expired()) << "its copy may still be under way";
  y = chain.layers[1](y) * 0.01;
  EXPECT_TRUE(chain.layers[0]->hidden.expired());
  EXPECT_FALSE(chain.layers[1]->hidden.expired());
  y = chain.layers[2](y);
  EXPECT_TRUE(chain.layers[1]->hidden.expired());
  EXPECT_FALSE(chain.layers[2]->hidden.expired()) << "the last layer's stays";
  EXPECT_EQ(chain.offloader->stats.copies, 4);
}

TEST(Offload, FetchesOneLayerAhead) {
  Chain chain;
  at::Tensor y = chain.layers[0](chain.x) * 0.01;
  y = chain.layers[1](y) * 0.01;
  y = chain.layers[2](y);
  const auto& stats = chain.offloader->stats;
  EXPECT_EQ(stats.early_fetches, 0);
  y.sum().backward();
  EXPECT_EQ(stats.early_fetches, 4);
  EXPECT_EQ(stats.late_fetches, 0);

  Chain plain;
  for (auto& layer : plain.layers) layer->checkpoint_hook.reset();
  plain.layers[2](plain.layers[1](plain.layers[0](plain.x) * 0.01) * 0.01).sum().backward();
  EXPECT_TRUE(chain.x.grad().equal(plain.x.grad()));
}

TEST(Offload, ALayerWithoutPrefetchFetchesItself) {
  Chain chain;
  const at::Tensor y = chain.layers[0](chain.x);
  const at::Tensor other = chain.layers[1](at::ones({32, 32}).requires_grad_());  // not part of y's backward
  y.sum().backward();
  EXPECT_EQ(chain.offloader->stats.late_fetches, 2);
  EXPECT_EQ(chain.offloader->stats.early_fetches, 0);
  EXPECT_TRUE(chain.x.grad().defined());
}

TEST(Offload, SupportsTwoBackwardsThroughOneGraph) {
  Chain chain;
  const at::Tensor y = chain.layers[1](chain.layers[0](chain.x) * 0.01).sum();
  y.backward({}, /*retain_graph=*/true);
  const at::Tensor once = chain.x.grad().clone();
  y.backward();
  EXPECT_TRUE(chain.x.grad().equal(once * 2));
}

TEST(Offload, SmallTensorsAndParametersStay) {
  const models::Llama3 model(small_llama(3));
  const auto offloader = offload(layers_of(model), 0, /*min_bytes=*/int64_t{1} << 30);
  run_steps(model);
  EXPECT_EQ(offloader->stats.copies, 0);

  const models::Llama3 moving(small_llama(1));
  const auto all = offload(layers_of(moving), 0, /*min_bytes=*/0);
  run_steps(moving);
  // For each of 48 tokens: the inputs of both norms and their scales, queries, keys, values, attention and
  // its sums, and the two halves of the feed-forward (as in KeptBytes with "none", plus the layer's input),
  // but no parameters.
  EXPECT_EQ(all->stats.copied_bytes, 48 * 4 * ((2 * 33) + (32 + 2 * 16 + 32 + 4) + 32 + 2 * 96 + 32));
}

TEST(Offload, ForwardsAndBackwardsMayTakeAnyOrder) {
  for (const std::string& order : kOrders) {
    for (const int64_t layers_kept : {0, 1}) {
      const StepResult expected = run_order(models::Llama3(small_llama(3)), order);
      const models::Llama3 model(small_llama(3));
      const auto offloader = offload(layers_of(model), layers_kept);
      EXPECT_TRUE(bit_equal(run_order(model, order, 2), expected)) << order << layers_kept;
      EXPECT_GT(offloader->stats.early_fetches, 0) << order;
    }
  }
}

TEST(Offload, AForwardWithoutABackwardKeepsNoMemory) {
  const models::Llama3 model(small_llama(3));
  const auto offloader = offload(layers_of(model), 1);
  loss_of(model);  // LibTorch's own first allocations
  MemoryMeter meter;
  loss_of(model);
  EXPECT_EQ(meter.bytes(), 0);
}

// LibTorch refuses them without hooks, too. The tensor may have been moved or not.
TEST(Offload, RefusesWritesToSavedTensors) {
  for (const int64_t layers_kept : {0, 1}) {
    Lambda layer([](LambdaImpl& self, const at::Tensor& x) {
      const at::Tensor y = at::linear(x, self.weight).exp();
      return y.mul_(2).sin();
    });
    layer->set_fqn("layers.7");
    offload({layer}, layers_kept, /*min_bytes=*/0);
    EXPECT_NE(message_of([&] {
                gradients_of(layer);
              }).find("'layers.7' saves for its backward was modified in place"),
              std::string::npos)
        << layers_kept;
  }
}

}  // namespace
}  // namespace titan::activations
