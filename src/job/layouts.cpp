#include "job/layouts.h"

#include <algorithm>
#include <set>
#include <utility>

#include "job/layout_estimates.h"
#include "job/plan_search.h"
#include "titan/config/table.h"
#include "titan/core/error.h"
#include "titan/parallel/pipeline_schedule.h"

namespace titan::train {

namespace {

std::string truth(bool value) { return value ? "true" : "false"; }

std::vector<int64_t> divisors_up_to(int64_t number, int64_t most) {
  std::set<int64_t> all;
  for (int64_t divisor = 1; divisor * divisor <= number; ++divisor)
    if (number % divisor == 0) all.insert({divisor, number / divisor});
  return {all.begin(), all.upper_bound(most)};
}

class Layouts {
 public:
  Layouts(const JobConfig& base, const SearchOptions& options)
      : sizes_(base.spec().sizes(base.args())),
        sequence_(base.training.seq_len),
        is_sequence_parallel_(base.parallelism.enable_sequence_parallel),
        is_balanced_(base.parallelism.context.load_balancer == "headtail"),
        may_select_layers_(selects_layers(base.activation_checkpoint.selective_ac_option)),
        options_(options) {}

  std::vector<Layout> all() {
    for (const int64_t tensor :
         degrees(options_.world, std::min(options_.max_tensor, std::max<int64_t>(sizes_.num_kv_heads, 1)),
                 options_.tensor)) {
      if (!divides_heads(tensor)) continue;
      for (const int64_t context : degrees(options_.world / tensor, options_.max_context, options_.context)) {
        if (!divides_sequence(tensor, context)) continue;
        for (const int64_t pipeline :
             degrees(options_.world / tensor / context, std::min(options_.max_pipeline, sizes_.num_layers),
                     options_.pipeline))
          add_replicas({.tensor = tensor, .context = context, .pipeline = pipeline, .schedule = ""});
      }
    }
    return std::move(layouts_);
  }

  /// Why all() finds none. `has_degrees`: with more sequences it would find some.
  std::string problem(bool has_degrees) const {
    std::string given, names;
    int64_t product = 1;
    for (const auto& [name, degree] :
         {std::pair("replicate", options_.replicate), std::pair("shard", options_.shard),
          std::pair("context", options_.context), std::pair("tensor", options_.tensor),
          std::pair("pipeline", options_.pipeline)}) {
      if (degree == 0) continue;
      const std::string kind =
          name == std::string("replicate") || name == std::string("shard") ? "data_parallel_" : "";
      names += str(names.empty() ? "" : " x ", "parallelism.", kind, name,
                   kind.empty() ? "_parallel_degree" : "_degree");
      given += str(given.empty() ? "" : " x ", degree);
      // Larger than any world.
      product = std::min<int64_t>(product, int64_t{1} << 31) * std::min<int64_t>(degree, int64_t{1} << 31);
    }
    if (options_.world % product != 0)
      return str(names, " = ", given, " doesn't divide the ", options_.world, " ranks");
    if (options_.tensor > 0 && !divides_heads(options_.tensor))
      return str("parallelism.tensor_parallel_degree = ", options_.tensor, " doesn't divide the model's ",
                 sizes_.num_heads, " heads and ", sizes_.num_kv_heads, " key/value heads");
    if (const int64_t tensor = std::max<int64_t>(options_.tensor, 1),
        context = std::max<int64_t>(options_.context, 1);
        !divides_sequence(tensor, context))
      return str("training.seq_len = ", sequence_,
                 " can't be shared equally with parallelism.context_parallel_degree = ", context,
                 " and parallelism.tensor_parallel_degree = ", tensor);
    if (options_.pipeline > sizes_.num_layers)
      return str("parallelism.pipeline_parallel_degree = ", options_.pipeline, " is more than the model's ",
                 sizes_.num_layers, " layers");
    if (!has_degrees)
      return str(names, names.empty() ? "" : str(" = ", given, ": "),
                 "no other degrees that are allowed fill ", options_.world, " ranks");
    return str(
        "no layout of ", options_.world, " ranks that is allowed shares ", options_.sequences,
        " sequences a step equally",
        options_.shard > 0 ? str(" with parallelism.data_parallel_shard_degree = ", options_.shard) : "",
        ": change training.global_batch_size (or --sequences of titan plan)");
  }

