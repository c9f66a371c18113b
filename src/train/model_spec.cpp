#include "titan/train/model_spec.h"

namespace titan::train {

Registry<std::shared_ptr<const ModelSpec>>& model_specs() {
  static Registry<std::shared_ptr<const ModelSpec>> registry("model");
  return registry;
}

}  // namespace titan::train
