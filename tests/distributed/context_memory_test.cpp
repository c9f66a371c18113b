// A sequence of 16,384 tokens: activations are divided by the ranks, and there is never a matrix of scores.
// A program of its own, as the most memory of a process is what is looked at.

#include <fstream>

#include <gtest/gtest.h>

#include "distributed/llama_case.h"
#include "titan/core/log.h"
#include "titan/parallel/context_parallel.h"

namespace titan {
namespace {

using namespace titan::testing;  // NOLINT: these are the test's own words

constexpr int64_t kLength = 16384;

// From here on peak_mib() counts anew, where the kernel lets us; else from the process's start.
void reset_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

// Most resident memory.
double peak_mib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) / 1024.0;
  throw Error("/proc/self/status has no line VmHWM");
}

double run_step(const ContextParallelOptions& options, at::ScalarType param_dtype, int64_t length) {
  LlamaCase llama = mini_llama();
  llama.rows = 1;
  llama.seq_len = length;
  const train::Meshes meshes = train::build_meshes(world(), {.dp_shard = 1, .cp = world().size()});
  auto model = build_llama(llama, at::kFloat);
  llama_spec().parallelize(
      *model,
      {.meshes = meshes, .fsdp = {.mesh = meshes.fsdp, .param_dtype = param_dtype}, .context = options});
  materialize(model->root(), 3);
  const at::Tensor tokens = at::randint(256, {1, length}, at::TensorOptions(at::kLong)).to(device());
  at::Tensor loss = model->loss(tokens, tokens, length);
  loss.backward();
  return world().everyone()->sum(loss.item<double>(), {.phase = "test::loss"});
}

struct MemoryCase {
  const char* name;
  ContextParallelOptions options;
  at::ScalarType param_dtype;
};

class ContextMemory : public ::testing::TestWithParam<MemoryCase> {};

// Scores of one head of this rank would be 8192 x 16384 numbers: 512 MiB in fp32, four times that for all.
TEST_P(ContextMemory, IsLinearInTheSequence) {
  const auto& [name, options, param_dtype] = GetParam();
  run_step(options, param_dtype, 512);  // what isn't the sequence's
  reset_peak();
  const double before = peak_mib();
  const double loss = run_step(options, param_dtype, kLength);
  const double grown = peak_mib() - before;
  log::info_rank0(str(name, ": ", grown, " MiB more at the most for ", kLength, " tokens over ",
                      world().size(), " ranks, loss ", loss));
  EXPECT_TRUE(std::isfinite(loss));
  EXPECT_LE(grown, 400.0 / world().size());
}

constexpr ContextLoadBalancer kHeadTail = ContextLoadBalancer::HeadTail;

INSTANTIATE_TEST_SUITE_P(
    All, ContextMemory,
    ::testing::Values(MemoryCase{"Fp32AllToAll",
                                 {kHeadTail, ContextRotateMethod::AllToAll, ContextAttention::Ring},
                                 at::kFloat},
                      MemoryCase{"Bf16AllGather",
                                 {kHeadTail, ContextRotateMethod::AllGather, ContextAttention::Ring},
                                 at::kBFloat16},
                      MemoryCase{"Fp32GatheredKeys",
                                 {kHeadTail, ContextRotateMethod::AllGather, ContextAttention::AllGatherKv},
                                 at::kFloat}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace titan
