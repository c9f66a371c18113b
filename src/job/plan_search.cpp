#include "job/plan_search.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <tuple>

#include "core/units.h"
#include "titan/config/table.h"
#include "titan/core/error.h"

namespace titan::train {

namespace {

std::string truth(bool value) { return value ? "true" : "false"; }

// ---- the layouts

std::vector<int64_t> divisors_up_to(int64_t number, int64_t most) {
  std::vector<int64_t> result;
  for (int64_t degree = 1; degree <= std::min(number, most); ++degree)
    if (number % degree == 0) result.push_back(degree);
  return result;
}

struct Sizes {
  int64_t layers = 0, heads = 0, kv_heads = 0, sequence = 0;
};

class Layouts {
 public:
  Layouts(const Sizes& sizes, const SearchOptions& options) : sizes_(sizes), options_(options) {}

  std::vector<Layout> all() {
    const auto differs = [](int64_t fixed, int64_t degree) { return fixed > 0 && fixed != degree; };
    for (const int64_t tensor : divisors_up_to(
             options_.world, std::min(options_.max_tensor, std::max<int64_t>(sizes_.kv_heads, 1)))) {
      if (sizes_.heads % tensor != 0 || sizes_.kv_heads % tensor != 0) continue;
      if (differs(options_.tensor, tensor)) continue;
      for (const int64_t context : divisors_up_to(options_.world / tensor, options_.max_context)) {
        // Ring attention cuts a sequence into two parts for each rank.
        if (sizes_.sequence % ((context > 1 ? 2 * context : 1) * tensor) != 0 ||
            differs(options_.context, context))
          continue;
        for (const int64_t pipeline : divisors_up_to(options_.world / tensor / context,
                                                     std::min(options_.max_pipeline, sizes_.layers)))
          if (!differs(options_.pipeline, pipeline))
            add({.tensor = tensor, .context = context, .pipeline = pipeline, .schedule = ""});
      }
    }
    return std::move(layouts_);
  }

 private:
  void add(Layout layout) {
    const int64_t replicas = options_.world / (layout.tensor * layout.context * layout.pipeline);
    if (options_.sequences % replicas != 0) return;
    const int64_t of_replica = options_.sequences / replicas;
    for (int64_t micro_batch = 1; micro_batch <= std::min<int64_t>(of_replica, 8); micro_batch *= 2) {
      if (of_replica % micro_batch != 0) continue;
      layout.micro_batch = micro_batch;
      add_schedules(layout, of_replica / micro_batch);
    }
  }

  void add_schedules(Layout layout, int64_t micro_batches) {
    if (layout.pipeline == 1) return add_policies(layout, micro_batches);
    layout.schedule = "1F1B";
    add_policies(layout, micro_batches);
    for (const int64_t stages : {2, 4}) {
      if (layout.pipeline * stages > sizes_.layers || micro_batches % layout.pipeline != 0) continue;
      layout.schedule = "Interleaved1F1B";
      layout.stages_of_rank = stages;
      add_policies(layout, micro_batches);
    }
    if (layout.pipeline * 2 <= sizes_.layers && micro_batches >= 2 * layout.pipeline) {
      layout.schedule = "ZBVZeroBubble";
      layout.stages_of_rank = 2;
      add_policies(layout, micro_batches);
    }
  }

  void add_policies(Layout layout, int64_t micro_batches) {
    if (options_.only_degrees) {
      layout.only_degrees = true;
      return layouts_.push_back(layout);
    }
    for (const char* recompute : {"none", "selective", "full"}) {
      layout.recompute = recompute;
      for (const bool float8 : {false, true}) {
        if (float8 && !options_.may_use_float8) continue;
        layout.float8 = float8;
        for (const bool asynchronous : {false, true}) {
          if (asynchronous && layout.tensor == 1) continue;
          layout.asynchronous = asynchronous;
          for (const bool keeps : {false, true}) {
            // A pipeline keeps them anyway; a single micro-batch uses them once.
            if (keeps && (layout.pipeline > 1 || micro_batches == 1)) continue;
            layout.keeps_gathered = keeps;
            layouts_.push_back(layout);
          }
        }
      }
    }
  }

