// Spoils one module's numbers on one rank. Load it with `--experimental.custom_import` in a run that saves
// checkpoints. TITAN_TEST_SPOILED is "RANK MODULE forward|backward", for each step from the second on, or
// "RANK MODULE token=ID", for each step whose input to this module has that token.

#include <cstdlib>
#include <limits>
#include <memory>
#include <sstream>
#include <string>

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include "titan/nn/hooks.h"
#include "titan/train/trainer.h"

namespace {

using titan::nn::CallHook;
using titan::nn::HookHost;
using titan::nn::TensorRefs;

at::Tensor spoiled(const at::Tensor& tensor) {
  at::Tensor mask = at::zeros_like(tensor);
  mask.view(-1)[1].fill_(std::numeric_limits<double>::quiet_NaN());
  return tensor + mask;
}

// Inside the hook that it finds, as if the module itself did it. Not in its first two calls.
class Spoiler : public CallHook {
 public:
  Spoiler(std::shared_ptr<CallHook> outside, bool in_forward)
      : outside_(std::move(outside)), in_forward_(in_forward) {}
  void pre_forward(HookHost& host, const TensorRefs& inputs) override {
    if (outside_) outside_->pre_forward(host, inputs);
    ++num_calls_;
    if (in_forward_ || num_calls_ <= 2 || !at::GradMode::is_enabled()) return;
    *inputs[0] = *inputs[0] * 1.0;
    if (inputs[0]->requires_grad())
      inputs[0]->register_hook([](const at::Tensor& gradient) { return spoiled(gradient); });
  }
  void post_forward(HookHost& host, const TensorRefs& outputs) override {
    if (in_forward_ && num_calls_ > 2) *outputs[0] = spoiled(*outputs[0]);
    if (outside_) outside_->post_forward(host, outputs);
  }

 private:
  std::shared_ptr<CallHook> outside_;
  bool in_forward_;
  int num_calls_ = 0;
};

// The device finds the token, so a recorded step does, too.
class TokenSpoiler : public CallHook {
 public:
  TokenSpoiler(std::shared_ptr<CallHook> outside, int64_t token)
      : outside_(std::move(outside)), token_(token) {}
  void pre_forward(HookHost& host, const TensorRefs& inputs) override {
    if (outside_) outside_->pre_forward(host, inputs);
    found_ = inputs[0]->eq(token_).unsqueeze(-1);
  }
  void post_forward(HookHost& host, const TensorRefs& outputs) override {
    *outputs[0] = outputs[0]->masked_fill(found_, std::numeric_limits<double>::quiet_NaN());
    if (outside_) outside_->post_forward(host, outputs);
  }

 private:
  std::shared_ptr<CallHook> outside_;
  int64_t token_;
  at::Tensor found_;
};

// It saves nothing: it joins the checkpoints to be called once all is built.
class Nothing : public titan::checkpoint::Stateful {
 public:
  titan::checkpoint::ObjectState state() override { return {.tensors = {}, .text = ""}; }
  void loaded(const std::string& /*text*/) override {}
};

std::shared_ptr<CallHook> made(const std::string& where, std::shared_ptr<CallHook> outside) {
  const std::string token = "token=";
  if (where.starts_with(token))
    return std::make_shared<TokenSpoiler>(std::move(outside), std::stoll(where.substr(token.size())));
  return std::make_shared<Spoiler>(std::move(outside), where == "forward");
}

void spoil(titan::train::TrainerParts& parts) {
  const char* wanted = std::getenv("TITAN_TEST_SPOILED");
  int rank = -1;
  std::string module, where;
  std::istringstream(wanted ? wanted : "") >> rank >> module >> where;
  if (parts.world.rank() != rank) return;
  for (const auto& model : parts.models)
    for (const auto& each : model->root().module().modules())
      if (auto* host = dynamic_cast<HookHost*>(each.get()); host && host->fqn() == module)
        host->label_hook = made(where, host->label_hook);
}

}  // namespace

extern "C" void titan_register() {
  titan::train::saved_objects().add("spoiler", [](titan::train::TrainerParts& parts) {
    spoil(parts);
    return std::make_unique<Nothing>();
  });
}