 private:
  bool divides_heads(int64_t tensor) const {
    return sizes_.num_heads % tensor == 0 && sizes_.num_kv_heads % tensor == 0;
  }
  // Ring attention cuts a sequence into two parts for each rank, so that all have as much to do.
  bool divides_sequence(int64_t tensor, int64_t context) const {
    const int64_t parts = context > 1 && is_balanced_ ? 2 * context : context;
    return sequence_ % parts == 0 && (!is_sequence_parallel_ || sequence_ / context % tensor == 0);
  }
  bool selects_layers(const std::string& option) const {
    return option != "op" && std::stoll(option) <= sizes_.num_layers;
  }

  static std::vector<int64_t> degrees(int64_t number, int64_t most, int64_t given) {
    if (given == 0) return divisors_up_to(number, most);
    return number % given == 0 ? std::vector{given} : std::vector<int64_t>();
  }

  void add_replicas(Layout layout) {
    const int64_t ranks = layout.tensor * layout.context;
    const int64_t batches = options_.world / (ranks * layout.pipeline);
    if (options_.sequences % batches != 0) return;
    const int64_t host = std::min<int64_t>(options_.world, options_.host_devices);
    for (const int64_t replicate : degrees(batches, batches, options_.replicate)) {
      if (options_.shard > 0 && batches / replicate != options_.shard) continue;
      const int64_t group = batches / replicate * ranks;
      const bool is_of_hosts = group % host == 0 || host % group == 0;
      if (options_.replicate == 0 && replicate > 1 && !is_of_hosts) continue;
      layout.replicate = replicate;
      add(layout, options_.sequences / batches);
    }
  }

  void add(Layout layout, int64_t sequences) {
    for (const int64_t micro_batch : divisors_up_to(sequences, sequences)) {
      layout.micro_batch = micro_batch;
      add_schedules(layout, sequences / micro_batch);
    }
  }

  void add_schedules(Layout layout, int64_t micro_batches) {
    if (layout.pipeline == 1) return add_policies(layout);
    for (const pipeline::ScheduleTraits& traits : pipeline::all_schedule_traits())
      for (const int64_t stages : stages_of_rank(traits, layout.pipeline, micro_batches)) {
        layout.schedule = traits.name;
        layout.stages_of_rank = stages;
        add_policies(layout);
      }
  }

  std::vector<int64_t> stages_of_rank(const pipeline::ScheduleTraits& traits, int64_t depth,
                                      int64_t micro_batches) const {
    const auto ranks = static_cast<int>(depth);
    const int64_t first = pipeline::default_num_stages(traits, ranks) / depth;
    std::vector<int64_t> result;
    for (int64_t stages = first; stages * depth <= sizes_.num_layers; ++stages) {
      if (stages > first && !divides_evenly(sizes_.num_layers, stages * depth)) continue;
      if (!pipeline::counts_problem(traits, ranks, static_cast<int>(stages * depth),
                                    static_cast<int>(micro_batches)))
        result.push_back(stages);
      const bool has_small_bubble = 100 * (depth - 1) < stages * micro_batches;
      if (traits.stages_per_rank != pipeline::StagesPerRank::Several || has_small_bubble) break;
    }
    return result;
  }

  void add_policies(Layout layout) {
    if (options_.only_degrees) {
      layout.only_degrees = true;
      return layouts_.push_back(layout);
    }
    for (const std::string recompute : kRecompute) {
      if (recompute == "selective" && !may_select_layers_) continue;
      layout.recompute = recompute;
      for (const bool float8 : {false, true}) {
        if (float8 && !options_.may_use_float8) continue;
        layout.float8 = float8;
        for (const bool asynchronous : {false, true}) {
          if (asynchronous && layout.tensor == 1) continue;
          layout.asynchronous = asynchronous;
          for (const bool keeps : {false, true}) {
            if (keeps && layout.pipeline > 1) continue;  // it keeps them anyway
            layout.keeps_gathered = keeps;
            layouts_.push_back(layout);
          }
        }
      }
    }
  }

