// With a sequence of 16,384 tokens, activations are divided among the ranks, and a matrix of all scores is
// never stored. This is a separate program, because it measures a process's peak memory (on a GPU, the
// allocator's peak).

#include <cmath>
#include <fstream>

#include <gtest/gtest.h>

#include "dist/device_backend.h"
#include "distributed/llama_case.h"
#include "titan/core/log.h"
#include "titan/parallel/context_parallel.h"

namespace titan {
namespace {

using namespace titan::testing;  // NOLINT: the test's own names

// Resets peak_mib() if the kernel allows it; otherwise the peak counts from the process's start.
void reset_peak() {
  if (device().is_cuda()) return dist::device_backend()->reset_peak_memory(device().index());
  std::ofstream("/proc/self/clear_refs") << "5";
}

// Peak resident memory, or peak memory of tensors on the GPU.
double peak_mib() {
  if (device().is_cuda())
    return static_cast<double>(dist::device_backend()->memory(device().index()).peak_allocated_bytes) /
           (1 << 20);
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) / 1024.0;
  throw Error("/proc/self/status has no line VmHWM");
}

// The dtypes of weights and of products.
struct Dtypes {
  at::ScalarType weights, products;
};

double run_step(const ContextParallelOptions& options, const Dtypes& dtypes, int64_t length) {
  LlamaCase llama = mini_llama();
  llama.rows = 1;
  llama.seq_len = length;
  const train::Meshes meshes =
      train::build_meshes(world(), {.dp_shard = 1, .rows = {{"cp", world().size()}}});
  auto model = build_llama(llama, dtypes.weights);
  llama_spec().parallelize(
      *model, {.meshes = meshes,
               .fsdp = {.mesh = meshes.fsdp, .param_dtype = dtypes.products, .reduce_dtype = dtypes.weights},
               .parallelisms = {context_parallelism(options)}});
  materialize(model->root(), 3);
  const at::Tensor tokens = at::randint(256, {1, length}, at::TensorOptions(at::kLong)).to(device());
  at::Tensor loss = model->loss(tokens, tokens, length);
  loss.backward();
  return world().everyone()->sum(loss.item<double>(), {.phase = "test::loss"});
}

struct MemoryCase {
  const char* name;
  ContextParallelOptions options;
  Dtypes dtypes;
  int64_t length = 16384;
};

class ContextMemory : public ::testing::TestWithParam<MemoryCase> {};

// One head's scores on this rank would be 8192 x 16384 numbers: 512 MiB in fp32, and four times that for all
// heads. In float64 with 8192 tokens they are half of that, and everything else has the same size.
TEST_P(ContextMemory, IsLinearInTheSequence) {
  const auto& [name, options, dtypes, length] = GetParam();
  if (device().is_cuda() && dtypes.weights == at::kDouble)
    GTEST_SKIP() << "a GPU computes it in tiles, whose memory is checked by the unit test of tiled attention";
  run_step(options, dtypes, 512);  // allocates memory that doesn't depend on the sequence
  reset_peak();
  const double before = peak_mib();
  const double loss = run_step(options, dtypes, length);
  const double grown = peak_mib() - before;
  log::info_rank0(str(name, ": ", grown, " MiB more at peak for ", length, " tokens over ", world().size(),
                      " ranks, loss ", loss));
  EXPECT_TRUE(std::isfinite(loss));
  // 400 MiB over all ranks for 16,384 tokens in fp32.
  const auto bytes = static_cast<double>(length) * static_cast<double>(c10::elementSize(dtypes.weights));
  EXPECT_LE(grown, 400.0 * bytes / (16384 * 4) / world().size());
}

constexpr ContextLoadBalancer kHeadTail = ContextLoadBalancer::HeadTail;

INSTANTIATE_TEST_SUITE_P(
    All, ContextMemory,
    ::testing::Values(MemoryCase{"Fp32AllToAll",
                                 {kHeadTail, ContextRotateMethod::AllToAll, ContextAttention::Ring},
                                 {at::kFloat, at::kFloat}},
                      MemoryCase{"Bf16AllGather",
                                 {kHeadTail, ContextRotateMethod::AllGather, ContextAttention::Ring},
                                 {at::kFloat, at::kBFloat16}},
                      MemoryCase{"Fp32GatheredKeys",
                                 {kHeadTail, ContextRotateMethod::AllGather, ContextAttention::AllGatherKv},
                                 {at::kFloat, at::kFloat}},
                      // Runs LibTorch's kernel.
                      MemoryCase{"Fp64AllGather",
                                 {kHeadTail, ContextRotateMethod::AllGather, ContextAttention::Ring},
                                 {at::kDouble, at::kDouble},
                                 8192}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace titan
