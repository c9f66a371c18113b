#pragma once

// Objects for Checkpointer::add, with which your own training loop saves its model, optimizer and counters.
//
//   titan::train::ModelState model_state(titan::parameters(model));
//   titan::train::OptimizerState optimizer_state(optimizer, titan::parameters(model));
//   titan::train::TextState loop([&] { return std::to_string(step); },
//                                [&](const std::string& text) { step = std::stoll(text); });

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/checkpoint/checkpointer.h"
#include "titan/optim/optimizer.h"
#include "titan/parallel/parameters.h"
#include "titan/train/parallel_dims.h"

namespace titan::train {

/// The parameters, by name. Tensors that modules compute from their settings (tables of positions) aren't
/// saved. If a module has other tensors that change, add them as a separate object.
class ModelState : public checkpoint::Stateful {
 public:
  explicit ModelState(std::vector<Parameter> parameters);
  checkpoint::ObjectState state() override;
  void loaded(const std::string& text) override;

 private:
  std::vector<Parameter> parameters_;
};

/// For each parameter that is stepped: NAME.step and the optimizer's state, such as AdamW's NAME.exp_avg and
/// NAME.exp_avg_sq.
class OptimizerState : public checkpoint::Stateful {
 public:
  /// `parameters`: the ones that the optimizer was made for. The optimizer must outlive this.
  OptimizerState(optim::Optimizer& optimizer, const std::vector<Parameter>& parameters);
  checkpoint::ObjectState state() override;
  void loaded(const std::string& text) override;

 private:
  optim::Optimizer& optimizer_;
  /// Whether each copy of a parameter is a duplicate: a pipeline rank may hold a tied weight in two stages.
  std::map<std::string, std::vector<bool>> copies_;
};

/// State that isn't a tensor. `save` is called on every rank, but only rank 0's text is saved.
class TextState : public checkpoint::Stateful {
 public:
  TextState(std::function<std::string()> save, std::function<void(const std::string&)> load);
  checkpoint::ObjectState state() override;
  void loaded(const std::string& text) override;

 private:
  std::function<std::string()> save_;
  std::function<void(const std::string&)> load_;
};

/// LibTorch's default generators of every rank, from which dropout draws. They can continue only if every
/// rank does the work that it did before: place() is saved with them and compared before they are loaded.
class RngState : public checkpoint::Stateful {
 public:
  /// `seed`: the run's seed.
  RngState(const Meshes& meshes, at::Device device, uint64_t seed);
  checkpoint::ObjectState state() override;
  void loaded(const std::string& text) override;

  /// "pp 1, dp_replicate 1, dp_shard 4, cp 1, tp 2, cpu"
  const std::string& place() const { return place_; }
  /// Seeds them for resuming after `step` on different ranks, from the run's seed, the rank's position in
  /// meshes.loss and the step, so that the numbers drawn before aren't drawn again.
  void reseed(int64_t step);

 private:
  struct Generator {
    std::string name;
    at::Device device;
    DTensor states;  // one row per rank of the stage
  };
  std::vector<Generator> generators_;
  std::string place_;
  uint64_t seed_;
  int64_t position_;
};

}  // namespace titan::train
