#pragma once

// A trainer with a model small enough to follow, on all ranks of the test, and ways to make it fail.

#include <chrono>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <thread>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "data/feed/feeds.h"
#include "distributed/world.h"
#include "job/build.h"
#include "titan/core/error.h"
#include "titan/data/tokenizer.h"
#include "titan/observe/metrics.h"
#include "titan/train/trainer.h"
#include "train/checkpoints/run_checkpoints.h"
#include "train/whole_model_runner.h"
#include "unit/data/fake_source.h"
#include "unit/data/temporary_folder.h"
#include "unit/train/toy_model.h"

namespace titan::train {

using titan::testing::device;
using titan::testing::world;

inline constexpr int64_t kVocabSize = 258;
inline constexpr int64_t kRows = 6;
inline constexpr int64_t kSeqLen = 8;

// The rank whose numbers are wrong: one in the middle, if there are three.
inline int bad_rank() { return world().size() / 2; }

// A fault, which occurs at every step.
enum class Fault { None, InfiniteLoss, InfiniteGradient, InfiniteWeightGradient, LossAlone };

// Recorded steps in memory: the tokens count up, `empty_step` has no label, and `slow_step` takes kSlow.
class CountedFeed : public data::Feed {
 public:
  static constexpr std::chrono::milliseconds kSlow{600};
  explicit CountedFeed(int64_t num_steps, int64_t empty_step = -1, int64_t slow_step = -1)
      : num_steps_(num_steps), empty_step_(empty_step), slow_step_(slow_step) {}

  void check_shape(int64_t, int64_t) const override {}
  data::LaneState start(int64_t lane, int64_t) const override { return {.lane = lane}; }
  std::unique_ptr<data::Lane> open(const data::LaneState& state, int64_t) const override {
    return std::make_unique<CountedLane>(state, empty_step_, slow_step_);
  }
  std::vector<data::LaneState> redeal(const std::vector<data::LaneState>& lanes, int64_t) const override {
    return lanes;
  }
  std::optional<int64_t> num_steps() const override { return num_steps_; }
  std::string fingerprint() const override { return "counted"; }

 private:
  class CountedLane : public data::Lane {
   public:
    CountedLane(const data::LaneState& state, int64_t empty_step, int64_t slow_step)
        : state_(state), empty_step_(empty_step), slow_step_(slow_step) {}
    int64_t fill(data::Row row) override {
      const bool is_empty = ++state_.position == empty_step_;
      if (state_.lane == 0 && state_.position == slow_step_) std::this_thread::sleep_for(kSlow);
      std::iota(row.input.begin(), row.input.end(), state_.lane + state_.position);
      std::iota(row.labels.begin(), row.labels.end(), state_.lane + state_.position + 1);
      if (is_empty) std::fill(row.labels.begin(), row.labels.end(), data::kIgnoredLabel);
      return is_empty ? 0 : static_cast<int64_t>(row.labels.size());
    }
    data::LaneState state() const override { return state_; }

   private:
    data::LaneState state_;
    int64_t empty_step_, slow_step_;
  };

  int64_t num_steps_;
  int64_t empty_step_, slow_step_;
};

// Makes the gradient of the module's own parameters infinite, but not those of its inputs and outputs.
class SpoilWeightGradient : public nn::CallHook {
 public:
  explicit SpoilWeightGradient(std::shared_ptr<nn::CallHook> outside) : outside_(std::move(outside)) {}
  void pre_forward(nn::HookHost& host, const nn::TensorRefs& inputs) override {
    if (outside_) outside_->pre_forward(host, inputs);
    for (const at::Tensor& weight : host.as_module().parameters(/*recurse=*/false))
      if (weight.requires_grad())
        weight.register_hook([](const at::Tensor& grad) { return grad / at::zeros_like(grad); });
  }
  void post_forward(nn::HookHost& host, const nn::TensorRefs& outputs) override {
    if (outside_) outside_->post_forward(host, outputs);
  }

