#pragma once

// A model family as the trainer sees it, and how to register one:
//
//   titan::train::register_model<TinyArgs>("tiny", {
//       .flavors = {{"debug", {.dim = 64}}, {"large", {.dim = 1024}}},
//       .sizes = [](const TinyArgs& args) { return ModelSizes{...}; },
//       .build = [](const TinyArgs& args, const BuildOptions& options) {
//         return std::make_unique<TinyModel>(args, options);
//       },
//       .parallelize = [](TrainableModel& model, const ParallelPlan& plan) {
//         fully_shard(model.root(), plan.fsdp);
//       },
//   });
//
// Args is a settings struct with a `describe(config::Table<Args>&)` beside it: its fields are the keys of
// [model.args], which override the sizes of the chosen flavor.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/checkpoint/hugging_face.h"
#include "titan/config/table.h"
#include "titan/core/error.h"
#include "titan/core/registry.h"
#include "titan/nn/hooks.h"
#include "titan/ops/documents.h"
#include "titan/ops/loss.h"
#include "titan/parallel/activation_checkpoint.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/parallelism.h"
#include "titan/parallel/tensor_parallel.h"

namespace titan::train {

struct Meshes;

/// A model as the trainer runs it, or a pipeline stage of one. A family whose root module is an
/// nn::LayerSequence and whose model has hidden() can be cut into stages.
class TrainableModel {
 public:
  virtual ~TrainableModel() = default;
  virtual nn::AnyRef root() = 0;
  /// The sum of the token losses of this micro-batch over `global_valid_tokens`, a scalar in at least
  /// float32, ready for backward(). input: tokens, int64 [batch, sequence] on the model's device, or, at the
  /// last of several stages, the result of the previous stage's hidden(). labels_BS: int64 [batch, sequence];
  /// labels of -100 are ignored.
  virtual at::Tensor loss(const at::Tensor& input, const at::Tensor& labels_BS,
                          const ops::ValidTokens& global_valid_tokens) = 0;
  /// For a pipeline stage that isn't the last: the tensor that goes to the next stage, of any shape and
  /// floating dtype. input: tokens at the first stage, else the result of the previous stage's hidden(). The
  /// result covers this rank's tokens: its part of each row under parallelisms that share rows, and its part
  /// of those tokens under sequence parallelism. The default throws Error: the model can't be a stage.
  virtual at::Tensor hidden(const at::Tensor& input);
  /// Called before the loss() or hidden() of a batch in whose rows attention has to stay within documents
  /// (ModelSizes::block_causal), with the documents of that call. They are on the model's device. The default throws
  /// Error: the model attends to whole rows.
  virtual void set_documents(const ops::Documents& documents);
};

/// Sizes that are checked against data and parallelism.
struct ModelSizes {
  int64_t num_layers = 0;
  int64_t num_heads = 0;  ///< 0: no attention heads, nothing to check
  int64_t num_kv_heads = 0;
  int64_t vocab_size = 0;
  int64_t num_params = 0;
  bool block_causal = false;  ///< attention stays within the documents of a row
  std::optional<int64_t> eos_id =
      std::nullopt;  ///< with block_causal, a document's last token; unset: the tokenizer's

