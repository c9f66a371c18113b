#include "train/policies/validation.h"

#include <chrono>

#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>
#include <torch/nn/module.h>

#include "core/units.h"
#include "titan/core/error.h"
#include "titan/train/run_observer.h"
#include "titan/train/trainer.h"

namespace titan::train {

void describe(config::Table<ValidationSettings>& table) {
  using Settings = ValidationSettings;
  table.field("enable", &Settings::enable, "validate at step 1 and every freq steps");
  table.field("dataset", &Settings::dataset, "data source; see docs/data.md");
  table.field("dataset_path", &Settings::dataset_path, "file, folder or glob that the source reads");
  table.field("local_batch_size", &Settings::local_batch_size,
              "sequences per data-parallel rank and micro-batch", config::at_least(1));
  table.field(
      "global_batch_size", &Settings::global_batch_size,
      "sequences per batch over all ranks; with `steps`, it fixes what is validated, whatever the number of "
      "ranks; -1: local_batch_size x data-parallel ranks",
      config::positive_or_minus_one());
  table.field("seq_len", &Settings::seq_len, "tokens per sequence, at most training.seq_len",
              config::at_least(1));
  table.field("freq", &Settings::freq, "steps from one validation to the next", config::at_least(1));
  table.field("steps", &Settings::steps, "batches per validation; -1: the whole set once",
              config::positive_or_minus_one());
  table.table("dataloader", &Settings::dataloader);
}

std::optional<ValidationResult> validate(StepRunner& runner, const DeviceMesh& loss_mesh,
                                         const ValidationBatches& batches, int64_t max_batches) {
  const auto set_training = [&](bool training) {
    for (const ModelPart& part : runner.models()) part.model->root().module().train(training);
  };
  set_training(false);
  const auto back_to_training = c10::make_scope_exit([&] { set_training(true); });
  const c10::NoGradGuard no_grad;
  const auto start = std::chrono::steady_clock::now();
  ValidationResult result;
  double local_loss_sum = 0;
  int64_t num_empty = 0;
  for (int64_t i = 0; i != max_batches; ++i) {
    if (i % batches.micro_batches == 0) num_empty = 0;
    const auto batch = batches.next();
    if (!batch) break;
    const auto counts = batches.count(*batch);
    if (!counts) return std::nullopt;
    if (counts->global == 0) {
      if (batches.run_dry && ++num_empty == batches.micro_batches) break;
      continue;
    }
    const at::Tensor share = runner.forward(*batch, counts->global);
    local_loss_sum += share.item<double>() * static_cast<double>(counts->global);
    result.tokens += counts->global;
    result.local_tokens += batch->labels_BS.numel();
  }
  if (result.tokens == 0)
    throw ConfigError("the validation set holds no token to predict; see validation.dataset");
  result.loss =
      loss_mesh.group()->sum(local_loss_sum, {"train::validate"}) / static_cast<double>(result.tokens);
  result.seconds = seconds_since(start);
  return result;
}

bool Validation::end_step(Trainer& trainer) {
  if (!trainer.is_due(settings_.freq)) return false;
  const PhaseScope validation = trainer.phase(Phase::Validate);
  trainer.settle();
  const auto start = std::chrono::steady_clock::now();
  loader_.restart();
  // A rank that gives up waiting joins the count with an empty batch.
  const ValidationBatches batches{.next = [&]() -> std::optional<data::Batch> {
                                    return trainer.wait_for(loader_) ? loader_.next() : data::Batch();
                                  },
                                  .count = [&](const data::Batch& batch) { return trainer.agree({batch}); },
                                  .run_dry = !loader_.num_steps(),
                                  .micro_batches = loader_.num_micro_batches()};
  TrainerParts& parts = trainer.parts();
  const int64_t steps = settings_.steps;
  const auto result = validate(*parts.runner, parts.meshes.loss, batches,
                               steps < 0 ? -1 : steps * loader_.num_micro_batches());
  if (!result) return false;
  ValidationMetrics metrics{.step = trainer.step(), .loss = result->loss};
  metrics.tps = parts.window.rate_of(result->local_tokens, result->seconds);
  parts.window.fill_memory(metrics.memory_gib, metrics.memory_percent);
  for (const auto& observer : parts.observers) observer->validated(metrics);
  parts.window.leave_out(seconds_since(start));
  return false;
}

}  // namespace titan::train