  ModelSizes sizes_;
  int64_t sequence_;
  bool is_sequence_parallel_, is_balanced_;
  bool may_select_layers_;
  const SearchOptions& options_;
  std::vector<Layout> layouts_;
};

}  // namespace

std::vector<Layout> all_layouts(const JobConfig& base, const SearchOptions& options) {
  return Layouts(base, options).all();
}

std::string why_no_layout(const JobConfig& base, const SearchOptions& options) {
  // Any number of replicas shares these.
  SearchOptions of_many = options;
  of_many.sequences = 64 * int64_t{options.world};
  return Layouts(base, options).problem(/*has_degrees=*/!Layouts(base, of_many).all().empty());
}

std::vector<Layout::Setting> Layout::settings(int world, int64_t sequences, int64_t layers) const {
  const int64_t replicas = world / (tensor * context * pipeline);
  const bool has_pipeline = pipeline > 1;
  std::vector<Setting> settings = {
      {"parallelism", "data_parallel_replicate_degree", str(replicate)},
      {"parallelism", "data_parallel_shard_degree", "-1"},
      {"parallelism", "tensor_parallel_degree", str(tensor)},
      {"parallelism", "context_parallel_degree", str(context)},
      {"parallelism", "pipeline_parallel_degree", str(pipeline)},
      {"training", "local_batch_size", str(has_pipeline ? sequences / replicas : micro_batch)},
      {"training", "global_batch_size", str(sequences)}};
  if (has_pipeline) {
    settings.push_back({"parallelism", "pipeline_parallel_schedule", config::quoted(schedule)});
    settings.push_back({"parallelism", "pipeline_parallel_microbatch_size", str(micro_batch)});
    // Without a number of layers, each rank has the schedule's usual number of stages, and they may differ by a layer.
    const int64_t stages = pipeline * stages_of_rank, less = layers_of_an_end(layers, stages);
    const std::string of_stage = divides_evenly(layers, stages) ? str((layers + 2 * less) / stages) : "none";
    settings.push_back({"parallelism", "pipeline_parallel_layers_per_stage", of_stage});
    settings.push_back({"parallelism", "pipeline_parallel_first_stage_less_layers", str(less)});
    settings.push_back({"parallelism", "pipeline_parallel_last_stage_less_layers", str(less)});
  }
  if (tensor == 1 || !only_degrees) {
    settings.push_back({"parallelism", "enable_async_tensor_parallel", truth(asynchronous)});
    // The base's own is read only with it.
    if (!asynchronous)
      settings.push_back({"parallelism", "async_tensor_parallel_transport", config::quoted("auto")});
  }
  if (only_degrees) return settings;
  settings.insert(settings.end(), {{"parallelism", "fsdp_reshard_after_forward",
                                    config::quoted(keeps_gathered ? "never"
                                                   : reshard > 0  ? str(reshard)
                                                                  : "default")},
                                   {"parallelism", "fsdp_reduce_every_micro_batch", truth(!keeps_gathered)},
                                   {"activation_checkpoint", "mode",
                                    config::quoted(recompute == "op" ? "selective" : recompute)}});
  if (recompute == "op")
    settings.push_back({"activation_checkpoint", "selective_ac_option", config::quoted("op")});
  // Otherwise the base's precision stays.
  if (float8) settings.push_back({"model", "converters", "[\"quantize.linear.float8\"]"});
  if (float8_gather)
    for (const char* key : {"enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"})
      settings.push_back({"quantize.linear.float8", key, "true"});
  if (!context_attention.empty()) {
    settings.push_back({"parallelism", "context_parallel_attention", config::quoted(context_attention)});
    settings.push_back({"parallelism", "context_parallel_rotate_method", config::quoted(rotate_method)});
  }
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
  if (replicate > 1) add(str("HSDP with ", replicate, " replicas"));
  add(str("micro-batch ", micro_batch));
  if (only_degrees) return text;
  add("recompute " + recompute);
  if (keeps_gathered) add("parameters stay gathered");
  if (reshard > 0) add(str("sharded over ", reshard, " after the forward"));
  if (float8) add(float8_gather ? "Float8, also gathers" : "Float8");
  if (!context_attention.empty()) add(str(context_attention, " with ", rotate_method));
  return text;
}

}  // namespace titan::train
