#pragma once

// Validation: the same loss on other data, without gradients. The result is the total loss divided by the
// total number of tokens, so that neither batch sizes nor padding affect it.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "titan/config/table.h"
#include "titan/data/loader.h"
#include "titan/dist/device_mesh.h"
#include "titan/train/policy.h"
#include "train/step_runner.h"

namespace titan::train {

/// [validation]
struct ValidationSettings {
  bool enable = false;
  std::string dataset = "cpp_headers";
  std::optional<std::string> dataset_path;
  int64_t local_batch_size = 8;    ///< sequences per data-parallel rank and micro-batch
  int64_t global_batch_size = -1;  ///< sequences over all ranks; -1: local_batch_size x data-parallel ranks
  int64_t seq_len = 2048;
  int64_t freq = 10;   ///< steps between validations; step 1 is always validated
  int64_t steps = -1;  ///< batches; -1: the whole set once
  data::DataloaderSettings dataloader;
};
void describe(config::Table<ValidationSettings>& table);

/// This rank's batches.
struct ValidationBatches {
  std::function<std::optional<data::Batch>()> next;  ///< nullopt at the end, on all ranks together
  /// Counts a batch's tokens over all ranks; nullopt: all ranks have agreed to stop.
  std::function<std::optional<TokenCounts>(const data::Batch& batch)> count;
  /// True: the set ends at the first loader step in which no rank has labels, which no rank can see alone.
  /// False: batches without labels are skipped.
  bool run_dry = false;
  int64_t micro_batches = 1;  ///< per loader step; in each, some ranks may have no labels
};

struct ValidationResult {
  double loss = 0;           ///< mean over all valid tokens of all ranks
  int64_t tokens = 0;        ///< valid tokens of all ranks
  int64_t local_tokens = 0;  ///< positions in this rank's rows
  double seconds = 0;
};

/// Runs at most `max_batches` (-1: all) micro-batches forward in evaluation mode without gradients, then
/// returns to training mode. nullopt: all ranks have agreed to stop before the end. Collective over the
/// runner's models and `loss_mesh`, whose ranks' losses add up. Throws ConfigError if the set holds no
/// valid token.
std::optional<ValidationResult> validate(StepRunner& runner, const DeviceMesh& loss_mesh,
                                         const ValidationBatches& batches, int64_t max_batches);

/// Validates at step 1 and every `freq` steps.
class Validation final : public TrainerPolicy {
 public:
  Validation(ValidationSettings settings, data::DataLoader loader)
      : settings_(std::move(settings)), loader_(std::move(loader)) {}
  bool end_step(Trainer& trainer) override;
  void stopped() override { loader_.abandon_reading(); }

 private:
  ValidationSettings settings_;
  data::DataLoader loader_;
};

}  // namespace titan::train
