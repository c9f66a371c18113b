// Compares a pipeline schedule's cost with the simulator's prediction, or measures the runner's host time.
//
//   titan launch -n 2 -- pipeline_bench [--schedule NAME] [--micro-batches N] [--seq-len N] [--steps N]
//   pipeline_bench --host-time 1
//
// The first trains the 134M Llama (width 768, 12 layers, vocabulary 32,000) with a pipeline over all ranks,
// with one sequence per micro-batch and one thread per rank. It prints one JSON object: the measured step
// time and bubble (the share of the ranks' time in which they don't compute), and both as simulated from the
// measured times of the stages' actions; medians over the steps. The second runs the middle one of three 1F1B
// ranks, with fake peers and stages that are one tiny product: us_per_action is the time of an action in
// addition to its module's own forward and backward.

#include <algorithm>
#include <chrono>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "parallel/pipeline/split.h"
#include "titan/core/error.h"
#include "titan/dist/world.h"
#include "titan/models/llama3.h"
#include "titan/nn/layers.h"
#include "titan/parallel/parameters.h"
#include "titan/parallel/pipeline_schedule.h"
#include "titan/train/parallel_dims.h"
#include "train/pipeline/pipeline_runner.h"

namespace {

using namespace titan;
using pipeline::Action;
using Clock = std::chrono::steady_clock;

constexpr int64_t kDim = 768, kLayers = 12, kVocabulary = 32000;

using Options = std::map<std::string, std::string>;

Options parse(const std::vector<std::string>& args) {
  Options options = {
      {"schedule", "1F1B"}, {"micro-batches", "8"}, {"seq-len", "256"}, {"steps", "3"}, {"host-time", "0"}};
  for (size_t i = 0; i + 1 < args.size(); i += 2) {
    TITAN_CHECK(args[i].starts_with("--") && options.contains(args[i].substr(2)), "unknown option ", args[i]);
    options[args[i].substr(2)] = args[i + 1];
  }
  TITAN_CHECK(args.size() % 2 == 0, args.back(), " needs a value");
  return options;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

bool computes(Action::Kind kind) { return kind <= Action::Kind::BackwardWeight; }

// ---- the 134M model

struct Model {
  pipeline::Schedule schedule;
  std::vector<std::unique_ptr<train::TrainableModel>> models;
  std::vector<train::Stage> stages;
};

pipeline::ModuleSequence llama_sequence() {
  pipeline::ModuleSequence sequence{{"tok_embeddings"}, {}, {"norm", "output"}};
  for (int64_t layer = 0; layer < kLayers; ++layer) sequence.layers.push_back(str("layers.", layer));
  return sequence;
}

Model build(const pipeline::Schedule& schedule, const train::Meshes& meshes, int64_t seq_len) {
  models::register_llama3();
  const auto spec = train::model_specs().get("llama3");
  const models::Llama3Args args{
      .dim = kDim, .n_layers = kLayers, .n_heads = 12, .vocab_size = kVocabulary, .rope_theta = 500000};
  const auto modules = pipeline::split_evenly(llama_sequence(), schedule.num_stages);
  Model result{.schedule = schedule};
  for (int stage = 0; stage < schedule.num_stages; ++stage) {
    if (schedule.rank_of_stage[static_cast<size_t>(stage)] != meshes.pp.rank()) continue;
    auto model = spec->build(&args, {.construct = deferred(at::kCPU, at::kFloat),
                                     .seq_len = seq_len,
                                     .stage_modules = modules[static_cast<size_t>(stage)]});
    train::apply_parallel_plan(*spec, "", *model, {.meshes = meshes, .fsdp = {.mesh = meshes.fsdp}});
    materialize(model->root(), 1);
    result.stages.push_back({model.get(), stage});
    result.models.push_back(std::move(model));
  }
  return result;
}

std::vector<data::Batch> random_micro_batches(int count, int64_t seq_len) {
  at::manual_seed(1);
  std::vector<data::Batch> batches;
  for (int i = 0; i < count; ++i)
    batches.push_back({at::randint(kVocabulary, {1, seq_len}, at::kLong),
                       at::randint(kVocabulary, {1, seq_len}, at::kLong), seq_len});
  return batches;
}

// The times of each stage's F, I and W, over all ranks. If none of a stage's backwards is split, the time of
// a whole one counts as I; otherwise the simulator takes a whole one as I and W.
pipeline::Costs measured_costs(const std::vector<train::ActionTime>& times, int num_stages,
                               const DeviceMesh& pp) {
  pipeline::Costs costs;
  const auto of = [&](int stage, auto wanted) {
    std::vector<double> seconds;
    for (const train::ActionTime& time : times)
      if (time.action.stage == stage && wanted(time.action.kind))
        seconds.push_back(time.end_s - time.start_s - time.waited_s);
    return pp.group()->max(median(seconds), {"bench::costs"});
  };
  costs.forward.clear();
  costs.input.clear();
  costs.weight.clear();
  for (int stage = 0; stage < num_stages; ++stage) {
    using Kind = Action::Kind;
    costs.forward.push_back(of(stage, [](Kind kind) { return kind == Kind::Forward; }));
    const double input = of(stage, [](Kind kind) { return kind == Kind::BackwardInput; });
    costs.input.push_back(input > 0 ? input : of(stage, [](Kind kind) { return kind == Kind::Backward; }));
    costs.weight.push_back(of(stage, [](Kind kind) { return kind == Kind::BackwardWeight; }));
  }
  return costs;
}

int run_model(const Options& options) {
  at::set_num_threads(1);
  const dist::World world = dist::init({.device = "cpu"});
  const int ranks = world.size(), micro_batches = std::stoi(options.at("micro-batches"));
  const int64_t seq_len = std::stoll(options.at("seq-len"));
  const train::Meshes meshes = train::build_meshes(world, {.pp = ranks});
  const auto& traits = pipeline::schedule_traits(options.at("schedule"));
  const auto schedule = pipeline::with_parameter_actions(pipeline::with_communication(pipeline::make_schedule(
      traits.name, ranks, pipeline::default_num_stages(traits, ranks), micro_batches)));
  Model model = build(schedule, meshes, seq_len);
  train::PipelineRunner runner(model.stages, meshes.pp, at::kCPU);
  const train::StepPlan plan = runner.plan(
      schedule,
      std::vector<train::TensorType>(static_cast<size_t>(schedule.num_stages), {{1, seq_len, kDim}}));
  const auto batches = random_micro_batches(micro_batches, seq_len);

  std::vector<train::ActionTime> all_times;
  std::vector<double> step_s, bubbles;
  for (int step = -1; step < std::stoi(options.at("steps")); ++step) {
    std::vector<train::ActionTime> times;
    runner.record_times(&times);
    meshes.pp.group()->barrier({"bench::start"}).wait();
    const auto start = Clock::now();
    runner.run(plan, batches, micro_batches * seq_len);
    const double seconds = meshes.pp.group()->max(seconds_since(start), {"bench::step"});
    double busy = 0;
    for (const train::ActionTime& time : times)
      if (computes(time.action.kind)) busy += time.end_s - time.start_s - time.waited_s;
    busy = meshes.pp.group()->sum(busy, {"bench::busy"});
    if (step < 0) continue;  // warm-up
    step_s.push_back(seconds);
    bubbles.push_back(1 - busy / (ranks * seconds));
    all_times.insert(all_times.end(), times.begin(), times.end());
  }
  const auto simulated =
      pipeline::simulate(schedule, measured_costs(all_times, schedule.num_stages, meshes.pp));
  if (world.rank() != 0) return 0;
  std::cout << "{\"schedule\": \"" << traits.name << "\", \"ranks\": " << ranks
            << ", \"micro_batches\": " << micro_batches << ", \"step_s\": " << median(step_s)
            << ", \"simulated_step_s\": " << simulated.makespan << ", \"bubble\": " << median(bubbles)
            << ", \"simulated_bubble\": " << simulated.bubble_fraction << "}" << std::endl;
  return 0;
}

// ---- host time

class TinyStage final : public train::TrainableModel {
 public:
  TinyStage() : linear_(8, 8) {}
  nn::AnyRef root() override { return linear_; }
  at::Tensor hidden(const at::Tensor& input) override { return linear_(input); }
  at::Tensor loss(const at::Tensor& input, const at::Tensor&, const ops::ValidTokens&) override {
    return linear_(input).sum();
  }

 private:
  nn::Linear linear_;
};

double direct_us(TinyStage& stage, int micro_batches) {
  const auto start = Clock::now();
  for (int i = 0; i < micro_batches; ++i) {
    const at::Tensor input = at::ones({1, 8, 8}).requires_grad_(true);
    const at::Tensor output = stage.hidden(input);
    output.backward(at::ones_like(output));
  }
  return seconds_since(start) * 1e6;
}

// Runs the middle one of three ranks, so that it receives and sends in both directions.
int run_host_time() {
  constexpr int kMicroBatches = 32, kSteps = 200;
  at::set_num_threads(1);
  const dist::World world = dist::init({.backend = "fake", .fake_rank = 1, .fake_world_size = 3});
  const auto mesh = DeviceMesh::create(world, {{"pp", 3}});
  TinyStage stage;
  train::PipelineRunner runner({{&stage, 1}}, mesh["pp"], at::kCPU);
  const auto schedule = pipeline::with_parameter_actions(
      pipeline::with_communication(pipeline::make_schedule("1F1B", 3, 3, kMicroBatches)));
  const train::StepPlan plan = runner.plan(schedule, std::vector<train::TensorType>(3, {{1, 8, 8}}));
  const auto batches = random_micro_batches(kMicroBatches, 8);
  std::vector<double> through_runner, direct;
  for (int i = 0; i < kSteps; ++i) {
    const auto start = Clock::now();
    runner.run(plan, batches, 1);
    through_runner.push_back(seconds_since(start) * 1e6);
    direct.push_back(direct_us(stage, kMicroBatches));
  }
  const auto actions = static_cast<double>(schedule.ranks[1].size());
  std::cout << "{\"actions\": " << actions
            << ", \"us_per_action\": " << (median(through_runner) - median(direct)) / actions
            << ", \"us_per_micro_batch_of_the_module\": " << median(direct) / kMicroBatches << "}"
            << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse({argv + 1, argv + argc});
    return options.at("host-time") == "0" ? run_model(options) : run_host_time();
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
