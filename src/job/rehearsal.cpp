#include "job/rehearsal.h"

#include <cmath>
#include <set>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <torch/nn/module.h>

#include "job/pipeline_stages.h"
#include "nn/trace_labels.h"
#include "plan/gpu/ranges.h"
#include "titan/core/error.h"
#include "titan/nn/layers.h"
#include "train/recorded_step.h"
#include "train/step_graphs.h"

namespace titan::train {

Rehearsal::Rehearsal(const JobConfig& config, const dist::World& world) : config_(config), world_(world) {
  if (config.compile.enable) on_stream_.emplace(dist::Stream::create(world.device()));
  meshes_ = build_job_meshes(config, world);
  const TrainingSettings& settings = config.training;
  constexpr int64_t most_tokens = int64_t{1} << 27;  // inputs and labels of so many take 2 GiB of the host
  if (settings.local_batch_size > most_tokens / settings.seq_len)
    throw ConfigError(str("training.local_batch_size x training.seq_len = ", settings.local_batch_size, " x ",
                          settings.seq_len, ": a plan takes at most ", most_tokens,
                          " tokens in one batch of a rank; set a smaller training.local_batch_size"));
  const auto zeros = [&] {
    return at::zeros({settings.local_batch_size, settings.seq_len},
                     at::TensorOptions(at::kLong).pinned_memory(world.device().is_cuda()));
  };
  const at::Tensor input = zeros(), labels = zeros();  // all batches are alike
  for (int64_t i = 0; i < settings.batches_per_step(meshes_.dp_degree()); ++i)
    batches_.push_back({.input_BS = input,
                        .labels_BS = labels,
                        .valid_tokens = settings.local_batch_size * settings.seq_len});
  built_ = build_models(config, meshes_, static_cast<int64_t>(batches_.size()));
  optim::OptimizerSettings optimizer = config.optimizer;
  optimizer.args = config.optimizer_args.settings;
  optimizer_.emplace(built_.parameters, optimizer, names_elsewhere(config_, meshes_));
}

int64_t Rehearsal::tokens() const {
  const TrainingSettings& settings = config_.training;
  const int64_t rows =
      settings.local_batch_size * static_cast<int64_t>(batches_.size()) * meshes_.dp_degree();
  // The last batches of a step may be partly empty.
  const int64_t filled = settings.global_batch_size > 0 ? std::min(settings.global_batch_size, rows) : rows;
  return filled * settings.seq_len;
}

struct Rehearsal::Recorded {
  explicit Recorded(const BuiltModels& built, at::Device device)
      : step(device, dist::Stream::create(device), built.models, built.parameters) {}

