#pragma once

// Validation: the same loss over other data, without gradients. The result is the total loss over the total
// count of tokens, so that neither batch sizes nor padding weigh in.

#include <functional>
#include <optional>
#include <string>

#include "titan/config/table.h"
#include "titan/data/settings.h"
#include "titan/train/parallel_dims.h"
#include "titan/train/step_runner.h"

namespace titan::train {

class StopAgreement;

/// [validation]
struct ValidationSettings {
  bool enable = false;
  std::string dataset = "cpp_headers";
  std::optional<std::string> dataset_path;
  int64_t local_batch_size = 8;    ///< sequences per data-parallel rank and micro-batch
  int64_t global_batch_size = -1;  ///< sequences of all ranks; -1: local_batch_size x data-parallel ranks
  int64_t seq_len = 2048;
  int64_t freq = 10;   ///< steps from one validation to the next; step 1 is always validated
  int64_t steps = -1;  ///< batches; -1: the whole set once
  data::DataloaderSettings dataloader;
};

void describe(config::Table<ValidationSettings>& table);

/// The batches of this rank.
struct ValidationBatches {
  std::function<std::optional<data::Batch>()> next;  ///< nullopt at the end, on all ranks together
  /// The end is the first batch without labels on any rank, which no rank sees alone. Otherwise such a batch
  /// is passed over.
  bool run_dry = false;
  /// Of a step of the loader, in each of which some ranks may have none of its rows: it is the whole step
  /// that has no labels at the end.
  int64_t micro_batches = 1;
  /// Asked before each batch; null: a validation is never left. A rank that gives up waiting gives it a batch
  /// without tensors.
  StopAgreement* stop = nullptr;
};

struct ValidationResult {
  double loss = 0;           ///< mean over all valid tokens of all ranks
  int64_t tokens = 0;        ///< valid ones, of all ranks
  int64_t local_tokens = 0;  ///< positions in this rank's rows
  double seconds = 0;
  bool stopped = false;  ///< all ranks have agreed to, before the end: there is no loss
};

/// Runs at most `max_batches` (-1: all) micro-batches forward in evaluation mode without gradients, then
/// returns to training mode. `plan`: of a forward schedule, whose number of micro-batches divides a batch's
/// rows. Collective over the runner's pipeline, meshes.batch and meshes.loss. Throws ConfigError when the set
/// holds no valid token.
ValidationResult validate(StepRunner& runner, const StepPlan& plan, const Meshes& meshes,
                          const ValidationBatches& batches, int64_t max_batches);

}  // namespace titan::train
