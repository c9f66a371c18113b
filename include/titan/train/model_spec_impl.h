#pragma once

// Templates of model_spec.h.

#include "titan/core/error.h"
#include "titan/train/model_spec.h"

namespace titan::train {

template <class Args>
class ModelFamilySpec final : public ModelSpec {
 public:
  explicit ModelFamilySpec(ModelFamily<Args> family) : family_(std::move(family)) {
    TITAN_CHECK(family_.sizes && family_.build && family_.parallelize,
                "a model family needs sizes, build and parallelize");
    for (const auto& [flavor, args] : family_.flavours) flavours_.add(flavor, args);
  }

  std::vector<std::string> flavours() const override { return flavours_.names(); }

  std::shared_ptr<void> make_args(const std::string& flavor) const override {
    return std::make_shared<Args>(flavours_.get(flavor));
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
  Registry<Args> flavours_{"flavor"};
};

template <class Args>
void register_model(const std::string& name, ModelFamily<Args> family) {
  model_specs().add(name, std::make_shared<const ModelFamilySpec<Args>>(std::move(family)));
}

}  // namespace titan::train