  at::Tensor skip;
  optim::LaunchedGradNorm norm;
  RecordedStep step;
};

Rehearsal::~Rehearsal() = default;

int Rehearsal::num_usual_steps() { return StepGraphs::kUsualSteps; }

optim::LaunchedGradNorm Rehearsal::launch_grad_norm() {
  return optim::launch_grad_norm(built_.parameters, config_.training.max_norm, world_.device(), meshes_.pp);
}

std::unique_ptr<Rehearsal::Recorded> Rehearsal::record() {
  auto recorded = std::make_unique<Recorded>(built_, world_.device());
  recorded->step.record(
      num_steps_, batches_, [&](const std::vector<data::Batch>& batches, const ops::ValidTokens& tokens) {
        built_.runner->forward_backward(batches, tokens);
        RECORD_USER_SCOPE("optimizer");
        recorded->norm = launch_grad_norm();
        recorded->skip = at::zeros({}, at::TensorOptions(world_.device()).dtype(at::kFloat));
      });
  return recorded;
}

void Rehearsal::launch() {
  if (!recorded_) recorded_ = record();
  Recorded& recorded = *recorded_;
  recorded.step.launch(batches_, tokens());
  RECORD_USER_SCOPE("optimizer");
  if (optimizer_->can_be_recorded())
    recorded.step.update_weights(num_steps_, *optimizer_, recorded.skip, recorded.norm.factor);
  else
    optimizer_->step_unless(recorded.skip, recorded.norm.factor);
}

void Rehearsal::step() {
  optimizer_->zero_grad();
  if (config_.compile.enable && num_steps_++ >= num_usual_steps()) return launch();
  built_.runner->forward_backward(batches_, tokens());
  RECORD_USER_SCOPE("optimizer");
  if (!optimizer_->can_skip_on_device()) {
    // Gradients have no values, and what limits them is part of a step.
    const double max_norm = std::isfinite(config_.training.max_norm) ? 0 : config_.training.max_norm;
    optim::clip_grad_norm(built_.parameters, max_norm, meshes_.pp);
    return optimizer_->step();
  }
  const at::NoGradGuard no_grad;
  const auto norm = launch_grad_norm();
  optimizer_->step_unless(at::zeros({}, at::TensorOptions(world_.device()).dtype(at::kFloat)), norm.factor);
}

std::vector<Role> roles_of(const JobConfig& config, int world_size) {
  const ParallelismSettings& parallelism = config.parallelism;
  const auto depth = static_cast<int>(parallelism.pipeline_parallel_degree);
  std::vector<Role> roles;
  const auto add_each = [&](const char* only, const char* suffix, int64_t offset) {
    for (int pp_rank = 0; pp_rank < depth; ++pp_rank)
      roles.push_back({.name = depth == 1 ? only : str("pipeline rank ", pp_rank, suffix),
                       .rank = pp_rank * (world_size / depth) + static_cast<int>(offset)});
  };
  // Without a balancer the last context rank attends to most keys, and the others wait for it.
  if (const auto& context = parallelism.context; context.degree > 1 && context.load_balancer == "None")
    add_each("last context rank", ", last context rank",
             (context.degree - 1) * parallelism.tensor_parallel_degree);
  add_each("first rank", "", 0);
  if (world_size > depth) roles.push_back({.name = "last rank", .rank = world_size - 1, .is_last = true});
  return roles;
}

namespace {

using plan::Category;

void set_category(plan::Trace& trace, const at::Tensor& tensor, Category category) {
  if (tensor.defined() && tensor.is_cuda() && tensor.has_storage())
    trace.set_category(reinterpret_cast<uintptr_t>(tensor.storage().data()), category);
}

void watch_parameters(const Rehearsal& rehearsal, plan::PlannedGpu& device) {
  std::vector<at::Tensor> whole;
  for (const Parameter& parameter : rehearsal.built().parameters) whole.push_back(parameter.compute);
  device.watch_parameters(whole);
}

int64_t number_of(const dist::Stream& stream) {
  const dist::StreamGuard guard(stream);
  return plan::current_stream();
}

// Whatever lives on after a step.
void set_categories(const Rehearsal& rehearsal, plan::Trace& trace) {
  for (const auto& model : rehearsal.built().models) {
    const torch::nn::Module& root = model->root().module();
    for (const at::Tensor& buffer : root.buffers()) set_category(trace, buffer, Category::Buffers);
    for (const auto& module : root.modules())
      if (const auto* rotary = dynamic_cast<const nn::RotaryEmbeddingImpl*>(module.get()))
        set_category(trace, rotary->table(), Category::Buffers);
  }
  for (const at::Tensor& state : rehearsal.optimizer().allocated_state())
    set_category(trace, state, Category::Optimizer);
  for (const Parameter& parameter : rehearsal.built().parameters) {
    set_category(trace, parameter.data.local.grad(), Category::Gradients);
    set_category(trace, parameter.data.local, Category::Parameters);
  }
}

int64_t bytes_of_gradients(const Rehearsal& rehearsal) {
  std::set<const c10::StorageImpl*> counted;
  int64_t bytes = 0;
  for (const Parameter& parameter : rehearsal.built().parameters) {
    const at::Tensor& gradient = parameter.data.local.grad();
    if (gradient.defined() && counted.insert(gradient.storage().unsafeGetStorageImpl()).second)
      bytes += static_cast<int64_t>(gradient.storage().nbytes());
  }
  return bytes;
}

plan::SymmetricOwners symmetric_owners(const ParallelismSettings& settings, size_t num_models) {
  const int owners = static_cast<int>(num_models);
  const bool is_tensor_shared = settings.enable_async_tensor_parallel &&
                                settings.tensor_parallel_degree > 1 &&
                                overlap_transport(settings) != OverlapTransport::SendReceive;
  return {.tp = is_tensor_shared ? owners : 0,
          .cp = settings.context.rotate_method == "symmetric_memory" ? owners : 0};
}

}  // namespace

PlannedRank rehearse(const JobConfig& config, int world_size, const Role& role, plan::PlannedGpu& device) {
  device.reset();
  const plan::RangeWatch ranges;
  PlannedRank planned{.role = role, .trace = device.shared_trace(), .streams = {}};
  {
    const dist::World world = dist::init(
        {.backend = "fake", .device = "cuda", .fake_rank = role.rank, .fake_world_size = world_size});
    Rehearsal rehearsal(config, world);
    watch_parameters(rehearsal, device);
    std::vector<nn::TraceLabels> labels;
    for (const auto& model : rehearsal.built().models) labels.emplace_back(model->root());
    const int num_steps = config.compile.enable ? Rehearsal::num_usual_steps() + 1 : 2;
    for (int step = 0; step < num_steps; ++step) {
      device.trace().begin_step(plan::current_stream());
      rehearsal.step();
    }
    set_categories(rehearsal, device.trace());
    planned.shard_gradient_bytes = bytes_of_gradients(rehearsal);
    planned.symmetric_owners = symmetric_owners(config.parallelism, rehearsal.built().models.size());
    planned.tokens_of_step = static_cast<double>(rehearsal.tokens());
    for (const dist::NamedStream& named : dist::named_streams())
      planned.streams.emplace_back(number_of(named.stream), named.name);
    if (config.compile.enable) planned.streams.emplace_back(plan::current_stream(), "computation");
  }
  planned.peak_allocated_bytes = device.allocator().allocated().peak;
  planned.peak_reserved_bytes = device.allocator().reserved().peak;
  return planned;
}

void check_plannable(const JobConfig& config, const config::Origins& origins) {
  std::vector<std::string> problems;
  const auto refuse = [&](bool is_set, const char* key, const char* what) {
    if (is_set) problems.push_back(origins.problem(key, what));
  };
  refuse(config.training.enable_cpu_offload, "training.enable_cpu_offload",
         "a plan counts a GPU's memory, and not what the optimizer does on the host; set it to false");
  refuse(config.comm.register_buffers, "comm.register_buffers",
         "a plan doesn't know what memory registered buffers take, which NCCL allocates; set it to false");
  if (!problems.empty()) throw ConfigError(std::move(problems));
}

}  // namespace titan::train