  Sizes sizes_;
  const SearchOptions& options_;
  std::vector<Layout> layouts_;
};

// ---- estimates

/// The properties that a block's time depends on.
using Cell = std::tuple<int64_t, int64_t, int64_t, std::string, bool, bool, bool>;
Cell cell_of(const Layout& layout) {
  return {layout.tensor, layout.context,      layout.micro_batch,   layout.recompute,
          layout.float8, layout.asynchronous, layout.keeps_gathered};
}

constexpr int64_t kFewLayers = 1, kMoreLayers = 3;

struct Pieces {
  double of_layer = 0, computing_of_layer = 0,
         rest = 0;  // seconds of a micro-batch; the rest: embedding, loss, optimizer
  double bytes_of_layer = 0, other_bytes = 0;  // a micro-batch's activations and the layer's states
  bool is_known = false;
};

double computing(const PlanAnswer& answer) {
  return answer.seconds[static_cast<size_t>(plan::Activity::Compute)];
}

Pieces pieces_of(const PlanAnswer& few, const PlanAnswer& more) {
  if (!few.error.empty() || !more.error.empty()) return {};
  constexpr double layers = kMoreLayers - kFewLayers;
  Pieces pieces{.of_layer = (more.step_s - few.step_s) / layers,
                .computing_of_layer = (computing(more) - computing(few)) / layers,
                .bytes_of_layer = static_cast<double>(more.peak_bytes - few.peak_bytes) / layers,
                .is_known = true};
  pieces.rest = few.step_s - kFewLayers * pieces.of_layer;
  pieces.other_bytes = static_cast<double>(few.peak_bytes) - kFewLayers * pieces.bytes_of_layer;
  return pieces;
}

struct Estimate {
  double step_s = 0;
  double bytes = 0;
};

class Estimator {
 public:
  Estimator(const Sizes& sizes, const SearchOptions& options) : sizes_(sizes), options_(options) {}

  Estimate of(const Layout& layout, const Pieces& pieces, double state_bytes_of_layer) const {
    const auto layers = static_cast<double>(sizes_.layers), depth = static_cast<double>(layout.pipeline),
               stages = static_cast<double>(layout.stages_of_rank);
    const double replicas = static_cast<double>(options_.world) /
                            static_cast<double>(layout.tensor * layout.context * layout.pipeline);
    const double micro_batches =
        static_cast<double>(options_.sequences) / replicas / static_cast<double>(layout.micro_batch);
    const double activations = std::max(0.0, pieces.bytes_of_layer - state_bytes_of_layer);
    if (layout.pipeline == 1)
      return {micro_batches * (layers * pieces.of_layer + pieces.rest),
              pieces.other_bytes + layers * pieces.bytes_of_layer};
    // Parameters are gathered once a step, so only exchanges of a layer's own stay.
    const double of_layer = layout.tensor * layout.context > 1 ? pieces.of_layer : pieces.computing_of_layer;
    const double of_rank = layers / depth * of_layer + pieces.rest / 2;
    const double bubble = layout.schedule == "ZBVZeroBubble" ? 0.25 * (depth - 1) : (depth - 1) / stages;
    const double in_flight = std::min(
        micro_batches, layout.schedule == "1F1B" ? depth : depth * (1 + (depth - 1) / (depth * stages)));
    // Each rank has states of so many times more of each layer, and the layers' gathered parameters and whole gradients.
    const double states = state_bytes_of_layer * depth * (1 + 6 * replicas / 16);
    return {(micro_batches + bubble) * of_rank,
            pieces.other_bytes + layers / depth * (states + activations * in_flight)};
  }

