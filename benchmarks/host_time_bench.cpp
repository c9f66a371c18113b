// Host time of a transformer block under fully_shard on one rank, with shapes so small that the arithmetic
// hardly counts. benchmarks/pytorch/host_time.py measures the same with PyTorch.
//
//   host_time_bench [--dtype fp32|bf16] [--repetitions N] [--ranks N] [--tp N] [--device cpu|cuda]
//
// With --ranks, parameters are sharded over N ranks whose peers are fake: gathers and reductions are prepared, called
// and waited for, and cost only host time. Without it, on one rank, LibTitan makes none. With --tp, the block is that
// of one of N tensor-parallel ranks (with sequence parallelism), whose peers are fake, too: its 4 gathers and 4
// reduce-scatters. With --device cuda it runs on a virtual GPU,
// whose own work is left out and printed beside it. Prints one JSON object: us_per_block, the median over
// repetitions of (forward + backward of 8 blocks) / 8, with batch 1, sequence 8, width 64, 4 heads,
// feed-forward 192; gradients are dropped between repetitions. Uses one thread.

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "titan/core/error.h"
#include "titan/dist/device_mesh.h"
#include "titan/dist/world.h"
#include "titan/models/llama3.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/parameters.h"
#include "titan/parallel/tensor_parallel.h"

namespace {

using namespace titan;

constexpr int64_t kBlocks = 8, kDim = 64, kHeads = 4, kLength = 8;
constexpr int kWarmup = 20;

class BlocksImpl : public nn::Module {
 public:
  BlocksImpl(const models::Llama3Args& args, const nn::Construct& construct)
      : rotary(register_module("rotary", nn::RotaryEmbedding(nn::RotaryOptions{.head_dim = args.head_dim(),
                                                                               .max_positions = kLength}))) {
    register_module("layers", layers);
    for (int64_t i = 0; i < kBlocks; ++i)
      layers->push_back(models::TransformerBlock(i, args, rotary, construct));
  }
  at::Tensor forward(at::Tensor x_BSD) {
    for (auto& layer : layers) x_BSD = layer(x_BSD);
    return x_BSD;
  }
  nn::RotaryEmbedding rotary;
  nn::ModuleList<models::TransformerBlock> layers;
};
TITAN_MODULE(Blocks);

struct Options {
  std::string dtype = "fp32";
  int repetitions = 200;
  int ranks = 1;  // that share the parameters
  int tp = 1;
  std::string device = "cpu";
};

Options parse(const std::vector<std::string>& args) {
  Options options;
  for (size_t i = 0; i + 1 < args.size(); i += 2) {
    if (args[i] == "--dtype") options.dtype = args[i + 1];
    if (args[i] == "--repetitions") options.repetitions = std::stoi(args[i + 1]);
    if (args[i] == "--ranks") options.ranks = std::stoi(args[i + 1]);
    if (args[i] == "--tp") options.tp = std::stoi(args[i + 1]);
    if (args[i] == "--device") options.device = args[i + 1];
  }
  TITAN_CHECK(args.size() % 2 == 0 && (options.dtype == "fp32" || options.dtype == "bf16") &&
                  (options.device == "cpu" || options.device == "cuda") && options.repetitions > 0 &&
                  options.ranks > 0 && kHeads % options.tp == 0,
              "usage: host_time_bench [--dtype fp32|bf16] [--repetitions N] [--ranks N] [--tp 1|2|4] "
              "[--device cpu|cuda]");
  return options;
}

// The entries of Llama's plan for modules that exist here.
TensorPlan block_plan() {
  TensorPlan plan = models::llama3_tp_plan();
  std::erase_if(plan, [](const PlanEntry& entry) { return !entry.modules.starts_with("layers."); });
  return plan;
}

// 0 without virtual GPUs.
double own_work_us() {
  static const auto own_ns = reinterpret_cast<uint64_t (*)()>(dlsym(RTLD_DEFAULT, "virtual_gpu_own_ns"));
  return own_ns ? static_cast<double>(own_ns()) / 1e3 : 0;
}

struct PassTime {
  double host_us = 0, own_us = 0;
};

PassTime pass_time(Blocks& model, const std::vector<Parameter>& parameters, const at::Tensor& x_BSD) {
  const double own = own_work_us();
  const auto begin = std::chrono::steady_clock::now();
  const at::Tensor out_BSD = model(x_BSD);
  out_BSD.backward(at::ones_like(out_BSD));
  const auto end = std::chrono::steady_clock::now();
  PassTime time{.own_us = own_work_us() - own};
  time.host_us = std::chrono::duration<double, std::micro>(end - begin).count() - time.own_us;
  for (const Parameter& parameter : parameters) parameter.data.local.mutable_grad().reset();
  return time;
}

double median(std::vector<double> numbers) {
  const auto middle = numbers.begin() + static_cast<std::ptrdiff_t>(numbers.size() / 2);
  std::nth_element(numbers.begin(), middle, numbers.end());
  return *middle;
}

int run(const std::vector<std::string>& args) {
  const Options options = parse(args);
  at::set_num_threads(1);
  const int peers = options.ranks * options.tp;
  const dist::World world =
      peers == 1 ? dist::init({.device = options.device})
                 : dist::init({.backend = "fake", .device = options.device, .fake_world_size = peers});
  const auto mesh = DeviceMesh::create(world, {{"dp_shard", options.ranks}, {"tp", options.tp}});
  Blocks model(models::Llama3Args{.dim = kDim, .n_layers = kBlocks, .n_heads = kHeads, .multiple_of = 64},
               nn::Construct{.device = world.device(), .deferred = true});
  parallelize(model, mesh["tp"], block_plan());
  FsdpOptions fsdp{.mesh = mesh["dp_shard"]};
  if (options.dtype == "bf16") fsdp.param_dtype = at::kBFloat16;
  fsdp.reduce_dtype = at::kFloat;
  for (auto& layer : model->layers) fully_shard(layer, fsdp);
  fully_shard(model, fsdp);
  materialize(model, /*seed=*/0);
  const auto list = parameters(model);

  const at::Tensor x_BSD = at::randn({1, kLength / options.tp, kDim}, world.device()).requires_grad_(true);
  std::vector<double> times, own;
  for (int i = 0; i < kWarmup + options.repetitions; ++i) {
    const PassTime time = pass_time(model, list, x_BSD);
    if (i < kWarmup) continue;
    times.push_back(time.host_us);
    own.push_back(time.own_us);
  }
  std::cout << "{\"us_per_block\": " << median(times) / kBlocks
            << ", \"least_us_per_block\": " << std::ranges::min(times) / kBlocks;
  if (options.device == "cuda") std::cout << ", \"left_out_us_per_block\": " << median(own) / kBlocks;
  std::cout << "}" << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
