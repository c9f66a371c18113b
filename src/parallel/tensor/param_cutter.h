#pragma once

// Cuts parameters down to this rank's parts, shared ones once.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "parallel/tensor/split_params.h"
#include "parallel/tensor/tp_group.h"
#include "titan/nn/splittable.h"

namespace torch::nn {
class Module;
}

namespace titan::tp {

struct NamedModule {
  std::string name;  ///< dotted, "" for the root
  torch::nn::Module* module;
};

class ParamCutter {
 public:
  /// Knows what earlier calls cut in these modules.
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
