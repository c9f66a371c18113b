// Operations of aten on a virtual GPU: the CPU's numbers, on each profile, what LibTorch's kernels for GPUs refuse, and what ends the program
// because it isn't written.

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <nccl.h>

#include "virtual_gpu_test.h"

namespace virtual_gpu_test {
namespace {

std::vector<Tensor> train(c10::Device device) {
  at::manual_seed(1);
  Tensor qkv = (at::randn({3 * 64, 64}) * 0.1).to(device).requires_grad_();
  Tensor out = (at::randn({100, 64}) * 0.1).to(device).requires_grad_();
  const Tensor x = at::randn({2, 16, 64}).to(device),
               labels = at::randint(0, 100, {32}, at::kLong).to(device);
  std::vector<Tensor> weights{qkv, out}, first{at::zeros_like(qkv), at::zeros_like(out)},
      second{at::zeros_like(qkv), at::zeros_like(out)};
  std::vector<Tensor> steps{at::zeros({}, device), at::zeros({}, device)}, results;
  for (int step = 0; step < 3; ++step) {
    const Tensor heads = at::linear(x, qkv).view({2, 16, 3, 4, 16}).permute({2, 0, 3, 1, 4});
    const Tensor attention = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0, true);
    const Tensor loss =
        at::cross_entropy_loss(at::linear(attention.transpose(1, 2).reshape({32, 64}), out), labels);
    loss.backward();
    const std::vector<Tensor> gradients{qkv.grad(), out.grad()};
    results.push_back(loss.detach());
    results.push_back(at::stack(at::_foreach_norm(gradients)).norm());
    const at::NoGradGuard no_grad;
    for (Tensor& s : steps) s.add_(1);
    // An fp32 number: CUDA's kernel rounds the learning rate, and the CPU's doesn't.
    at::_fused_adamw_(weights, gradients, first, second, {}, steps, 0x1p-7, 0.9, 0.95, 0.1, 1e-8, false,
                      false, {}, {});
    for (Tensor& w : weights) w.mutable_grad().reset();
  }
  results.insert(results.end(), {qkv.detach(), out.detach()});
  for (Tensor& t : results) t = t.cpu();
  return results;
}

TEST_F(VirtualGpu, ComputesTheCpusNumbers) {
  const std::vector<Tensor> cpu = train(at::kCPU), gpu = train(at::kCUDA);
  for (size_t i = 0; i < cpu.size(); ++i) EXPECT_TRUE(cpu[i].equal(gpu[i])) << "result " << i;
  EXPECT_EQ(new_races(), 0);
}

// A factor on the device is read in 16 bits, as CUDA's kernels read it, and one on the host or in a vector isn't.
TEST_F(VirtualGpu, RoundsScalarsOfTheDeviceWhereCudaDoes) {
  const Tensor x = at::full({4}, 200.0, at::kBFloat16), factor = at::full({}, 1.003, at::kDouble);
  const auto product = [&](const Tensor& of_device, const Tensor& by) {
    std::vector<Tensor> list{of_device.clone()};
    at::_foreach_mul_(list, by);
    EXPECT_TRUE(at::equal(list[0], of_device * by));
    return (of_device * by).cpu();
  };
  const Tensor exact = x * factor, rounded = x * factor.to(at::kBFloat16);
  ASSERT_FALSE(at::equal(exact, rounded));
  EXPECT_TRUE(at::equal(product(x.cuda(), factor.cuda()), rounded));
  EXPECT_TRUE(at::equal((x.cuda() * factor).cpu(), exact));
  EXPECT_TRUE(at::equal(x.cuda().mul_(factor.cuda().view({1})).cpu(), exact));
  EXPECT_TRUE(at::equal((x.to(at::kFloat).cuda() * factor.cuda()).cpu(), x.to(at::kFloat) * factor));
}

TEST_F(VirtualGpu, ViewsAndOutputsShareMemory) {
  const Tensor x = at::zeros({4, 4}, on_gpu);
  x.view({16}).slice(0, 0, 16, 5).fill_(7);
  x.t().select(0, 1).add_(1);
  EXPECT_TRUE(x.cpu().equal(at::tensor({7., 1., 0., 0., 0., 8., 0., 0., 0., 1., 7., 0., 0., 1., 0., 7.})
                                .view({4, 4})
                                .to(at::kFloat)));
  Tensor out = at::empty({0}, on_gpu);
  at::add_out(out, x, x);
  EXPECT_EQ(out.sum().item<float>(), 64);
  EXPECT_EQ(x.index({x > 0}).numel(), 7);
  EXPECT_TRUE((x == 7).logical_not().cpu().equal((x.cpu() == 7).logical_not()));
}

// Users have published torch.rand(3, device="cuda") and torch.randn(3, device="cuda") after torch.manual_seed(0), with four digits.
TEST_F(VirtualGpu, DrawsTheRandomNumbersOfAGpu) {
  at::manual_seed(0);
  EXPECT_TRUE(at::rand({3}, on_gpu).cpu().allclose(at::tensor({0.3990f, 0.5167f, 0.0249f}), 0, 6e-5));
  at::manual_seed(0);
  EXPECT_TRUE(at::randn({3}, on_gpu).cpu().allclose(at::tensor({-0.9247f, -0.4253f, -2.6438f}), 0, 6e-5));
  // The same numbers in two calls as in two calls of a generator whose state was restored.
  auto generator = at::cuda::detail::getDefaultCUDAGenerator(0);
  const Tensor state = generator.get_state();
  const Tensor first = at::randint(0, 1000, {5000}, on_gpu), second = at::randint(0, 1000, {5000}, on_gpu);
  generator.set_state(state);
  EXPECT_TRUE(at::randint(0, 1000, {5000}, on_gpu).equal(first));
  EXPECT_TRUE(at::randint(0, 1000, {5000}, on_gpu).equal(second));
  EXPECT_FALSE(first.equal(second));
}

// ---- what LibTorch's kernels for GPUs refuse

TEST_F(VirtualGpu, AttentionRefusesTypesAndHeadSizesOfNoKernel) {
  const auto heads = [](int64_t size, at::ScalarType type) {
    return at::zeros({1, 2, 4, size}, on_gpu.dtype(type));
  };
  const auto flash = [](const Tensor& x) {
    at::_scaled_dot_product_flash_attention(x, x, x, 0, true, false);
  };
  const auto cudnn = [](const Tensor& x) {
    at::_scaled_dot_product_cudnn_attention(x, x, x, {}, true, 0, true, false);
  };
  const auto efficient = [](const Tensor& x) {
    at::_scaled_dot_product_efficient_attention(x, x, x, {}, true, 0, true);
  };
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    EXPECT_NO_THROW(flash(heads(64, type)));
    EXPECT_NO_THROW(cudnn(heads(64, type)));
    EXPECT_NO_THROW(efficient(heads(64, type)));
  }
  EXPECT_NO_THROW(efficient(heads(64, at::kFloat)));
  EXPECT_NO_THROW(flash(heads(256, at::kBFloat16)));
  EXPECT_THROW(flash(heads(64, at::kFloat)), c10::Error);
  EXPECT_THROW(cudnn(heads(64, at::kFloat)), c10::Error);
  EXPECT_THROW(efficient(heads(64, at::kDouble)), c10::Error);
  EXPECT_THROW(flash(heads(264, at::kBFloat16)), c10::Error);
  EXPECT_THROW(cudnn(heads(60, at::kBFloat16)), c10::Error);
  const Tensor q = heads(64, at::kBFloat16), k = heads(64, at::kHalf);
  EXPECT_THROW(at::_scaled_dot_product_flash_attention(q, k, k, 0, true, false), c10::Error);
  c10::cuda::device_synchronize();
}

