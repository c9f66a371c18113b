#include "job/pipeline_stages.h"

#include <strings.h>
#include <algorithm>
#include <cstring>
#include <limits>
#include <set>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "titan/core/error.h"
#include "titan/nn/containers.h"
#include "titan/parallel/pipeline_schedule.h"

namespace titan::train {

namespace {

constexpr const char* kDegree = "parallelism.pipeline_parallel_degree";
constexpr const char* kSplit = "parallelism.pipeline_parallel_split";
constexpr const char* kMemory = "parallelism.pipeline_parallel_split_memory_gib";
constexpr const char* kSchedule = "parallelism.pipeline_parallel_schedule";
constexpr const char* kFile = "parallelism.pipeline_parallel_schedule_csv";
constexpr const char* kLists = "parallelism.module_fqns_per_model_part";
constexpr const char* kLayersPerStage = "parallelism.pipeline_parallel_layers_per_stage";
constexpr const char* kMicroBatchSize = "parallelism.pipeline_parallel_microbatch_size";
constexpr const char* kMaxLive = "parallelism.pipeline_parallel_max_live_activations";
constexpr const char* kReshard = "parallelism.fsdp_reshard_after_forward";

// Turns an exception of `make` into a KeyedProblem about the value of `key`.
template <class Make>
decltype(auto) about(const char* key, const Make& make) {
  try {
    return make();
  } catch (const ConfigError& error) {
    std::string what;
    for (const std::string& problem : error.problems()) what += (what.empty() ? "" : "; ") + problem;
    throw KeyedProblem{key, what};
  } catch (const InternalError&) {
    throw;
  } catch (const Error& error) {  // a file that can't be read, a model that can't be a stage
    throw KeyedProblem{key, error.what()};
  }
}

int num_ranks(const ParallelismSettings& settings) {
  return static_cast<int>(settings.pipeline_parallel_degree);
}

pipeline::EndWeights end_weights(const ParallelismSettings& settings) {
  return {settings.pipeline_parallel_first_stage_less_layers,
          settings.pipeline_parallel_last_stage_less_layers};
}

// The whole model, built with sizes only.
struct WholeModel {
  pipeline::ModuleSequence modules;
  std::vector<nn::SharedParameter> shared;
};

WholeModel describe_whole(const JobConfig& config) {
  const auto model = config.spec().build(config.args(), {.construct = deferred(at::kMeta)});
  const nn::LayerSequence* sequence = nn::layer_sequence(model->root());
  if (!sequence)
    throw KeyedProblem{kDegree,
                       str("the model ", config.model.name,
                           " can't be cut into stages: its root module doesn't name the modules that "
                           "it calls in a row (nn::LayerSequence)")};
  const nn::LayerSequence::Names names = sequence->layer_names();
  return {{names.before, names.layers, names.after}, sequence->shared_parameters()};
}

// The number of stages, their ranks, and the key that determines them.
struct StageMap {
  std::vector<int> rank_of_stage;
  const char* key = kDegree;

