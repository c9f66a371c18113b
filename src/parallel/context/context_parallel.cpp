#include "titan/parallel/context_parallel.h"

#include <torch/nn/module.h>

#include "parallel/context/gathered_attention.h"
#include "parallel/context/ring_attention.h"
#include "parallel/interned.h"
#include "titan/core/error.h"
#include "titan/nn/hooks.h"

namespace titan {

namespace {

using context::SequenceLayout;

// Cuts whole sequences down to this rank's tokens at the top of the root's call.
class CutSequences final : public nn::CallHook {
 public:
  CutSequences(SequenceLayout layout, int rank, std::shared_ptr<nn::CallHook> inner)
      : layout_(layout), rank_(rank), inner_(std::move(inner)) {}

  void pre_forward(nn::HookHost& host, const nn::TensorRefs& inputs) override {
    bool any = false;
    for (at::Tensor* input : inputs) {
      if (input->scalar_type() != at::kLong || input->dim() != 2) continue;
      layout_.check_length(input->size(1));
      *input = layout_.part(*input, 1, rank_);
      any = true;
    }
    TITAN_CHECK(any, "context_parallel: module '", host.fqn(),
                "' was called without an int64 tensor of [batch, sequence] whose tokens could be spread over "
                "the ranks");
    if (inner_) inner_->pre_forward(host, inputs);
  }

 private:
  SequenceLayout layout_;
  int rank_;
  std::shared_ptr<nn::CallHook> inner_;  // what was in the slot before
};

// Made once for each length: those of training and of validation.
class LocalPositions final : public nn::TokenPositions {
 public:
  LocalPositions(SequenceLayout layout, int rank) : layout_(layout), rank_(rank) {}

  const at::Tensor& of(int64_t num_tokens, at::Device device) override {
    for (const at::Tensor& known : known_)
      if (known.size(0) == num_tokens && known.device() == device) return known;
    known_.push_back(layout_.positions(rank_, num_tokens, device));
    return known_.back();
  }

 private:
  SequenceLayout layout_;
  int rank_;
  std::vector<at::Tensor> known_;
};

std::shared_ptr<context::DistributedAttention> make_attention(const std::shared_ptr<dist::Group>& group,
                                                              SequenceLayout layout,
                                                              const ContextParallelOptions& options) {
  if (options.attention == ContextAttention::AllGatherKv)
    return std::make_shared<context::GatheredAttention>(group, layout);
  return std::make_shared<context::RingAttention>(group, layout, options.rotate_method);
}

}  // namespace

void context_parallel(const nn::AnyRef& root, const DeviceMesh& axis, const ContextParallelOptions& options) {
  if (axis.size() == 1) return;
  TITAN_CHECK(axis.num_axes() == 1, "context_parallel: expected a mesh of one axis, got ", axis.num_axes());
  const std::shared_ptr<dist::Group> group = axis.group();
  const SequenceLayout layout(group->size(), options.load_balancer);
  const auto attention = make_attention(group, layout, options);
  const auto positions = std::make_shared<LocalPositions>(layout, group->rank());

  int num_users = 0;
  for (const auto& named : root.module().named_modules()) {
    torch::nn::Module& module = *named.value();
    if (auto* user = dynamic_cast<nn::PositionUser*>(&module)) user->set_token_positions(positions);
    if (auto* user = dynamic_cast<nn::AttentionUser*>(&module)) {
      user->set_attention_core(std::make_shared<context::ContextCore>(attention, interned(named.key())));
      ++num_users;
    }
  }
  TITAN_CHECK(num_users > 0, "context_parallel: no module below '", root.host().fqn(),
              "' attends through a core (nn::Attention does; one's own implements nn::AttentionUser)");
  auto& slot = root.host().prepare_input_hook;
  slot = std::make_shared<CutSequences>(layout, group->rank(), slot);
}

bool is_context_parallel(const nn::AnyRef& root) {
  for (const auto& module : root.module().modules()) {
    const auto* host = dynamic_cast<nn::HookHost*>(module.get());
    if (host && dynamic_cast<CutSequences*>(host->prepare_input_hook.get())) return true;
  }
  return false;
}

}  // namespace titan
