// Slices of a sequence on the ranks of a mesh axis. docs/adding_a_parallelism.md walks through this file.
#include "slices.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/nn/module.h>

#include "titan/dist/collectives.h"
#include "titan/nn/hooks.h"
#include "titan/parallel/parallelism.h"

namespace {

using titan::dist::Group;
using titan::dist::Label;
using titan::nn::HookHost;
using torch::autograd::variable_list;

struct SlicesSettings {
  int64_t degree = 1;
};

void describe(titan::config::Table<SlicesSettings>& table) {
  table.field("degree", &SlicesSettings::degree, "ranks that share each sequence",
              titan::config::at_least(1));
}

// ---- the communication

// Gathers every rank's [B, H] into [N, B, H].
at::Tensor gather(const at::Tensor& own_BH, Group& group, Label label) {
  const at::Tensor own = own_BH.contiguous();
  const at::Tensor all_NBH = at::empty({group.size(), own.size(0), own.size(1)}, own.options());
  group.all_gather(all_NBH, own, label).wait();
  return all_NBH;
}

// A rank's sum is part of the result on every later rank, so its gradient is the sum of theirs.
struct EarlierTokensBackward final : torch::autograd::Node {
  std::shared_ptr<Group> group;
  at::Tensor zeros_BH;

  variable_list apply(variable_list&& grads) override {
    // The peers wait for this rank's part, even if its own loss doesn't depend on the result.
    const at::Tensor grad_BH = grads[0].defined() ? grads[0] : zeros_BH;
    const int first = group->rank() + 1;
    const at::Tensor all_NBH = gather(grad_BH, *group, {"slices::backward"});
    return {all_NBH.narrow(0, first, group->size() - first).sum(0)};
  }
  std::string name() const override { return "slices backward"; }
};

class OnEarlierRanks final : public EarlierTokens {
 public:
  explicit OnEarlierRanks(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  at::Tensor sum(const at::Tensor& own_BH) override {
    at::Tensor sum_BH;
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      sum_BH = gather(own_BH, *group_, {"slices::forward"}).narrow(0, 0, group_->rank()).sum(0);
    }
    if (!torch::autograd::compute_requires_grad(own_BH)) return sum_BH;
    std::shared_ptr<EarlierTokensBackward> node(new EarlierTokensBackward(), torch::autograd::deleteNode);
    node->set_next_edges(torch::autograd::collect_next_edges(own_BH));
    node->group = group_;
    node->zeros_BH = at::zeros_like(own_BH.detach());
    torch::autograd::set_history(sum_BH, node);
    return sum_BH;
  }
  int64_t count(int64_t num_own) const override { return group_->rank() * num_own; }

 private:
  std::shared_ptr<Group> group_;
};

// ---- applying it to a model

// Cuts tokens and labels, int64 [batch, sequence], down to this rank's slice when the model is called.
class CutSlices final : public titan::nn::CallHook {
 public:
  CutSlices(std::shared_ptr<Group> group, std::shared_ptr<CallHook> inner)
      : group_(std::move(group)), inner_(std::move(inner)) {}

  void pre_forward(HookHost& host, const titan::nn::TensorRefs& inputs) override {
    for (at::Tensor* input : inputs) {
      if (input->scalar_type() != at::kLong || input->dim() != 2) continue;
      const int64_t length = input->size(1) / group_->size();
      *input = input->narrow(1, group_->rank() * length, length).contiguous();
    }
    if (inner_) inner_->pre_forward(host, inputs);
  }

 private:
  std::shared_ptr<Group> group_;
  std::shared_ptr<CallHook> inner_;  // the slot's previous hook
};

void apply_slices(const titan::nn::AnyRef& root, const titan::DeviceMesh& axis, const SlicesSettings&) {
  const auto earlier = std::make_shared<OnEarlierRanks>(axis.group());
  for (const auto& module : root.module().modules())
    if (auto* user = dynamic_cast<EarlierTokensUser*>(module.get())) user->set_earlier_tokens(earlier);
  auto& slot = root.host().prepare_input_hook;
  slot = std::make_shared<CutSlices>(axis.group(), slot);
}

bool has_slices(const titan::nn::AnyRef& root) {
  return dynamic_cast<CutSlices*>(root.host().prepare_input_hook.get()) != nullptr;
}

}  // namespace

void register_slices() {
  titan::register_parallelism<SlicesSettings>(
      "slices", {.axis = "slices", .apply = apply_slices, .is_applied = has_slices});
}