// ---- profiles

using Profile = VirtualGpu;

TEST_F(Profile, ReportsItsPropertiesAndComputes) {
  struct Expected {
    const char *profile, *name;
    size_t bytes;
    int multiprocessors, major;
  };
  constexpr Expected all[] = {{"a100", "Virtual A100 80GB", 85'094'825'984, 108, 8},
                              {"h100", "Virtual H100 80GB", 85'017'755'648, 132, 9},
                              {"h100_96gb", "Virtual H100 96GB", 101'993'545'728, 132, 9},
                              {"h200", "Virtual H200", 150'109'487'104, 132, 9},
                              {"b200", "Virtual B200", 191'514'017'792, 148, 10}};
  const char* chosen = std::getenv("VIRTUAL_GPU_PROFILE");
  const auto* expected =
      std::ranges::find(all, std::string_view(chosen ? chosen : "h100"), &Expected::profile);
  ASSERT_NE(expected, std::end(all));
  const auto* properties = at::cuda::getCurrentDeviceProperties();
  EXPECT_STREQ(properties->name, expected->name);
  EXPECT_EQ(properties->totalGlobalMem, expected->bytes);
  EXPECT_EQ(properties->multiProcessorCount, expected->multiprocessors);
  EXPECT_EQ(properties->major, expected->major);
  EXPECT_EQ(properties->minor, 0);
  EXPECT_EQ(at::cuda::getNumGPUs(), 1);
  // All but what a context takes can be had.
  const auto empty = [](size_t bytes) {
    return at::empty({static_cast<int64_t>(bytes)}, on_gpu.dtype(at::kByte));
  };
  EXPECT_EQ(empty(expected->bytes - (size_t{1} << 30)).nbytes(), expected->bytes - (size_t{1} << 30));
  EXPECT_THROW(empty(expected->bytes), c10::OutOfMemoryError);
  const std::vector<Tensor> cpu = train(at::kCPU), gpu = train(at::kCUDA);
  for (size_t i = 0; i < cpu.size(); ++i) EXPECT_TRUE(cpu[i].equal(gpu[i])) << "result " << i;
  EXPECT_EQ(new_races(), 0);
}

// ---- what isn't written

TEST_F(VirtualGpuDeathTest, OperationsThatAreNotWrittenEndTheProgramWithTheirNames) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Tensor gates = at::zeros({2, 16}, on_gpu), state = at::zeros({2, 4}, on_gpu);
  EXPECT_DEATH(
      at::_thnn_fused_lstm_cell(gates, gates, state),
      "the operation aten::_thnn_fused_lstm_cell\\. is not supported. Write it in tests/virtual_gpu/kernels");
}

TEST_F(VirtualGpuDeathTest, FunctionsThatAreNotWrittenEndTheProgramWithTheirNames) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(ncclCommWindowRegister(nullptr, nullptr, 0, nullptr, 0),
               "ncclCommWindowRegister is not written");
}

}  // namespace
}  // namespace virtual_gpu_test
