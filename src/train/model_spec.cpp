#include "titan/train/model_spec.h"

#include <algorithm>

#include <c10/util/StringUtil.h>

#include "titan/nn/containers.h"

namespace titan::train {

at::Tensor TrainableModel::hidden(const at::Tensor& /*input*/) {
  TITAN_CHECK(false,
              "this model can't be a pipeline stage: it doesn't say what a stage passes to the next "
              "(TrainableModel::hidden)");
}

void TrainableModel::set_documents(const ops::Documents& /*documents*/) {
  TITAN_CHECK(false,
              "this model attends to whole rows: it can't keep attention within documents "
              "(TrainableModel::set_documents)");
}

void keep_stage_modules(TrainableModel& model, const std::vector<std::string>& names) {
  nn::LayerSequence* sequence = nn::layer_sequence(model.root());
  if (!sequence)
    throw ConfigError(
        "this model can't be cut into pipeline stages: its root module doesn't name the modules that it "
        "calls in a row (nn::LayerSequence)");
  sequence->keep_layers(names);
}

Registry<std::shared_ptr<const ModelSpec>>& model_specs() {
  static Registry<std::shared_ptr<const ModelSpec>> registry("model");
  return registry;
}

Registry<ParallelPlanFunction>& parallel_plans() {
  static Registry<ParallelPlanFunction> registry("parallelism plan");
  return registry;
}

void apply_parallel_plan(const ModelSpec& spec, const std::string& name, TrainableModel& model,
                         const ParallelPlan& plan) {
  nn::name_modules(model.root().module());  // plans and policies name modules
  if (name.empty()) return spec.parallelize(model, plan);
  parallel_plans().get(name)(model, plan);
}

std::shared_ptr<void> args_of_folder(const ModelSpec& spec, const std::filesystem::path& folder) {
  const HfConfig config = read_hf_config(folder);
  try {
    return spec.args_of_hugging_face(config);
  } catch (const ConfigError& error) {
    std::vector<std::string> problems;
    for (const std::string& problem : error.problems())
      problems.push_back(str((folder / "config.json").string(), ": ", problem));
    throw ConfigError(std::move(problems));
  }
}

namespace {

constexpr const char* kArchitecture = "architectures.0";

// As in a config.json, with quotes; "unset" for a family without a form in transformers.
std::string architecture_of(const ModelSpec& spec) {
  const std::vector<std::string> flavors = spec.flavors();
  if (flavors.empty()) return "unset";
  const auto form = spec.hugging_face(spec.make_args(flavors.front()).get());
  return form ? value_text(form->config, kArchitecture) : "unset";
}

// Compares two sets of arguments by what they make of config.json.
class ArgsComparison {
 public:
  ArgsComparison(const ModelSpec& spec, const void* configured, const void* found)
      : spec_(spec), ours_(form_of(configured)), theirs_(form_of(found)) {
    for (const config::FieldInfo& field : spec.arg_fields()) {
      const config::Value value = field.get(configured), other = field.get(found);
      if (value == other) continue;
      const auto changed = copy_of(configured);
      field.set(changed.get(), other);
      fields_.push_back({field.key, config::to_text(value), config::to_text(other), form_of(changed.get())});
    }
  }

  std::vector<std::string> lines(const std::string& file) {
    const std::vector<std::string> keys = differing_keys(ours_, theirs_);
    std::vector<std::string> lines;
    for (Field& field : fields_) {
      const auto decided = [&](const std::string& key) { return decides(field, key); };
      // The key for the same number is clearer than one that is computed from it.
      auto key = std::ranges::find_if(keys, [&](const std::string& each) {
        return decided(each) && value_text(theirs_, each) == field.theirs;
      });
      if (key == keys.end()) key = std::ranges::find_if(keys, decided);
      if (key == keys.end()) continue;
      field.told = true;
      lines.push_back(
          str(setting(field), " in the config, ", *key, " ", value_text(theirs_, *key), " in ", file));
    }
    for (const std::string& key : keys)
      if (std::string line = joint_line(key, file); !line.empty()) lines.push_back(std::move(line));
    return lines;
  }

 private:
  // An argument that differs.
  struct Field {
    std::string key, ours, theirs;
    HfConfig changed;  // config.json if only this argument were as in the folder
    bool told = false;
  };

  HfConfig form_of(const void* args) const { return spec_.hugging_face(args).value().config; }

  std::shared_ptr<void> copy_of(const void* args) const {
    std::shared_ptr<void> copy = spec_.make_args(spec_.flavors().front());
    for (const config::FieldInfo& field : spec_.arg_fields()) field.set(copy.get(), field.get(args));
    return copy;
  }

  bool affects(const Field& field, const std::string& key) const {
    return value_text(field.changed, key) != value_text(ours_, key);
  }
  // Whether the key follows from this argument alone.
  bool decides(const Field& field, const std::string& key) const {
    if (value_text(field.changed, key) != value_text(theirs_, key) || !theirs_.contains(key)) return false;
    return std::ranges::count_if(fields_, [&](const Field& each) { return affects(each, key); }) == 1;
  }

  static std::string setting(const Field& field) { return str("model.args.", field.key, " = ", field.ours); }

  // For a key that several arguments determine; "" if the lines before explain it.
  std::string joint_line(const std::string& key, const std::string& file) const {
    std::vector<std::string> settings;
    bool told = true;
    for (const Field& field : fields_) {
      if (!affects(field, key)) continue;
      settings.push_back(setting(field));
      told = told && field.told;
    }
    if (!settings.empty() && told) return "";
    return str(settings.empty() ? "the model" : c10::Join(" and ", settings), " in the config: ", key, " ",
               value_text(ours_, key), ", but ", value_text(theirs_, key), " in ", file);
  }

  const ModelSpec& spec_;
  HfConfig ours_, theirs_;
  std::vector<Field> fields_;
};

}  // namespace

NamedModel model_of_folder(const std::filesystem::path& folder) {
  const std::string wanted = value_text(read_hf_config(folder), kArchitecture);
  std::vector<std::string> known;
  for (const std::string& name : model_specs().names()) {
    const ModelSpec& spec = *model_specs().get(name);
    const std::string architecture = architecture_of(spec);
    if (architecture == "unset") continue;
    if (architecture == wanted) return {name, args_of_folder(spec, folder)};
    known.push_back(str(architecture, " (", name, ")"));
  }
  throw ConfigError(str((folder / "config.json").string(), ": ", kArchitecture, " is ", wanted,
                        ", of no registered model; known: ", c10::Join(", ", known)));
}

std::vector<std::string> folder_differences(const ModelSpec& spec, const void* configured,
                                            const std::filesystem::path& folder) {
  const auto found = args_of_folder(spec, folder);
  return ArgsComparison(spec, configured, found.get()).lines((folder / "config.json").string());
}

void apply_activation_checkpoint(const std::vector<nn::AnyRef>& layers,
                                 const ActivationCheckpoint& checkpoint, int64_t first_number) {
  if (checkpoint.policy) checkpoint_activations(layers, *checkpoint.policy, checkpoint.options, first_number);
}

}  // namespace titan::train
