#pragma once

// A parameter that several pipeline stages have (tied embeddings): one value, whose gradient is the sum of
// what each stage's copy got.

#include <memory>
#include <string>
#include <vector>

#include "titan/dist/device_mesh.h"
#include "titan/parallel/parameters.h"

namespace titan::train {

class TiedGradients {
 public:
  TiedGradients() = default;
  /// `parameters`: of all stages here, in their order; copies bear one name. Marks all but the
  /// pipeline's first as duplicates. Collective over `pp`.
  TiedGradients(std::vector<Parameter>& parameters, const DeviceMesh& pp);
  /// Gives each copy the sum of all copies' gradients, which are reduced already.
  void sum() const;

 private:
  struct Tied {
    std::vector<at::Tensor> copies;      // leaves, here
    std::shared_ptr<dist::Group> group;  // null: all copies are here
    const char* name = "";
  };
  std::vector<Tied> tied_;
};

}  // namespace titan::train