 private:
  Sizes sizes_;
  const SearchOptions& options_;
};

Sizes sizes_of(const JobConfig& base) {
  const ModelSizes sizes = base.spec().sizes(base.args());
  return {.layers = sizes.num_layers,
          .heads = sizes.num_heads,
          .kv_heads = sizes.num_kv_heads,
          .sequence = base.training.seq_len};
}

}  // namespace

std::vector<Layout::Setting> Layout::settings(int world, int64_t sequences, int64_t layers) const {
  const int64_t replicas = world / (tensor * context * pipeline);
  const bool has_pipeline = pipeline > 1;
  std::vector<Setting> settings = {
      {"parallelism", "data_parallel_shard_degree", "-1"},
      {"parallelism", "tensor_parallel_degree", str(tensor)},
      {"parallelism", "context_parallel_degree", str(context)},
      {"parallelism", "pipeline_parallel_degree", str(pipeline)},
      {"training", "local_batch_size", str(has_pipeline ? sequences / replicas : micro_batch)},
      {"training", "global_batch_size", str(sequences)}};
  if (has_pipeline) {
    settings.push_back({"parallelism", "pipeline_parallel_schedule", config::quoted(schedule)});
    settings.push_back({"parallelism", "pipeline_parallel_microbatch_size", str(micro_batch)});
    // The embedding and the output count as a layer each, unless the layers divide without that.
    const int64_t stages = pipeline * stages_of_rank;
    const int64_t less = layers % stages == 0 ? 0 : 1;
    const int64_t of_stage = (layers + 2 * less + stages - 1) / stages;
    settings.push_back({"parallelism", "pipeline_parallel_layers_per_stage", str(of_stage)});
    settings.push_back({"parallelism", "pipeline_parallel_first_stage_less_layers", str(less)});
    settings.push_back({"parallelism", "pipeline_parallel_last_stage_less_layers", str(less)});
  }
  if (only_degrees) return settings;
  settings.insert(settings.end(), {{"parallelism", "data_parallel_replicate_degree", "1"},
                                   {"parallelism", "enable_async_tensor_parallel", truth(asynchronous)},
                                   {"parallelism", "fsdp_reshard_after_forward",
                                    config::quoted(keeps_gathered ? "never" : "default")},
                                   {"parallelism", "fsdp_reduce_every_micro_batch", truth(!keeps_gathered)},
                                   {"activation_checkpoint", "mode", config::quoted(recompute)}});
  // Otherwise the base's precision stays.
  if (float8) settings.push_back({"model", "converters", "[\"quantize.linear.float8\"]"});
  return settings;
}

std::string Layout::text() const {
  std::string text;
  const auto add = [&](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (tensor > 1) add(str(asynchronous ? "asynchronous " : "", "TP ", tensor));
  if (context > 1) add(str("CP ", context));
  if (pipeline > 1)
    add(str("PP ", pipeline, " (", schedule, stages_of_rank > 1 ? str(", ", stages_of_rank, " stages") : "",
            ")"));
  add(str("micro-batch ", micro_batch));
  if (only_degrees) return text;
  add("recompute " + recompute);
  if (keeps_gathered) add("parameters stay gathered");
  if (float8) add("Float8");
  return text;
}

SearchResult search_layouts(const JobConfig& base, const SearchOptions& options, const Planner& planner,
                            const std::function<void(const std::string&)>& progress) {
  const auto start = std::chrono::steady_clock::now();
  const Sizes sizes = sizes_of(base);
  const std::vector<Layout> layouts = Layouts(sizes, options).all();
  if (layouts.empty())
    throw ConfigError(str("no layout divides ", options.world, " ranks and ", options.sequences,
                          " sequences a step: set training.global_batch_size to a multiple of more of them"));
  SearchResult result;
  result.num_layouts = layouts.size();

  // The first round.
  std::map<Cell, size_t> places;
  std::vector<PlanRequest> requests;
  for (const Layout& layout : layouts) {
    if (!places.try_emplace(cell_of(layout), requests.size()).second) continue;
    Layout block = layout;
    block.pipeline = 1;
    block.stages_of_rank = 1;
    const auto ranks = static_cast<int>(options.world / layout.pipeline);
    const int64_t replicas = ranks / (block.tensor * block.context);
    for (const int64_t layers : {kFewLayers, kMoreLayers}) {
      PlanRequest request{block.settings(ranks, replicas * block.micro_batch, layers), ranks};
      request.settings.push_back({"model.args", "n_layers", str(layers)});
      requests.push_back(std::move(request));
    }
  }
  progress(str(layouts.size(), " layouts; planning ", requests.size() / 2, " kinds of blocks"));
  const std::vector<PlanAnswer> answers = planner(requests);

  // A layer's states, at the least sharding: what a rank has of them grows with the pipeline's depth.
  struct Ranked {
    Layout layout;
    Estimate estimate;
  };
  std::vector<Ranked> ranked;
  const Estimator estimator(sizes, options);
  const double parameters =
      static_cast<double>(base.spec().sizes(base.args()).num_params) / static_cast<double>(sizes.layers);
  constexpr double kStateBytes = 16;  // parameter, gradient, two moments in fp32
  for (const Layout& layout : layouts) {
    const size_t place = places.at(cell_of(layout));
    const Pieces pieces = pieces_of(answers[place], answers[place + 1]);
    if (!pieces.is_known) {
      result.last_error = answers[place].error.empty() ? answers[place + 1].error : answers[place].error;
      continue;
    }
    const double states = kStateBytes * parameters / options.world;
    const Estimate estimate = estimator.of(layout, pieces, states);
    // Estimates of memory are rough.
    if (estimate.bytes < 1.3 * static_cast<double>(options.usable_bytes))
      ranked.push_back({layout, estimate});
  }
  if (ranked.empty() && !result.last_error.empty())
    throw ConfigError(str("no layout can be planned; the last one: ", result.last_error));
  std::ranges::stable_sort(ranked, {}, [&](const Ranked& each) {
    return options.least_memory ? each.estimate.bytes : each.estimate.step_s;
  });

  // The second round.
  const size_t most = 6 * options.num_best, at_once = options.num_at_once;
  for (size_t next = 0; next < std::min(ranked.size(), most) && result.best.size() < options.num_best &&
                        (next == 0 || seconds_since(start) < options.seconds);
       next += at_once) {
    std::vector<PlanRequest> batch;
    const size_t end = std::min(next + at_once, ranked.size());
    for (size_t i = next; i < end; ++i)
      batch.push_back(
          {ranked[i].layout.settings(options.world, options.sequences, sizes.layers), options.world});
    const std::vector<PlanAnswer> planned = planner(batch);
    for (size_t i = 0; i < planned.size(); ++i) {
      const Layout& layout = ranked[next + i].layout;
      if (!planned[i].error.empty()) {
        result.last_error = planned[i].error;
        continue;
      }
      ++result.num_planned;
      const bool fits = planned[i].peak_bytes <= options.usable_bytes;
      progress(str(layout.text(), ": ", fits ? "" : "doesn't fit, ", std::lround(1e3 * planned[i].step_s),
                   " ms (estimate ", std::lround(1e3 * ranked[next + i].estimate.step_s), " ms)"));
      if (fits)
        result.best.push_back({layout, planned[i]});
      else
        ++result.num_too_large;
    }
  }
  std::ranges::stable_sort(result.best, {}, [&](const FoundLayout& found) {
    return options.least_memory ? static_cast<double>(found.plan.peak_bytes) : found.plan.step_s;
  });
  if (result.best.size() > options.num_best) result.best.resize(options.num_best);
  return result;
}

}  // namespace titan::train
