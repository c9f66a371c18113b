#pragma once

// The record that parallelize() keeps of a module's own parameters.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/tensor/tp_group.h"
#include "titan/dist/device_mesh.h"
#include "titan/nn/hooks.h"
#include "titan/nn/layers.h"
#include "titan/tensor/dtensor.h"

namespace titan::tp {

struct PartOfParam {
  std::string name;  ///< within the module
  Placement placement;
  std::vector<int64_t> global_shape;
  bool gradient_is_summand = false;
};

class SplitParams final : public nn::ParamParts {
 public:
  /// `style`: a literal, the name of the plan's style that cut the module.
  SplitParams(DeviceMesh axis, const char* style) : axis_(std::move(axis)), style_(style) {}

  void add(PartOfParam part) { parts_.push_back(std::move(part)); }
  /// Null for a parameter outside the plan: whole, with whole gradients.
  const PartOfParam* find(std::string_view name) const;
  const std::vector<PartOfParam>& parts() const { return parts_; }
  const DeviceMesh& axis() const { return axis_; }
  const char* style() const { return style_; }
  /// Layouts of the activations, for plan_rows(): "in Replicate; out Shard(-1)".
  void set_layouts(std::string layouts) { layouts_ = std::move(layouts); }
  const std::string& layouts() const { return layouts_; }
  /// Traffic of the exchange that the module's product is part of; null: none is. `collectives`: a literal,
  /// what it comes to, forward / backward.
  void set_exchanged(std::shared_ptr<const Traffic> exchanged, const char* collectives) {
    exchanged_ = std::move(exchanged);
    exchanged_collectives_ = collectives;
  }
  const std::shared_ptr<const Traffic>& exchanged() const { return exchanged_; }
  const char* exchanged_collectives() const { return exchanged_collectives_; }
  /// Traffic of the module's own gathers, as a loss head's.
  const std::shared_ptr<Traffic>& traffic() const { return traffic_; }

  /// `data` describes this rank's part of the parameter as if it were a tensor of its own: the same elements
  /// as a part of the whole, on a mesh that has this axis too. The axis cuts first, the others cut its parts.
  DTensor within_whole(DTensor data, const PartOfParam& part) const;

 private:
  DeviceMesh axis_;
  const char* style_;
  std::vector<PartOfParam> parts_;
  std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();
  std::string layouts_;
  std::shared_ptr<const Traffic> exchanged_;
  const char* exchanged_collectives_ = "";
};

/// Null for a module outside the plan.
const SplitParams* split_params(const nn::HookHost& host);

}  // namespace titan::tp

namespace torch::nn {

// Cuts parameters down to this rank's parts, shared ones once.

class Module;
}  // namespace torch::nn

namespace titan::tp {

struct NamedModule {
  std::string name;  ///< dotted, "" for the root
  torch::nn::Module* module;
};

class ParamCutter {
 public:
  /// Starts with the cuts that earlier calls made in these modules.
  ParamCutter(DeviceMesh axis, std::shared_ptr<const TpGroup> group, const std::vector<NamedModule>& modules);

  /// `tensor` is `param` of the module `host`, called `name`. Throws ConfigError when another module that
  /// shares it cut it differently.
  PartOfParam cut(nn::HookHost& host, const std::string& name, const at::Tensor& tensor,
                  const nn::ParamSplit& param);

  /// Adds a problem for each module that shares a parameter which another one's entry cut, and isn't cut
  /// itself.
  void check_users(const std::vector<NamedModule>& modules, std::vector<std::string>& problems) const;

 private:
  struct Cut {
    PartOfParam part;
    std::string module;
  };
  void shrink(const at::Tensor& tensor, int64_t dim) const;

  DeviceMesh axis_;
  std::shared_ptr<const TpGroup> group_;
  std::map<const c10::TensorImpl*, Cut> cut_;
};

}  // namespace titan::tp
