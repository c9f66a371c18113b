#pragma once

// Finds the modules of a model that its constructors made but didn't register: their parameters would be
// neither sharded nor trained nor saved.

#include <string>
#include <vector>

#include "titan/nn/hooks.h"

namespace titan::nn {

/// Notes the hookable modules that this thread constructs during the object's life, except those of a nested
/// one.
class ConstructedModules {
 public:
  ConstructedModules();
  ~ConstructedModules();
  ConstructedModules(const ConstructedModules&) = delete;
  ConstructedModules& operator=(const ConstructedModules&) = delete;

  /// A line for each of them that still exists, has parameters to train and isn't below `root`: its type, its
  /// parameters, and the module of `root` that was constructed before it. Modules below such a module aren't
  /// listed. Parameters that `root` has too (tied weights) don't count, nor do frozen ones with memory.
  std::vector<std::string> unregistered(torch::nn::Module& root) const;

 private:
  friend class HookHost;
  std::vector<HookHost*> hosts_;  // in the order of construction
  ConstructedModules* outer_;
};

}  // namespace titan::nn
