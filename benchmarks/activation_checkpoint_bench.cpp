// Memory and time of activation checkpointing policies, for the 134M Llama (width 768, 12 layers, vocabulary
// 32,000) on one rank.
//
//   activation_checkpoint_bench [--batch N] [--seq-len N] [--dtype fp32|bf16] [--steps N] [--policy NAME]...
//
// Prints one JSON object per policy: peak_mib, the peak memory in tensors during a step (forward and
// backward) except parameters and gradients; kept_mib, the part of it that remains between forward and
// backward; step_s, the shortest time of a step; overhead, step_s / step_s of the first policy - 1. The
// policies' steps alternate, so that other work on the machine affects all of them. Policies: none, full, op,
// layers2, budget50, budget25.

#include <algorithm>
#include <chrono>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "titan/core/error.h"
#include "titan/models/llama3.h"
#include "titan/parallel/activation_checkpoint.h"
#include "titan/parallel/parameters.h"

namespace {

using namespace titan;

struct Options {
  int64_t batch = 4, seq_len = 512;
  at::ScalarType dtype = at::kFloat;
  int steps = 5;
  std::vector<std::string> policies;
};

Options parse(const std::vector<std::string>& args) {
  Options options;
  for (size_t i = 0; i + 1 < args.size(); i += 2) {
    const std::string &key = args[i], &value = args[i + 1];
    if (key == "--batch") {
      options.batch = std::stoll(value);
    } else if (key == "--seq-len") {
      options.seq_len = std::stoll(value);
    } else if (key == "--dtype") {
      options.dtype = value == "bf16" ? at::kBFloat16 : at::kFloat;
    } else if (key == "--steps") {
      options.steps = std::stoi(value);
    } else if (key == "--policy") {
      options.policies.push_back(value);
    } else {
      throw Error(str("unknown option ", key));
    }
  }
  TITAN_CHECK(args.size() % 2 == 0, "every option needs a value");
  if (options.policies.empty()) options.policies = {"none", "full", "op", "layers2", "budget50", "budget25"};
  return options;
}

std::optional<LayersPolicy> policy_of(const std::string& name) {
  static const std::map<std::string, std::optional<LayersPolicy>> policies{
      {"none", std::nullopt},
      {"full", FullRecompute{}},
      {"op", SelectiveOp{}},
      {"layers2", SelectiveLayers{2}},
      {"budget50", MemoryBudget{.fraction = 0.5}},
      {"budget25", MemoryBudget{.fraction = 0.25}}};
  const auto found = policies.find(name);
  TITAN_CHECK(found != policies.end(), "unknown policy ", name);
  return found->second;
}

// Counts the bytes of tensors that this thread allocates.
struct Meter : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void* /*ptr*/, int64_t size, size_t /*total*/, size_t /*reserved*/,
                         c10::Device /*device*/) override {
    bytes += size;
    peak = std::max(peak, bytes);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t bytes = 0, peak = 0;
};

struct Run {
  std::string name;
  models::Llama3 model;
  std::shared_ptr<Meter> meter = std::make_shared<Meter>();
  std::vector<double> seconds = {};
  double kept = 0, peak = 0;

  void step(const Options& options, bool measured) {
    const c10::DebugInfoGuard metering(c10::DebugInfoKind::PROFILER_STATE, meter);
    const at::Tensor tokens = at::randint(32000, {options.batch, options.seq_len}, at::kLong);
    const int64_t before = meter->bytes;
    meter->peak = before;
    const auto start = std::chrono::steady_clock::now();
    const at::Tensor loss = model(tokens, tokens, tokens.numel());
    const int64_t between = meter->bytes - before;
    loss.backward();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    for (const at::Tensor& parameter : model->parameters()) parameter.mutable_grad().zero_();
    if (!measured) return;
    seconds.push_back(took.count());
    kept = static_cast<double>(between);
    peak = static_cast<double>(meter->peak - before);
  }
  // The shortest step: other work on the machine only makes steps longer.
  double least() const { return *std::min_element(seconds.begin(), seconds.end()); }
};

Run make_run(const std::string& name, const Options& options) {
  const models::Llama3Args args{.dim = 768,
                                .n_layers = 12,
                                .n_heads = 12,
                                .n_kv_heads = 12,
                                .vocab_size = 32000,
                                .max_seq_len = options.seq_len};
  models::Llama3 model(args, deferred(at::kCPU, options.dtype));
  if (const auto policy = policy_of(name))
    checkpoint_activations({model->layers.begin(), model->layers.end()}, *policy);
  materialize(model, 1);
  return {name, model};
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse({argv + 1, argv + argc});
  std::vector<Run> runs;
  for (const std::string& name : options.policies) runs.push_back(make_run(name, options));
  constexpr int kWarmup = 2;  // MemoryBudget measures in the first step and decides
  for (int step = -kWarmup; step < options.steps; ++step)
    for (Run& run : runs) run.step(options, step >= 0);
  const double none_s = runs[0].least();
  for (Run& run : runs) {
    constexpr double kMiB = 1024.0 * 1024.0;
    std::cout << "{\"policy\": \"" << run.name << "\", \"kept_mib\": " << run.kept / kMiB
              << ", \"peak_mib\": " << run.peak / kMiB << ", \"step_s\": " << run.least()
              << ", \"overhead\": " << run.least() / none_s - 1 << "}" << std::endl;
  }
}
