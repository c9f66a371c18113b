#include "job/job_config.h"

#include <algorithm>
#include <string>

#include <c10/util/StringUtil.h>

#include "titan/core/error.h"
#include "titan/optim/lr_schedule.h"
#include "titan/optim/optimizer.h"

namespace titan::train {

namespace {

/// Runs `action`, and adds the place of `key` to its errors.
template <class Action>
auto naming(const config::Origins& origins, std::string_view key, Action action) {
  try {
    return action();
  } catch (const ConfigError& error) {
    std::vector<std::string> problems;
    for (const std::string& problem : error.problems()) problems.push_back(origins.problem(key, problem));
    throw ConfigError(std::move(problems));
  }
}

// Opened before names are looked up, because it may register them.
void open_custom_code(const JobConfig& config, const config::Origins& origins) {
  naming(origins, "experimental.custom_import",
         [&] { import_custom_code(config.experimental.custom_import); });
}

// Names that only TorchTitan has are refused with what to use instead.

const ModelSpec& known_spec(const std::string& name) {
  static const std::vector<std::string> theirs = {"llama4", "deepseek_v3", "qwen3", "gpt_oss", "flux"};
  if (!model_specs().contains(name) && name == "llama3_ft")
    throw ConfigError("use \"llama3\"; ranks are replaced by titan train --max-restarts (docs/elastic.md)");
  if (!model_specs().contains(name) && std::ranges::count(theirs, name) > 0)
    throw ConfigError(
        str("this model of TorchTitan's doesn't exist here; known: ", c10::Join(", ", model_specs().names()),
            "; docs/adding_a_model.md shows how to add one"));
  return *model_specs().get(name);
}

std::shared_ptr<void> args_of_flavor(const ModelSpec& spec, const std::string& flavor) {
  const std::vector<std::string> flavors = spec.flavors();
  for (const char* suffix : {"_flex", "_varlen", "_flex_attn", "_varlen_attn"}) {
    if (!flavor.ends_with(suffix)) continue;
    const std::string plain = flavor.substr(0, flavor.size() - std::string_view(suffix).size());
    if (std::ranges::count(flavors, plain) > 0 && std::ranges::count(flavors, flavor) == 0)
      throw ConfigError(str("use \"", plain,
                            "\" with model.args.attn_mask_type = \"block_causal\": TorchTitan's flavor "
                            "also chooses an attention kernel, which there is no choice of here"));
  }
  return spec.make_args(flavor);
}

constexpr const char* kAutoModel = "auto";

NamedModel model_of_assets(const JobConfig& config, const config::Origins& origins) {
  return naming(origins, "model.name", [&] { return model_of_folder(config.model.hf_assets_path); });
}

config::DynamicTable resolve_model_args(const JobConfig& config, const config::Origins& origins) {
  open_custom_code(config, origins);
  if (config.model.name == kAutoModel) {
    NamedModel model = model_of_assets(config, origins);
    return {model_specs().get(model.name)->arg_fields(), std::move(model.args)};
  }
  const ModelSpec* spec = naming(origins, "model.name", [&] { return &known_spec(config.model.name); });
  return {spec->arg_fields(),
          naming(origins, "model.flavor", [&] { return args_of_flavor(*spec, config.model.flavor); })};
}

// The settings of the optimizer or schedule named by `table`.name. Keys of `table` that it doesn't read are
// refused.
template <class Spec>
config::DynamicTable resolve_args(const Registry<Spec>& registry, const std::string& table,
                                  const std::string& name, const config::Origins& origins) {
  const Spec* spec = naming(origins, table + ".name", [&] { return &registry.get(name); });
  std::vector<std::string> problems;
  for (const std::string& key : spec->args.unread_keys())
    if (const std::string full = table + "." + key; origins.origin_of(full) != "default")
      problems.push_back(origins.problem(
          full, str("'", name, "' doesn't read this key; its settings are in [", table, ".args]")));
  if (!problems.empty()) throw ConfigError(std::move(problems));
  return spec->args.table();
}

config::DynamicTable resolve_loss_args(const JobConfig& config, const config::Origins& origins) {
  open_custom_code(config, origins);
  const nn::LossKind* kind =
      naming(origins, "loss.name", [&] { return &nn::losses().get(config.loss.name); });
  return {kind->fields, kind->make_args()};
}

// The fields of every parallelism that a shared object registered, under "<name>.".
config::DynamicTable resolve_parallelism_args() {
  config::DynamicTable table;
  const auto all = std::make_shared<ParallelismArgs>();
  for (const std::string& name : parallelisms().names()) {
    const ParallelismSpec& spec = *parallelisms().get(name);
    if (!spec.has_args_table()) continue;
    (*all)[name] = spec.make_settings();
    for (config::FieldInfo field : spec.fields()) {
      field.key = name + "." + field.key;
      field.get = [get = field.get, name](const void* args) {
        return get(static_cast<const ParallelismArgs*>(args)->at(name).get());
      };
      field.set = [set = field.set, name](void* args, const config::Value& value) {
        set(static_cast<ParallelismArgs*>(args)->at(name).get(), value);
      };
      table.fields.push_back(std::move(field));
    }
  }
  if (!table.fields.empty()) table.settings = all;
  return table;
}

// The flavor of these sizes, or else the family's first.
std::string nearest_flavor(const JobConfig& config) {
  const std::vector<std::string> flavors = config.spec().flavors();
  const auto found = std::ranges::find_if(flavors, [&](const std::string& flavor) {
    return config.spec().sizes(config.args()) == config.spec().sizes(config.spec().make_args(flavor).get());
  });
  return found == flavors.end() ? flavors.front() : *found;
}

// Replaces model.name = "auto" by the family, so that the resolved config doesn't need the folder.
void name_model(JobConfig& config, const config::Origins& origins) {
  if (config.model.name != kAutoModel) return;
  if (origins.origin_of("model.flavor") != "default")
    throw ConfigError(
        origins.problem("model.flavor",
                        "isn't read with model.name = \"auto\": the sizes are those of config.json in "
                        "model.hf_assets_path; [model.args] overrides them"));
  config.model.name = model_of_assets(config, origins).name;
  config.model.flavor = nearest_flavor(config);
}

void add_model_tables(config::Schema& schema) {
  schema.add("model", &JobConfig::model, "the model");
  schema.add_dynamic<JobConfig>(
      "model.args", &JobConfig::model_args, resolve_model_args, {"model", "experimental"},
      "sizes that override the flavor's; the defaults shown are those of model.name and model.flavor");
  schema.add("loss", &JobConfig::loss, "the loss");
  schema.add_dynamic<JobConfig>(
      "loss.args", &JobConfig::loss_args, resolve_loss_args, {"loss", "experimental"},
      "the loss's own settings: z_weight of \"z_loss\", epsilon of \"label_smoothing\"");
}

void add_training_tables(config::Schema& schema) {
  schema.add("optimizer", &JobConfig::optimizer, "the optimizer");
  // [model.args] has opened the shared object that may register them.
  schema.add_dynamic<JobConfig>(
      "optimizer.args", &JobConfig::optimizer_args,
      [](const JobConfig& job, const config::Origins& origins) {
        return resolve_args(optim::optimizers(), "optimizer", job.optimizer.name, origins);
      },
      {"model", "experimental", "optimizer"},
      "settings of a registered optimizer; AdamW and Adam have none here");
  schema.add("lr_scheduler", &JobConfig::lr_scheduler, "the learning rate over the run");
  schema.add_dynamic<JobConfig>(
      "lr_scheduler.args", &JobConfig::lr_scheduler_args,
      [](const JobConfig& job, const config::Origins& origins) {
        return resolve_args(optim::lr_schedules(), "lr_scheduler", job.lr_scheduler.name, origins);
      },
      {"model", "experimental", "lr_scheduler"},
      "settings of a registered schedule; warmup_stable_decay has none here");
  schema.add("training", &JobConfig::training, "batches, precision and length of the run");
  schema.add("data", &JobConfig::data, "documents: how they are found, cut and distributed");
  schema.add("parallelism", &JobConfig::parallelism, "how ranks share the work");
  schema.add_dynamic<JobConfig>(
      "parallelism.args", [](JobConfig& job) -> config::DynamicTable& { return job.parallelism.args; },
      [](const JobConfig&) { return resolve_parallelism_args(); }, {"model", "experimental"},
      "settings of parallelisms that a shared object registers, a table each");
  schema.add("checkpoint", &JobConfig::checkpoint,
             "saves of the whole state during training; weights read at the start and written at the end");
  schema.add("activation_checkpoint", &JobConfig::activation_checkpoint, "recomputing activations");
  schema.add("compile", &JobConfig::compile);
  schema.add("quantize", &JobConfig::quantize);
}

void add_system_tables(config::Schema& schema) {
  schema.add("comm", &JobConfig::comm, "communication between ranks");
  schema.add("ops", &JobConfig::ops, "kernels");
  schema.add("memory_estimation", &JobConfig::memory_estimation);
  schema.add("fault_tolerance", &JobConfig::fault_tolerance,
             "signals, bad steps, and ranks that compute different numbers");
  schema.add("experimental", &JobConfig::experimental, "user code that the program loads");
  schema.add("validation", &JobConfig::validation, "the loss on other data during training");
  schema.add("debug", &JobConfig::debug, "seeds and determinism");
}

config::Schema make_schema() {
  auto schema = config::Schema::of<JobConfig>();
  schema.add("job", &JobConfig::job, "the run as a whole");
  schema.add("profiling", &JobConfig::profiling, "traces of steps, snapshots of memory");
  schema.add("metrics", &JobConfig::metrics, "metrics and logging");
  schema.add("metrics.structured_logs", &JobConfig::structured_logs, "the activity of each rank over time");
  schema.add("metrics.stragglers", &JobConfig::stragglers, "the rank that holds the others up");
  add_model_tables(schema);
  add_training_tables(schema);
  add_system_tables(schema);
  schema.set_finish<JobConfig>(name_model);
  return schema;
}

}  // namespace

std::string JobConfig::model_title() const {
  const ModelSizes sizes = spec().sizes(args());
  ModelSizes of_flavor = spec().sizes(spec().make_args(model.flavor).get());
  // The mask isn't one of the sizes.
  of_flavor.block_causal = sizes.block_causal;
  of_flavor.eos_id = sizes.eos_id;
  return str(model.name, " ", model.flavor, sizes == of_flavor ? "" : " with other sizes",
             sizes.block_causal ? ", attending within documents" : "");
}

const config::Schema& job_schema() {
  static const config::Schema schema = make_schema();
  return schema;
}

}  // namespace titan::train
