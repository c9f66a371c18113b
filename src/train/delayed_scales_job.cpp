#include "train/delayed_scales_job.h"

#include <torch/nn/module.h>

#include "titan/float8/delayed_scales.h"
#include "train/float8_job.h"

namespace titan::train {

namespace {

// LAYER.amax_history: the same on all ranks of the stage.
class DelayedScalesState : public checkpoint::Stateful {
 public:
  DelayedScalesState(float8::DelayedScales scales, DeviceMesh stage)
      : scales_(std::move(scales)), stage_(std::move(stage)) {}

  checkpoint::ObjectState state() override {
    checkpoint::ObjectState state;
    const std::vector<Placement> placements(static_cast<size_t>(stage_.num_axes()), Placement::replicate());
    for (size_t i = 0; i < scales_.layers().size(); ++i) {
      DTensor history;
      history.local = scales_.history(i);
      history.mesh = stage_;
      history.placements = placements;
      history.global_shape = history.local.sizes().vec();
      history.box = local_box(history.global_shape, stage_, placements);
      state.tensors.push_back({scales_.layers()[i].fqn + ".amax_history", std::move(history)});
    }
    return state;
  }
  void loaded(const std::string& /*text*/) override { scales_.loaded(); }

  // A NaN can't come here, so the largest of all ranks is what any reduction finds.
  void update() {
    scales_.update([this](const at::Tensor& pending) {
      if (stage_.size() == 1 || scales_.empty()) return;  // a stage may have no such layer
      stage_.group()->all_reduce(pending, dist::ReduceOp::Max, {"float8::delayed_scales"}).wait();
    });
  }

 private:
  float8::DelayedScales scales_;
  DeviceMesh stage_;
};

}  // namespace

std::function<void()> build_delayed_scales(const JobConfig& config, const StageParts& stages,
                                           const Meshes& meshes, at::Device device,
                                           RunCheckpoints* checkpoints) {
  const float8::DelayedScaling delayed = delayed_scaling(config);
  if (!delayed.any()) return {};
  std::vector<torch::nn::Module*> roots;
  for (const auto& model : stages.models) roots.push_back(&model->root().module());
  auto scales = float8::DelayedScales::collect(roots, delayed.history_len, device);
  const auto state = std::make_shared<DelayedScalesState>(std::move(scales), meshes.stage);
  if (checkpoints && !config.checkpoint.create_seed_checkpoint) checkpoints->add(kDelayedScales, *state);
  return [state] { state->update(); };
}

}  // namespace titan::train