  int num_stages() const { return static_cast<int>(rank_of_stage.size()); }
};

pipeline::Schedule read_file(const ParallelismSettings& settings) {
  return about(kFile, [&] { return pipeline::read_schedule_csv(settings.pipeline_parallel_schedule_csv); });
}

bool is_in_file(const ParallelismSettings& settings) {
  return !settings.pipeline_parallel_schedule_csv.empty();
}

StageMap map_from_file(const ParallelismSettings& settings) {
  const pipeline::Schedule schedule = read_file(settings);
  if (schedule.num_ranks() != num_ranks(settings))
    throw KeyedProblem{kFile, str("is a schedule for ", schedule.num_ranks(),
                                  " ranks, but pipeline_parallel_degree is ", num_ranks(settings))};
  return {schedule.rank_of_stage, kFile};
}

const pipeline::ScheduleTraits& traits_of(const ParallelismSettings& settings) {
  const std::string& name = settings.pipeline_parallel_schedule;
  constexpr const char* kOfFiles = "PipelineSchedule";  // Single, Multi
  if (::strncasecmp(name.c_str(), kOfFiles, std::strlen(kOfFiles)) == 0)
    throw KeyedProblem{kSchedule, "needs a schedule file, but pipeline_parallel_schedule_csv is empty"};
  return about(kSchedule,
               [&]() -> const pipeline::ScheduleTraits& { return pipeline::schedule_traits(name); });
}

// Micro-batches in one of the loader's batches.
int micro_batches_per_batch(const JobConfig& config) {
  return static_cast<int>(config.training.local_batch_size /
                          config.parallelism.pipeline_parallel_microbatch_size);
}

// Enough to suit every schedule and to fill every pipeline, for uses in which only the stages matter.
int enough_micro_batches(int ranks, int stages) { return ranks * stages; }

StageMap map_by_name(const ParallelismSettings& settings, const pipeline::ModuleSequence& modules) {
  const pipeline::ScheduleTraits& traits = traits_of(settings);
  const int ranks = num_ranks(settings);
  int stages = pipeline::default_num_stages(traits, ranks);
  StageMap map;
  if (const auto& lists = settings.module_fqns_per_model_part) {
    stages = static_cast<int>(lists->size());
    map.key = kLists;
  } else if (const auto& layers = settings.pipeline_parallel_layers_per_stage) {
    stages =
        pipeline::count_stages(static_cast<int64_t>(modules.layers.size()), end_weights(settings), *layers);
    map.key = kLayersPerStage;
  }
  if (const auto problem =
          pipeline::counts_problem(traits, ranks, stages, enough_micro_batches(ranks, stages)))
    throw KeyedProblem{map.key, *problem};
  map.rank_of_stage = pipeline::stage_map(traits, ranks, stages);
  return map;
}

// The number of micro-batches that each stage holds.
std::vector<double> live_micro_batches(const JobConfig& config, const StageMap& map) {
  const ParallelismSettings& settings = config.parallelism;
  if (is_in_file(settings)) return pipeline::live_micro_batches(read_file(settings));
  const pipeline::ScheduleTraits& traits = traits_of(settings);
  const int count = traits.memory_grows ? micro_batches_per_batch(config)
                                        : enough_micro_batches(num_ranks(settings), map.num_stages());
  return pipeline::live_micro_batches(
      pipeline::make_schedule(traits.name, num_ranks(settings), map.num_stages(), count));
}

pipeline::StageModules split_by_costs(const JobConfig& config, const pipeline::ModuleSequence& modules,
                                      const StageMap& map) {
  const ParallelismSettings& settings = config.parallelism;
  pipeline::BalanceOptions options{.rank_of_stage = map.rank_of_stage};
  ParallelDims dims;
  if (const auto& gib = settings.pipeline_parallel_split_memory_gib) {
    if (settings.data_parallel_shard_degree < 0)
      throw KeyedProblem{kMemory,
                         "needs data_parallel_shard_degree as a number, by which parameters are divided"};
    dims.dp_shard = static_cast<int>(settings.data_parallel_shard_degree);
    dims.rows = row_axes(chosen_parallelisms(settings));
    dims.tp = static_cast<int>(settings.tensor_parallel_degree);
    options.memory_bytes = *gib * (1 << 30);
    options.live_micro_batches = live_micro_batches(config, map);
  }
  try {
    return pipeline::split_balanced(modules, computed_costs(config, dims), options);
  } catch (const c10::NotImplementedError& error) {
    throw KeyedProblem{kSplit,
                       str("can't compute the costs of the model's modules: it uses an operation that "
                           "LibTorch can't run on meta tensors: ",
                           reason_of(error))};
  }
}

pipeline::StageModules split(const JobConfig& config, const pipeline::ModuleSequence& modules,
                             const StageMap& map) {
  const ParallelismSettings& settings = config.parallelism;
  if (const auto& lists = settings.module_fqns_per_model_part) {
    if (std::ssize(*lists) != map.num_stages())
      throw KeyedProblem{
          kLists, str("has ", lists->size(), " lists, but the schedule has ", map.num_stages(), " stages")};
    return about(kLists, [&] { return pipeline::split_by_lists(modules, *lists); });
  }
  if (settings.pipeline_parallel_split == "balanced")
    return about(settings.pipeline_parallel_split_memory_gib ? kMemory : kSplit,
                 [&] { return split_by_costs(config, modules, map); });
  return about(map.key,
               [&] { return pipeline::split_evenly(modules, map.num_stages(), end_weights(settings)); });
}

std::vector<StageSharedParameter> shared_between(const pipeline::StageModules& stages,
                                                 const std::vector<nn::SharedParameter>& parameters) {
  std::vector<StageSharedParameter> shared;
  for (const nn::SharedParameter& parameter : parameters) {
    StageSharedParameter found{parameter.name, {}};
    for (size_t stage = 0; stage < stages.size(); ++stage)
      if (std::ranges::find_first_of(stages[stage], parameter.modules) != stages[stage].end())
        found.stages.push_back(static_cast<int>(stage));
    if (found.stages.size() > 1) shared.push_back(std::move(found));
  }
  return shared;
}

// Throws KeyedProblem.
StagePlan make_plan(const JobConfig& config) {
  const ParallelismSettings& settings = config.parallelism;
  if (num_ranks(settings) == 1) return {};
  const WholeModel whole = describe_whole(config);
  const StageMap map = is_in_file(settings) ? map_from_file(settings) : map_by_name(settings, whole.modules);
  StagePlan plan{split(config, whole.modules, map), map.rank_of_stage, {}};
  plan.shared = shared_between(plan.modules, whole.shared);
  return plan;
}

void check_rows(const JobConfig& config, std::vector<KeyedProblem>& problems) {
  const int64_t micro_batch_rows = config.parallelism.pipeline_parallel_microbatch_size;
  const auto check = [&](const char* key, int64_t rows) {
    if (rows % micro_batch_rows != 0)
      problems.push_back({kMicroBatchSize, str("doesn't divide ", key, " = ", rows)});
  };
  check("training.local_batch_size", config.training.local_batch_size);
  if (config.validation.enable) check("validation.local_batch_size", config.validation.local_batch_size);
}

// Throws KeyedProblem.
template <class Make>
void check_live(const ParallelismSettings& settings, const Make& make) {
  const auto& most = settings.pipeline_parallel_max_live_activations;
  if (!most) return;
  const auto limit = static_cast<int>(std::min<int64_t>(*most, std::numeric_limits<int>::max()));
  about(kMaxLive, [&] { pipeline::check_schedule(make(), {.max_live_activations = limit}); });
}

// A file schedules one batch, and so do named schedules whose memory grows with the micro-batches. Others
// schedule the whole step. Throws KeyedProblem.
void check_micro_batches(const JobConfig& config, const StagePlan& plan, int batch_degree) {
  const ParallelismSettings& settings = config.parallelism;
  const TrainingSettings& training = config.training;
  const int in_batch = micro_batches_per_batch(config);
  if (is_in_file(settings)) {
    const pipeline::Schedule schedule = read_file(settings);
    if (schedule.num_micro_batches != in_batch)
      throw KeyedProblem{kFile,
                         str("is a schedule for ", schedule.num_micro_batches, " micro-batches, but ",
                             "training.local_batch_size / pipeline_parallel_microbatch_size is ", in_batch)};
    about(kFile, [&] { pipeline::check_schedule(schedule); });
    check_live(settings, [&] { return schedule; });
    return;
  }
  const int64_t batches = training.batches_per_step(batch_degree);
  const pipeline::ScheduleTraits& traits = traits_of(settings);
  const auto micro_batches = static_cast<int>(traits.memory_grows ? in_batch : in_batch * batches);
  const auto problem =
      pipeline::counts_problem(traits, num_ranks(settings), plan.num_stages(), micro_batches);
  if (problem)
    throw KeyedProblem{
        kMicroBatchSize,
        str(*problem, "; a batch of training.local_batch_size = ", training.local_batch_size, " rows has ",
            in_batch, traits.memory_grows ? "" : str(", and a step has ", batches, " such batch(es)"))};
  check_live(settings, [&] {
    return pipeline::make_schedule(traits.name, num_ranks(settings), plan.num_stages(), micro_batches);
  });
}

}  // namespace

StagePlan plan_stages(const JobConfig& config) {
  try {
    return make_plan(config);
  } catch (const KeyedProblem& problem) {
    throw ConfigError(str(problem.key, ": ", problem.what));
  }
}

void check_pipeline(const JobConfig& config, const ParallelDims& dims, std::vector<KeyedProblem>& problems) {
  if (dims.pp == 1) return;
  const std::string& reshard = config.parallelism.fsdp_reshard_after_forward;
  if (reshard != "default" && reshard != "never")
    problems.push_back(
        {kReshard,
         "in a pipeline the schedule gathers and frees parameters: it has to be \"default\" or "
         "\"never\""});
  if (config.parallelism.pipeline_parallel_split_memory_gib &&
      config.parallelism.pipeline_parallel_split != "balanced")
    problems.push_back({kMemory, "is read only with pipeline_parallel_split = \"balanced\""});
  const size_t others = problems.size();
  check_rows(config, problems);
  try {
    const StagePlan plan = make_plan(config);
    if (problems.size() == others) check_micro_batches(config, plan, dims.batch_degree());
  } catch (const KeyedProblem& problem) {
    problems.push_back(problem);
  }
}

std::vector<int> StagePlan::stages_of(int pp_rank) const {
  std::vector<int> stages;
  for (int stage = 0; stage < num_stages(); ++stage)
    if (rank_of_stage[static_cast<size_t>(stage)] == pp_rank) stages.push_back(stage);
  return stages;
}

int metrics_rank(const ParallelDims& dims, const StagePlan& plan) {
  return plan.rank_of_stage.back() * (dims.world_size() / dims.pp);
}

std::vector<std::unique_ptr<TrainableModel>> build_stages(const JobConfig& config, const StagePlan& plan,
                                                          const Meshes& meshes, at::Device device) {
  if (!device.is_meta() && meshes.world.rank() == 0) log_float8_layers(config);
  std::vector<std::unique_ptr<TrainableModel>> stages;
  for (const int stage : plan.stages_of(meshes.pp.rank()))
    stages.push_back(build_model(config, meshes, device, plan.modules[static_cast<size_t>(stage)]));
  return stages;
}

namespace {

// This rank's meshes, in a world whose other ranks aren't there.
Meshes played_by_fakes(const JobConfig& config, const dist::World& world) {
  return build_job_meshes(
      config, dist::init({.backend = "fake", .fake_rank = world.rank(), .fake_world_size = world.size()}));
}

}  // namespace

std::vector<TensorType> stage_boundaries(const JobConfig& config, const StagePlan& plan,
                                         const dist::World& world, int64_t rows, int64_t seq_len) {
  at::NoGradGuard no_grad;
  at::Tensor input = at::empty({rows, seq_len}, at::TensorOptions(at::kMeta).dtype(at::kLong));
  std::vector<TensorType> boundaries = {{input.sizes().vec(), input.scalar_type()}};
  if (plan.num_stages() == 1) return boundaries;
  const Meshes meshes = played_by_fakes(config, world);
  for (size_t stage = 0; stage + 1 < plan.modules.size(); ++stage) {
    input = build_model(config, meshes, at::kMeta, plan.modules[stage])->hidden(input);
    boundaries.push_back({input.sizes().vec(), input.scalar_type()});
  }
  return boundaries;
}

namespace {

using pipeline::Schedule;

// A file's micro-batches are those of one batch (check_pipeline). A named schedule whose memory grows with
// the micro-batches runs one batch at a time, too.
Schedule schedule_of_step(const JobConfig& config, const StagePlan& plan, int num_batches) {
  const ParallelismSettings& settings = config.parallelism;
  if (is_in_file(settings))
    return pipeline::repeat(pipeline::read_schedule_csv(settings.pipeline_parallel_schedule_csv),
                            num_batches);
  const auto make = [&](int num_micro_batches) {
    return pipeline::make_schedule(settings.pipeline_parallel_schedule, num_ranks(settings),
                                   plan.num_stages(), num_micro_batches);
  };
  const int per_batch = micro_batches_per_batch(config);
  return pipeline::schedule_traits(settings.pipeline_parallel_schedule).memory_grows
             ? pipeline::repeat(make(per_batch), num_batches)
             : make(per_batch * num_batches);
}

Schedule complete(const Schedule& schedule) {
  return pipeline::with_parameter_actions(pipeline::with_communication(schedule));
}

Schedule training_schedule(const JobConfig& config, const StagePlan& plan, int64_t num_batches) {
  Schedule schedule = complete(schedule_of_step(config, plan, static_cast<int>(num_batches)));
  pipeline::check_schedule(schedule);
  return schedule;
}

TiedHolders tied_holders(const StagePlan& plan) {
  TiedHolders holders;
  for (const StageSharedParameter& shared : plan.shared) {
    std::set<int> ranks;
    for (const int stage : shared.stages) ranks.insert(plan.rank_of_stage[static_cast<size_t>(stage)]);
    holders[shared.name].assign(ranks.begin(), ranks.end());
  }
  return holders;
}

int peak_live(const Schedule& schedule, int pp_rank) {
  return std::max(1, pipeline::simulate(schedule).ranks.at(static_cast<size_t>(pp_rank)).peak_live);
}

}  // namespace

int most_under_way(const JobConfig& config, const StagePlan& plan, int pp_rank) {
  if (plan.num_stages() == 1) return 1;
  return peak_live(training_schedule(config, plan, /*num_batches=*/1), pp_rank);
}

// A layer's policy applies to one forward, on any stage of the rank.
void share_memory_budget(ActivationCheckpointSettings& settings, const Schedule& schedule, int pp_rank) {
  if (auto& bytes = settings.memory_budget_bytes) *bytes /= peak_live(schedule, pp_rank);
}

BuiltModels build_pipeline(const JobConfig& config, const Meshes& meshes, at::Device device,
                           int64_t num_batches) {
  const StagePlan plan = plan_stages(config);
  const Schedule schedule = training_schedule(config, plan, num_batches);
  JobConfig of_rank = config;
  share_memory_budget(of_rank.activation_checkpoint, schedule, meshes.pp.rank());
  BuiltModels built;
  built.models = build_stages(of_rank, plan, meshes, device);
  std::vector<Stage> stages;
  const std::vector<int> indices = plan.stages_of(meshes.pp.rank());
  for (size_t i = 0; i < indices.size(); ++i) {
    stages.push_back({built.models[i].get(), indices[i]});
    for (Parameter& parameter : parameters(built.models[i]->root()))
      built.parameters.push_back(std::move(parameter));
  }
  const int64_t rows = config.parallelism.pipeline_parallel_microbatch_size;
  const auto parts_of = [&](const Schedule& of, int64_t seq_len) {
    return ScheduleParts{of, stage_boundaries(config, plan, meshes.world.world(), rows, seq_len)};
  };
  const ScheduleParts training = parts_of(schedule, config.training.seq_len);
  std::optional<ScheduleParts> evaluation;
  if (const auto& validation = config.validation; validation.enable)
    evaluation = parts_of(complete(pipeline::make_forward_only_schedule(
                              plan.rank_of_stage, static_cast<int>(validation.local_batch_size / rows))),
                          validation.seq_len);
  TiedGradients tied(built.parameters, meshes.pp, tied_holders(plan));
  auto runner = std::make_unique<PipelineRunner>(std::move(stages), meshes.pp, device);
  runner->set_schedules(training, evaluation, rows, std::move(tied));
  built.runner = std::move(runner);
  return built;
}

std::vector<std::string> names_elsewhere(const JobConfig& config, const Meshes& meshes) {
  std::vector<std::string> names;
  if (meshes.pp.size() == 1 || config.optimizer.param_groups.empty()) return names;
  const StagePlan plan = plan_stages(config);
  const Meshes played = played_by_fakes(config, meshes.world.world());
  for (size_t stage = 0; stage < plan.modules.size(); ++stage) {
    if (plan.rank_of_stage[stage] == meshes.pp.rank()) continue;
    for (const Parameter& parameter :
         parameters(build_model(config, played, at::kMeta, plan.modules[stage])->root()))
      names.push_back(parameter.name);
  }
  return names;
}

}  // namespace titan::train
