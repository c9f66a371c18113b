#include "job/layout_estimates.h"

#include <algorithm>
#include <cmath>

#include "titan/core/error.h"
#include "titan/optim/optimizer.h"
#include "titan/parallel/pipeline_schedule.h"

namespace titan::train {

int64_t layers_of_an_end(int64_t layers, int64_t stages) { return layers % stages == 0 ? 0 : 1; }

bool divides_evenly(int64_t layers, int64_t stages) {
  return (layers + 2 * layers_of_an_end(layers, stages)) % stages == 0;
}

Layout block_kind(Layout layout) {
  if (layout.pipeline > 1) {
    layout.replicate = 0;
    // Context-parallel ranks share parameters, which the pipeline doesn't gather for each micro-batch.
    layout.keeps_gathered = layout.context > 1 && !layout.only_degrees;
  }
  layout.pipeline = layout.stages_of_rank = 1;
  layout.schedule.clear();
  return layout;
}

namespace {

// Then a step of two micro-batches shows what each of them takes.
bool exchanges_once_a_step(const Layout& kind) {
  return kind.keeps_gathered || kind.replicate > 1 || kind.only_degrees;
}

// A whole parameter's and its gradient's, which lives on until the last micro-batch's.
double whole_bytes(const ParameterBytes& bytes, const Layout& layout, bool has_one_micro_batch) {
  return (bytes.gathered + (has_one_micro_batch ? 0 : bytes.whole_gradient)) /
         static_cast<double>(layout.tensor);
}

}  // namespace

ParameterBytes parameter_bytes(const JobConfig& config) {
  const auto size = [](at::ScalarType dtype) { return static_cast<double>(c10::elementSize(dtype)); };
  const TrainingSettings& training = config.training;
  const at::ScalarType dtype = scalar_type(training.dtype);
  const optim::OptimizerSpec& rule = optim::optimizers().get(config.optimizer.name);
  const at::ScalarType of_state = rule.state_dtype(rule.args.make(config.optimizer).get(), dtype);
  return {.state = 2 * size(dtype) + static_cast<double>(rule.state.size()) * size(of_state),
          .gathered = size(scalar_type(training.mixed_precision_param)),
          .whole_gradient = size(scalar_type(training.mixed_precision_reduce))};
}

// In a smaller model than one of three layers a step has other proportions.
BlockLayers block_layers(const Layout& kind, const JobConfig& base) {
  const ActivationCheckpointSettings& activations = base.activation_checkpoint;
  const std::string& mode = kind.only_degrees ? activations.mode : kind.recompute;
  const std::string& option = activations.selective_ac_option;
  if (mode != "selective" || option == "op") return {};
  const auto n = static_cast<int64_t>(std::stoll(option));
  const auto rounded_up = [n](int64_t layers) { return (layers + n - 1) / n * n; };
  const BlockLayers usual;
  return {rounded_up(usual.few), rounded_up(usual.few) + rounded_up(usual.more - usual.few)};
}

std::vector<PlanRequest> block_requests(const Layout& kind, const BlockLayers& layers, int world) {
  const int64_t of_replica = kind.tensor * kind.context;
  const int ranks = kind.replicate == 0 ? static_cast<int>(of_replica) : world;
  Layout block = kind;
  block.replicate = std::max<int64_t>(kind.replicate, 1);
  std::vector<PlanRequest> requests;
  for (int64_t micro_batches = 1; micro_batches <= (exchanges_once_a_step(kind) ? 2 : 1); ++micro_batches)
    for (const int64_t number : {layers.few, layers.more}) {
      const int64_t sequences = ranks / of_replica * micro_batches * kind.micro_batch;
      // All ranks take the same time, and none more memory than the first one.
      requests.push_back({block.settings(ranks, sequences, number), ranks, /*only_first_rank=*/true});
      requests.back().settings.push_back({"model.args", "n_layers", str(number)});
    }
  return requests;
}

BlockCosts block_costs(const Layout& kind, const BlockLayers& layers, const std::vector<PlanAnswer>& answers,
                       const ParameterBytes& bytes) {
  for (const PlanAnswer& answer : answers)
    if (!answer.error.empty()) return {.error = answer.error, .has_failed = answer.has_failed};
  const auto amount = [&](size_t first, const auto& value) {
    const double few = value(answers[first]), more = value(answers[first + 1]);
    const double of_layer = (more - few) / static_cast<double>(layers.more - layers.few);
    return BlockCosts::Amount{of_layer, more - static_cast<double>(layers.more) * of_layer};
  };
  const auto seconds = [](const PlanAnswer& answer) { return answer.step_s; };
  const auto during = [](plan::Activity activity) {
    return [activity](const PlanAnswer& answer) { return answer.seconds[static_cast<size_t>(activity)]; };
  };
  const auto parameters = [](const PlanAnswer& answer) { return answer.parameters; };
  const size_t last = answers.size() - 2;
  const BlockCosts::Amount step = amount(0, seconds);
  const BlockCosts::Amount once =
      last == 0 ? amount(0, during(plan::Activity::Optimizer)) : step - (amount(last, seconds) - step);
  BlockCosts costs{.seconds = step - once,
                   .once = once,
                   .computing = amount(0, during(plan::Activity::Compute)),
                   .bytes = {},
                   .bytes_of_one = {},
                   .parameters = amount(0, parameters),
                   .error = {}};
  // With the layers grow shards, their gradients, their states and what is saved for the backward. The rest of what each category takes at most
  // belongs to the modules that a step is at, or to embedding and output.
  const auto bytes_of = [&](size_t first, bool has_one_micro_batch) {
    const auto most = [&](plan::Category category) {
      return amount(first, [category](const PlanAnswer& answer) {
        return static_cast<double>(answer.most_bytes[static_cast<size_t>(category)]);
      });
    };
    const auto saved = [](const PlanAnswer& answer) { return static_cast<double>(answer.saved_bytes); };
    BlockCosts::Amount sum;
    sum.of_layer =
        2 * most(plan::Category::Parameters).of_layer + most(plan::Category::Optimizer).of_layer +
        amount(first, saved).of_layer +
        (kind.keeps_gathered ? whole_bytes(bytes, kind, has_one_micro_batch) * costs.parameters.of_layer : 0);
    sum.rest = static_cast<double>(plan::total(answers[first + 1].most_bytes)) -
               static_cast<double>(layers.more) * sum.of_layer;
    return sum;
  };
  costs.bytes = bytes_of(last, /*has_one_micro_batch=*/false);
  costs.bytes_of_one = bytes_of(0, /*has_one_micro_batch=*/true);
  return costs;
}

LayoutEstimator::LayoutEstimator(const JobConfig& base, const SearchOptions& options)
    : base_(base),
      options_(options),
      layers_(base.spec().sizes(base.args()).num_layers),
      sequence_(base.training.seq_len),
      bytes_(parameter_bytes(base)) {}

LayoutEstimate LayoutEstimator::of(const Layout& layout, const BlockCosts& block) {
  const auto layers = static_cast<double>(layers_), batches = static_cast<double>(micro_batches(layout));
  if (layout.pipeline == 1)
    return {batches * block.seconds.of(layers) + block.once.of(layers),
            (has_one_micro_batch(layout) ? block.bytes_of_one : block.bytes).of(layers), 0};
  const auto [schedule_time, live, delayed] = schedule_figures(layout);
  const auto depth = static_cast<double>(layout.pipeline),
             stages = static_cast<double>(layout.stages_of_rank);
  const auto less = static_cast<double>(layers_of_an_end(layers_, layout.pipeline * layout.stages_of_rank));
  const double of_stage = std::ceil((layers + 2 * less) / (depth * stages));
  const auto of_replica = static_cast<double>(layout.tensor * layout.context);
  const double sharing =
      static_cast<double>(options_.world) / (depth * static_cast<double>(layout.replicate));

  // The output may take longer than the layers that it counts for.
  const double of_output = std::max(0.0, block.seconds.rest - less * block.seconds.of_layer);
  const double once = block.once.of(of_stage * stages) * of_replica / sharing;
  const double step_s = schedule_time * of_stage * block.seconds.of_layer + batches * of_output + once;

  // An end that counts for a layer has its parameters in place of that layer's.
  const double parameters =
      of_stage * stages * block.parameters.of_layer + (less > 0 ? 0 : block.parameters.rest / 2);
  const double stages_gathered = std::min(1.0, 3 / stages);
  const double whole = parameters / static_cast<double>(layout.tensor) *
                       (bytes_.whole_gradient + bytes_.gathered * stages_gathered);
  const double of_parameter = bytes_.state / of_replica +
                              (block_kind(layout).keeps_gathered ? whole_bytes(bytes_, layout, false) : 0);
  const double activations = std::max(0.0, block.bytes.of_layer - of_parameter * block.parameters.of_layer);
  const double others = std::max(0.0, block.bytes.rest - of_parameter * block.parameters.rest);
  const double tokens = static_cast<double>(layout.micro_batch * sequence_ / layout.context);
  return {step_s, bytes_.state * parameters / sharing + whole + live * of_stage * activations + others,
          delayed * of_stage * tokens};
}

double LayoutEstimator::bytes_of_copies(const Layout& layout, const BlockCosts& block) const {
  const double parameters = block.parameters.of(static_cast<double>(layers_));
  const auto more = static_cast<double>(layout.replicate - std::max<int64_t>(options_.replicate, 1));
  const double of_replicas = bytes_.state * more / static_cast<double>(options_.world);
  const double whole = layout.keeps_gathered ? whole_bytes(bytes_, layout, has_one_micro_batch(layout)) : 0;
  return parameters * (of_replicas + whole);
}

int64_t LayoutEstimator::micro_batches(const Layout& layout) const {
  return options_.sequences * layout.tensor * layout.context * layout.pipeline / options_.world /
         layout.micro_batch;
}

// After two rounds through all stages, each further micro-batch takes as long as the one before it.
LayoutEstimator::ScheduleFigures LayoutEstimator::schedule_figures(const Layout& layout) {
  const pipeline::ScheduleTraits& traits = pipeline::schedule_traits(layout.schedule);
  const auto depth = static_cast<int>(layout.pipeline), stages = static_cast<int>(layout.stages_of_rank),
             all = static_cast<int>(micro_batches(layout));
  const bool may_be_cut =
      traits.micro_batch_rule != pipeline::MicroBatchRule::WholeRounds || all % depth == 0;
  const int simulated = may_be_cut ? std::min(all, 2 * depth * stages) : all;
  // Full recomputation is a forward before a backward, which only matters where a backward is cut.
  const bool recomputes = traits.splits_backward && layout.recompute == "full";
  const auto [found, is_new] = figures_.try_emplace({layout.schedule, depth, stages, simulated, recomputes});
  ScheduleFigures& figures = found->second;
  if (is_new) {
    const double forward = recomputes ? 1 / 4.0 : 1 / 3.0;
    const pipeline::Simulation simulation =
        pipeline::simulate(pipeline::make_schedule(layout.schedule, depth, depth * stages, simulated),
                           {.forward = {forward}, .input = {1 - 2 * forward}, .weight = {forward}});
    figures.time = simulation.makespan;
    for (const pipeline::RankFigures& rank : simulation.ranks) {
      figures.live = std::max<double>(figures.live, rank.peak_live);
      figures.delayed = std::max<double>(figures.delayed, rank.peak_owed_weight);
    }
  }
  const double more = static_cast<double>(all - simulated) * stages;
  return {figures.time + more, figures.live + (traits.memory_grows ? more : 0), figures.delayed};
}

}  // namespace titan::train
