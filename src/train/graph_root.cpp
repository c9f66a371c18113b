#include "train/graph_root.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

namespace titan::train {

GraphRoot::GraphRoot(const at::Tensor& output) {
  if (output.requires_grad()) edge_ = torch::autograd::impl::gradient_edge(output);
}

void GraphRoot::backward(const at::Tensor& grad) {
  const torch::autograd::Edge root = std::exchange(edge_, {});
  torch::autograd::Engine::get_default_engine().execute({root}, {grad}, /*keep_graph=*/false,
                                                        /*create_graph=*/false, /*accumulate_grad=*/true);
}

}  // namespace titan::train