 private:
  std::shared_ptr<nn::CallHook> outside_;
};

class FaultyModel : public BigramModel {
 public:
  /// `fault`: from forward number `first` on.
  FaultyModel(const nn::Construct& construct, Fault fault, int first,
              std::function<void(const at::Tensor& tokens_BS)> at_forward)
      : BigramModel(kVocabSize, construct),
        fault_(fault),
        first_(first),
        at_forward_(std::move(at_forward)) {}

  at::Tensor loss(const at::Tensor& tokens_BS, const at::Tensor& labels_BS,
                  const ops::ValidTokens& global_count) override {
    if (at_forward_) at_forward_(tokens_BS);
    const bool goes_wrong = ++num_calls_ >= first_ && world().rank() == bad_rank();
    if (goes_wrong && fault_ == Fault::InfiniteWeightGradient && !spoils_) {
      spoils_ = true;
      model->label_hook = std::make_shared<SpoilWeightGradient>(model->label_hook);
    }
    at::Tensor loss = BigramModel::loss(tokens_BS, labels_BS, global_count);
    if (!goes_wrong) return loss;
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (fault_ == Fault::InfiniteLoss) return loss * kInfinity;
    if (fault_ == Fault::LossAlone) return loss + kInfinity;
    if (fault_ == Fault::InfiniteGradient)
      loss.register_hook([](at::Tensor grad) { return grad * kInfinity; });
    return loss;
  }

 private:
  Fault fault_;
  int first_;
  int num_calls_ = 0;
  bool spoils_ = false;
  std::function<void(const at::Tensor& tokens_BS)> at_forward_;
};

struct Job {
  Fault fault = Fault::None;
  int first_faulty_forward = 1;
  std::shared_ptr<const data::Feed> feed = {};  // unset: documents without end
  TrainerOptions options = {};
  FaultToleranceSettings fault_tolerance = {};
  std::filesystem::path folder = {};  // for rank 0's metrics; empty: none
  std::function<void(const at::Tensor& tokens_BS)> at_forward = {};
  std::filesystem::path checkpoints = {};  // empty: none
  bool saves_whole = false;                // the whole state after each step; else the model after the last
  bool exports_model = false;              // also the model after the last step, if states are saved
  int64_t schedule_steps = 0;              // 0: options.steps
  int64_t keep_latest = 10;                // checkpoints
  int64_t save_interval = 1;               // between whole states
  int replicate = 1;                       // data-parallel ranks with a copy each
  // Called at the beginning of each phase.
  std::function<void(Phase, int64_t step, const std::vector<Parameter>&)> at_phase = {};
};

/// Changes one number of the bad rank's shard.
inline void spoil_gradient(const std::vector<Parameter>& parameters, double value) {
  if (world().rank() != bad_rank()) return;
  at::NoGradGuard no_grad;
  parameters.front().data.local.grad().view(-1)[0].fill_(value);
}

class CallingObserver : public RunObserver {
 public:
  CallingObserver(const Job& job, std::vector<Parameter> parameters)
      : at_phase_(job.at_phase), parameters_(std::move(parameters)) {}
  void begin(Phase phase, int64_t step) override { at_phase_(phase, step, parameters_); }

 private:
  std::function<void(Phase, int64_t, const std::vector<Parameter>&)> at_phase_;
  std::vector<Parameter> parameters_;
};

inline RunObservers observers_of(const Job& job, const std::vector<Parameter>& parameters) {
  RunObservers observers;
  if (world().rank() == 0 && !job.folder.empty())
    observers.push_back(std::make_unique<MetricsLogger>(MetricsSinkOptions{.folder = job.folder}));
  if (job.at_phase) observers.push_back(std::make_unique<CallingObserver>(job, parameters));
  return observers;
}

/// A folder of rank 0's that all ranks see.
struct SharedFolder {
  data::TemporaryFolder own;
  std::filesystem::path path = world().everyone()->all_gather_text(own.path().string(), {"test::folder"})[0];

