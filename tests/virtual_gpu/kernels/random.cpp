// LibTorch's random kernels for GPUs on the host: each element gets the same integers of Philox as on a device with as many multiprocessors.
// Floats are made from them by the host's functions, so a device's may differ in the last bits. After LibTorch's
// ATen/native/cuda/DistributionTemplates.h and cuRAND's curand_uniform.h and curand_normal.h.

#include <ATen/ATen.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>

#include "kernels/call.h"

namespace virtual_gpu {
namespace {

using at::Tensor;
using Generator = std::optional<at::Generator>;
using Words = std::array<uint32_t, 4>;  // the result of one call of Philox

constexpr int64_t threads = 256;

// Fills `self`: in the kernel, each call of Philox makes the numbers make(words, 0), ... make(words, per_call - 1).
template <class T, class Make>
Tensor& fill(const char* name, Tensor& self, int per_call, const Generator& given, Make make) {
  const int64_t numel = self.numel();
  if (numel == 0) return self;
  const auto* device = at::cuda::getDeviceProperties(self.device().index());
  const int64_t most_blocks = device->multiProcessorCount * (device->maxThreadsPerMultiProcessor / threads);
  const int64_t step = std::min(most_blocks, (numel + threads - 1) / threads) * threads;
  const int64_t num_calls = (numel - 1) / (step * per_call) + 1;
  auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      given, at::cuda::detail::getDefaultCUDAGenerator(self.device().index()));
  at::PhiloxCudaState state;
  {
    const std::lock_guard lock(generator->mutex_);
    state = generator->philox_cuda_state(static_cast<uint64_t>(num_calls) * 4);
  }
  StandIns memory(StandIns::Kind::cpu);
  run_on_device(name, {}, {self}, [=, out = memory.stand_in(self)] {
    const at::AutoDispatchBelowADInplaceOrView below;
    // Each launch of a recording has its own place among the numbers.
    const uint64_t seed = state.captured_ ? static_cast<uint64_t>(*state.seed_.ptr) : state.seed_.val;
    const uint64_t offset = state.captured_
                                ? static_cast<uint64_t>(*state.offset_.ptr) + state.offset_intragraph_
                                : state.offset_.val;
    const Tensor values = at::empty({numel}, c10::CppTypeToScalarType<T>::value);
    T* const data = values.mutable_data_ptr<T>();
    for (int64_t thread = 0; thread < std::min(step, numel); ++thread) {
      at::philox_engine engine(seed, static_cast<uint64_t>(thread), offset / 4);
      for (int64_t first = thread; first < numel; first += step * per_call) {
        Words words;
        for (uint32_t& word : words) word = engine();
        for (int i = 0; i < per_call && first + i * step < numel; ++i)
          data[first + i * step] = make(words, i);
      }
    }
    // Elements are numbered in the order of memory.
    std::vector<int64_t> order(static_cast<size_t>(out.dim()));
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return out.stride(a) > out.stride(b); });
    const Tensor in_order = out.permute(order);
    in_order.copy_(values.view(in_order.sizes()));
  });
  return self;
}

float uniform_float(uint32_t x) { return static_cast<float>(x) * 0x1p-32f + 0x1p-33f; }  // in (0, 1]
double uniform_double(uint32_t x, uint32_t y) {
  return static_cast<double>(x ^ uint64_t{y} << 21) * 0x1p-53 + 0x1p-54;
}

Tensor& uniform(Tensor& self, double from, double to, Generator generator) {
  if (self.scalar_type() == at::kDouble)
    return fill<double>("aten::uniform_", self, 2, generator, [=](const Words& w, int i) {
      const double value = uniform_double(w[2 * i], w[2 * i + 1]) * (to - from) + from;
      return value == to ? from : value;
    });
  const auto begin = static_cast<float>(from), end = static_cast<float>(to);
  // The bounds are compared in the tensor's type.
  const auto round = [type = self.scalar_type()](float x) {
    return type == at::kHalf       ? static_cast<float>(at::Half(x))
           : type == at::kBFloat16 ? static_cast<float>(at::BFloat16(x))
                                   : x;
  };
  return fill<float>("aten::uniform_", self, 4, generator, [=](const Words& w, int i) {
    const float value = round(uniform_float(w[i]) * (end - begin) + begin);
    return value == round(end) ? begin : value;
  });
}