  bool operator==(const ModelSizes&) const = default;
};

struct BuildOptions {
  nn::Construct construct;
  int64_t seq_len = 0;  ///< tokens per training row; the length of tables by position
  /// The modules that a pipeline stage keeps, by their names in the whole model, as for
  /// nn::LayerSequence::keep_layers; empty: all. ModelSpec::build applies it; a family's own `build` makes
  /// the whole model, deferred.
  std::vector<std::string> stage_modules = {};
};

/// How a model's layers recompute their activations.
struct ActivationCheckpoint {
  std::optional<LayersPolicy> policy;  ///< unset: they recompute nothing
  ActivationCheckpointOptions options;
};

/// `layers`: in the order of their calls. `first_number`: the first layer's number in the whole model.
void apply_activation_checkpoint(const std::vector<nn::AnyRef>& layers,
                                 const ActivationCheckpoint& checkpoint, int64_t first_number = 0);

/// How a built model is distributed over the ranks.
struct ParallelPlan {
  const Meshes& meshes;
  FsdpOptions fsdp;                   ///< mesh, dtypes and policies are filled in from the settings
  TensorParallelOptions tensor = {};  ///< for tensor parallelism over meshes.tp
  /// For apply_parallelisms over meshes.world.
  std::vector<Parallelism> parallelisms = default_parallelisms();
  ActivationCheckpoint activations = {};  ///< for apply_activation_checkpoint
};

/// A model family with its argument type erased: `args` below points to a struct that make_args() returned.
class ModelSpec {
 public:
  virtual ~ModelSpec() = default;
  virtual std::vector<std::string> flavors() const = 0;
  /// The arguments of a flavor, to be overridden through arg_fields(). Throws ConfigError for an unknown
  /// flavor.
  virtual std::shared_ptr<void> make_args(const std::string& flavor) const = 0;
  virtual std::vector<config::FieldInfo> arg_fields() const = 0;
  virtual ModelSizes sizes(const void* args) const = 0;
  virtual double flops_per_token(const void* args, int64_t seq_len) const = 0;
  /// Appends the arguments' problems to `problems`.
  virtual void check(const void* args, std::vector<std::string>& problems) const = 0;
  /// The model, or the stage of it that options.stage_modules names.
  virtual std::unique_ptr<TrainableModel> build(const void* args, const BuildOptions& options) const = 0;
  virtual void parallelize(TrainableModel& model, const ParallelPlan& plan) const = 0;
  /// The model's form in Hugging Face's transformers; nullopt: the family has none.
  virtual std::optional<HfModel> hugging_face(const void* args) const = 0;
  /// The arguments that a config.json describes. Throws ConfigError if it describes another family.
  virtual std::shared_ptr<void> args_of_hugging_face(const HfConfig& config) const = 0;
};

/// Conversion to and from Hugging Face's state-dict names, rows and config.json. Set both functions or
/// neither.
template <class Args>
struct HfForm {
  std::function<HfModel(const Args&)> model;
  /// Throws ConfigError with every reason why the config isn't this family's.
  std::function<Args(const HfConfig&)> args;
};

/// The parts of a family; `sizes`, `build` and `parallelize` are required.
template <class Args>
struct ModelFamily {
  std::map<std::string, Args> flavors;
  std::function<ModelSizes(const Args&)> sizes;
  std::function<double(const Args&, int64_t seq_len)> flops_per_token = {};  ///< default: 6 x parameters
  std::function<void(const Args&, std::vector<std::string>& problems)> check = {};
  std::function<std::unique_ptr<TrainableModel>(const Args&, const BuildOptions&)> build;
  std::function<void(TrainableModel&, const ParallelPlan&)> parallelize;
  HfForm<Args> hugging_face = {};  ///< default: no reading or writing of such folders
};

Registry<std::shared_ptr<const ModelSpec>>& model_specs();

template <class Args>
void register_model(const std::string& name, ModelFamily<Args> family);

/// Reduces a model to its stage. Throws ConfigError if its root module isn't an nn::LayerSequence.
void keep_stage_modules(TrainableModel& model, const std::vector<std::string>& names);

/// Distributes a built model as a family's `parallelize` does, but works for any family: it finds the modules
/// that it needs through root().
using ParallelPlanFunction = std::function<void(TrainableModel&, const ParallelPlan&)>;

/// Plans that parallelism.plan may name instead of the family's own:
///
///   titan::train::parallel_plans().add("one_group", [](TrainableModel& model, const ParallelPlan& plan) {
///     titan::fully_shard(model.root(), plan.fsdp);
///   });
Registry<ParallelPlanFunction>& parallel_plans();

/// Applies the plan registered as `name`, or, if that is "", the family's own. Throws ConfigError with the
/// known names.
void apply_parallel_plan(const ModelSpec& spec, const std::string& name, TrainableModel& model,
                         const ParallelPlan& plan);

// ---- templates

template <class Args>
class ModelFamilySpec final : public ModelSpec {
 public:
  explicit ModelFamilySpec(ModelFamily<Args> family) : family_(std::move(family)) {
    TITAN_CHECK(family_.sizes && family_.build && family_.parallelize,
                "a model family needs sizes, build and parallelize");
    for (const auto& [flavor, args] : family_.flavors) flavors_.add(flavor, args);
  }

  std::vector<std::string> flavors() const override { return flavors_.names(); }

  std::shared_ptr<void> make_args(const std::string& flavor) const override {
    return std::make_shared<Args>(flavors_.get(flavor));
  }

  std::vector<config::FieldInfo> arg_fields() const override {
    config::Table<Args> table;
    describe(table);
    return table.fields();
  }

  ModelSizes sizes(const void* args) const override { return family_.sizes(cast(args)); }

  double flops_per_token(const void* args, int64_t seq_len) const override {
    if (family_.flops_per_token) return family_.flops_per_token(cast(args), seq_len);
    return 6.0 * static_cast<double>(sizes(args).num_params);
  }

  void check(const void* args, std::vector<std::string>& problems) const override {
    if (family_.check) family_.check(cast(args), problems);
  }

  std::unique_ptr<TrainableModel> build(const void* args, const BuildOptions& options) const override {
    auto model = family_.build(cast(args), options);
    if (!options.stage_modules.empty()) keep_stage_modules(*model, options.stage_modules);
    return model;
  }

  void parallelize(TrainableModel& model, const ParallelPlan& plan) const override {
    family_.parallelize(model, plan);
  }

  std::optional<HfModel> hugging_face(const void* args) const override {
    if (!family_.hugging_face.model) return std::nullopt;
    return family_.hugging_face.model(cast(args));
  }

  std::shared_ptr<void> args_of_hugging_face(const HfConfig& config) const override {
    if (!family_.hugging_face.args) throw ConfigError("the family has no form in transformers");
    return std::make_shared<Args>(family_.hugging_face.args(config));
  }

 private:
  static const Args& cast(const void* args) { return *static_cast<const Args*>(args); }

  ModelFamily<Args> family_;
  Registry<Args> flavors_{"flavor"};
};

template <class Args>
void register_model(const std::string& name, ModelFamily<Args> family) {
  model_specs().add(name, std::make_shared<const ModelFamilySpec<Args>>(std::move(family)));
}

// ---- Hugging Face folders

/// The arguments that the folder's config.json describes. Throws ConfigError that names the file and
/// everything in it that is missing, wrong, or of another family.
std::shared_ptr<void> args_of_folder(const ModelSpec& spec, const std::filesystem::path& folder);

/// A registered family and its arguments.
struct NamedModel {
  std::string name;
  std::shared_ptr<void> args;
};
/// The model of the folder's config.json, in the family whose form in transformers has its architecture.
/// Throws ConfigError that lists the architectures of the registered families, or as args_of_folder.
NamedModel model_of_folder(const std::filesystem::path& folder);

/// The differences between the arguments `configured` and those of the folder's config.json, in terms of
/// [model.args], one line each: "model.args.dim = 512 in the config, hidden_size 4096 in FOLDER/config.json".
/// Throws as args_of_folder.
std::vector<std::string> folder_differences(const ModelSpec& spec, const void* configured,
                                            const std::filesystem::path& folder);

}  // namespace titan::train
