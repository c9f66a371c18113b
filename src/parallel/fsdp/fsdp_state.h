#pragma once

// The hook that a fully_shard call puts into the FSDP slot of its modules.

#include <cstdint>
#include <memory>
#include <vector>

#include "parallel/fsdp/comm_context.h"
#include "parallel/fsdp/param_group.h"
#include "titan/nn/hooks.h"

namespace titan::fsdp {

/// For each forward of a group, pre_forward of its first module gathers and post_forward of its last module
/// reshards. In the backward, the first output gradient gathers again; when the gradients of the first
/// module's inputs are complete, the group reshards and reduces.
class FsdpState : public nn::CallHook, public std::enable_shared_from_this<FsdpState> {
 public:
  FsdpState(std::vector<nn::HookHost*> modules, std::shared_ptr<ParamGroup> group, FsdpOptions options)
      : modules_(std::move(modules)), group_(std::move(group)), options_(std::move(options)) {}

  void pre_forward(nn::HookHost& host, const nn::TensorRefs& inputs) override;
  void post_forward(nn::HookHost& host, const nn::TensorRefs& outputs) override;

  nn::HookHost& first_module() const { return *modules_.front(); }
  /// Null when everything below belongs to other groups.
  const std::shared_ptr<ParamGroup>& group() const { return group_; }
  const std::shared_ptr<CommContext>& context() const { return context_; }
  /// Makes this state the root of all states below `host`. The first forward calls it once.
  void become_root(nn::HookHost& host);
  /// May come before the first forward.
  void set_last_micro_batch(bool last);

 private:
  void pre_scheduled_forward(const nn::TensorRefs& inputs);
  void watch_last_backward(const nn::TensorRefs& inputs);
  void tell_kept_gradients(nn::HookHost& host);

  std::vector<nn::HookHost*> modules_;  // in call order
  std::shared_ptr<ParamGroup> group_;
  FsdpOptions options_;
  std::shared_ptr<CommContext> context_;
  bool is_root_ = false;
  bool last_micro_batch_ = true;
  size_t modules_entered_ = 0;
  int64_t forward_ = -1;  // number of the context's forward that modules_entered_ belongs to
  int64_t visit_ = -1;
};

/// Gives up the parameters that forwards have gathered and kept, at and below `root`, and unused prefetches.
void reshard_all(torch::nn::Module& root);

/// The states of the hookable modules at and below `root`, each once, in registration order.
std::vector<std::shared_ptr<FsdpState>> states_below(torch::nn::Module& root);

}  // namespace titan::fsdp