Tensor& normal(Tensor& self, double mean, double deviation, Generator generator) {
  TORCH_CHECK(!self.is_complex(), "virtual GPU: complex random numbers aren't written");
  if (self.scalar_type() == at::kDouble)
    return fill<double>("aten::normal_", self, 2, generator, [=](const Words& w, int i) {
      const double radius = std::sqrt(-2.0 * std::log(uniform_double(w[0], w[1])));
      const double angle = uniform_double(w[2], w[3]) * 2 * std::numbers::pi;
      return radius * (i == 0 ? std::sin(angle) : std::cos(angle)) * deviation + mean;
    });
  return fill<float>("aten::normal_", self, 4, generator, [=](const Words& w, int i) {
    constexpr float circle = 0x1p-32f * 2 * std::numbers::pi_v<float>;
    const uint32_t* pair = &w[i / 2 * 2];
    const float radius = std::sqrt(-2.0f * std::log(uniform_float(pair[0])));
    const float angle = static_cast<float>(pair[1]) * circle + circle / 2;
    return radius * (i % 2 == 0 ? std::sin(angle) : std::cos(angle)) * static_cast<float>(deviation) +
           static_cast<float>(mean);
  });
}

Tensor& bernoulli(Tensor& self, double p, Generator generator) {
  if (self.scalar_type() == at::kDouble)
    return fill<double>("aten::bernoulli_", self, 2, generator, [=](const Words& w, int i) {
      return uniform_double(w[2 * i], w[2 * i + 1]) < p ? 1.0 : 0.0;
    });
  return fill<float>("aten::bernoulli_", self, 4, generator,
                     [=](const Words& w, int i) { return uniform_float(w[i]) < p ? 1.0f : 0.0f; });
}

// Integers modulo `range`, from `base`; 64 bits of them for large ranges.
Tensor& integers(Tensor& self, uint64_t range, int64_t base, bool is_wide, const Generator& generator) {
  const auto from_base = [=](uint64_t x) {
    return static_cast<int64_t>(x % range + static_cast<uint64_t>(base));
  };
  if (!is_wide)
    return fill<int64_t>("aten::random_", self, 4, generator,
                         [=](const Words& w, int i) { return from_base(w[i]); });
  return fill<int64_t>("aten::random_", self, 2, generator, [=](const Words& w, int i) {
    return from_base(uint64_t{w[2 * i]} << 32 | w[2 * i + 1]);
  });
}

// The integers up to which all are numbers of the type.
uint64_t largest(at::ScalarType type) {
  if (type == at::kDouble) return uint64_t{1} << 53;
  if (type == at::kFloat) return 1 << 24;
  if (type == at::kHalf) return 1 << 11;
  if (type == at::kBFloat16) return 1 << 8;
  if (type == at::kBool) return 1;
  if (type == at::kByte) return 255;
  return (uint64_t{1} << (8 * c10::elementSize(type) - 1)) - 1;
}

Tensor& random_from(Tensor& self, int64_t from, std::optional<int64_t> to, Generator generator) {
  const uint64_t range = to ? static_cast<uint64_t>(*to) - static_cast<uint64_t>(from)
                            : largest(self.scalar_type()) - static_cast<uint64_t>(from) + 1;
  TORCH_CHECK(range != 0, "virtual GPU: random integers of 64 bits aren't written");
  return integers(self, range, from, range >= uint64_t{1} << 28, generator);
}
Tensor& random_to(Tensor& self, int64_t to, Generator generator) {
  return random_from(self, 0, to, std::move(generator));
}
Tensor& random(Tensor& self, Generator generator) {
  const at::ScalarType type = self.scalar_type();
  return integers(self, largest(type) + 1, 0, type == at::kDouble || type == at::kLong, generator);
}

}  // namespace

void install_random_kernels() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library->impl("uniform_", TORCH_FN(uniform));
  library->impl("normal_", TORCH_FN(normal));
  library->impl("bernoulli_.float", TORCH_FN(bernoulli));
  library->impl("random_.from", TORCH_FN(random_from));
  library->impl("random_.to", TORCH_FN(random_to));
  library->impl("random_", TORCH_FN(random));
}

}  // namespace virtual_gpu