  bool has(const std::filesystem::path& name) const { return std::filesystem::exists(path / name); }
};

inline std::unique_ptr<RunCheckpoints> build_checkpoints(const Job& job, const Meshes& meshes,
                                                         const std::vector<Parameter>& parameters) {
  if (job.checkpoints.empty()) return nullptr;
  RunCheckpoints::Options options;
  options.folder = job.checkpoints;
  if (job.saves_whole) {
    options.settings.interval = job.save_interval;
    options.settings.keep_latest_k = job.keep_latest;
  }
  if (!job.saves_whole || job.exports_model) options.model_export = ModelExport{};
  return std::make_unique<RunCheckpoints>(world(), meshes, parameters, options);
}

inline std::shared_ptr<const data::Feed> documents() {
  return std::make_shared<data::PackedFeed>(std::make_shared<data::FakeSource>(data::numbered_documents(20)),
                                            std::make_shared<data::ByteTokenizer>(), data::PackingOptions{});
}

// A trainer, and its initial weights.
struct Started {
  Trainer trainer;
  std::vector<Parameter> parameters;
  std::map<std::string, at::Tensor> before;
  std::multimap<std::string, optim::Optimizer::ParameterState> moments;  // the optimizer's own

  bool weights_are_unchanged() const {
    for (const Parameter& parameter : parameters)
      if (!at::equal(parameter.data.local.detach(), before.at(parameter.name))) return false;
    return true;
  }
};

inline std::unique_ptr<TrainableModel> build_model(const Meshes& meshes, const Job& job) {
  auto model = std::make_unique<FaultyModel>(deferred(device(), at::kFloat), job.fault,
                                             job.first_faulty_forward, job.at_forward);
  fully_shard(model->model, {.mesh = meshes.fsdp});
  materialize(model->root(), 1);
  return model;
}

inline data::DataLoader build_loader(const Job& job, const Meshes& meshes) {
  return {job.feed ? job.feed : documents(),
          {.dp_rank = meshes.dp_rank(),
           .dp_size = meshes.dp_degree(),
           .global_batch_size = kRows,
           .local_batch_size = kRows / world().size(),
           .seq_len = kSeqLen}};
}

inline Models one_model(std::unique_ptr<TrainableModel> model) {
  Models models;
  models.push_back(std::move(model));
  return models;
}

inline Started start(const Job& job) {
  Meshes meshes =
      build_meshes(world(), {.dp_replicate = job.replicate, .dp_shard = world().size() / job.replicate});
  auto model = build_model(meshes, job);
  auto list = titan::parameters(model->root());
  auto runner = std::make_unique<WholeModelRunner>(*model, device());
  optim::Optimizer optimizer(list, {.lr = 0.1});
  auto moments = optimizer.state();
  std::map<std::string, at::Tensor> before;
  for (const Parameter& parameter : list) before[parameter.name] = parameter.data.local.detach().clone();
  return {Trainer({.world = world(),
                   .meshes = meshes,
                   .device = device(),
                   .models = one_model(std::move(model)),
                   .runner = std::move(runner),
                   .parameters = list,
                   .optimizer = std::move(optimizer),
                   .schedule = optim::LrSchedule(
                       {.warmup_steps = 2}, job.schedule_steps > 0 ? job.schedule_steps : job.options.steps),
                   .loader = build_loader(job, meshes),
                   .window = MetricsWindow(device(), {}),
                   .checkpoints = build_checkpoints(job, meshes, list),
                   .observers = observers_of(job, list),
                   .policies = fault_tolerance_policies(job.fault_tolerance, world())},
                  job.options),
          list, std::move(before), std::move(moments)};
}

inline std::string message_of_training(Trainer& trainer) {
  try {
    trainer.train();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != text.npos;
}

inline std::vector<nlohmann::json> logged(const std::filesystem::path& folder) {
  std::ifstream file(folder / "metrics.jsonl");
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

}  // namespace titan::train
