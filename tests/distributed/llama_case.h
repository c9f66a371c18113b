#pragma once

// Small Llamas, whole and spread over ranks, with the same batches, for the parity tests.

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "cli/commands.h"
#include "distributed/layouts.h"
#include "distributed/world.h"
#include "titan/core/error.h"
#include "titan/nn/loss.h"
#include "titan/parallel/parameters.h"
#include "titan/train/model_spec.h"
#include "titan/train/parallel_dims.h"
#include "unit/golden.h"

namespace titan::testing {

/// The sizes of a Llama, by the keys of [model.args], and of its batches.
struct LlamaCase {
  std::string name;
  std::map<std::string, config::Value> args;
  int64_t rows = 16;
  int64_t seq_len = 16;
  std::string loss = "cross_entropy";
};

/// The model of tests/data/parity/mini.
inline LlamaCase mini_llama() {
  return {.name = "mini",
          .args = {{"dim", int64_t{64}},
                   {"n_layers", int64_t{2}},
                   {"n_heads", int64_t{4}},
                   {"n_kv_heads", int64_t{2}},
                   {"vocab_size", int64_t{256}},
                   {"multiple_of", int64_t{32}},
                   {"rope_theta", 500000.0}},
          .rows = 16,
          .seq_len = 64};
}

/// Sizes that 2, 3 or 4 ranks don't divide evenly: 42 features in 7 heads, 250 tokens, 5 layers.
inline LlamaCase uneven_llama() {
  return {.name = "uneven",
          .args = {{"dim", int64_t{42}},
                   {"n_layers", int64_t{5}},
                   {"n_heads", int64_t{7}},
                   {"n_kv_heads", int64_t{1}},
                   {"vocab_size", int64_t{250}},
                   {"multiple_of", int64_t{5}},
                   {"rope_theta", 10000.0}},
          .rows = 16,
          .seq_len = 19};
}

/// Embedding and output share one matrix.
inline LlamaCase tied_llama() {
  LlamaCase llama = mini_llama();
  llama.name = "tied";
  llama.args["tie_embeddings"] = true;
  llama.seq_len = 16;
  return llama;
}

/// Attention within documents, whose last tokens come from a small vocabulary.
inline std::map<std::string, config::Value> in_documents() {
  return {
      {"attn_mask_type", std::string("block_causal")}, {"eos_id", int64_t{5}}, {"vocab_size", int64_t{12}}};
}
inline bool has_documents(const LlamaCase& llama) { return llama.args.contains("eos_id"); }

inline const train::ModelSpec& llama_spec() {
  cli::register_builtin_models();
  return *train::model_specs().get("llama3");
}

inline std::shared_ptr<void> make_args(const LlamaCase& llama) {
  auto args = llama_spec().make_args("debugmodel");
  auto fields = llama_spec().arg_fields();
  for (const auto& [key, value] : llama.args) {
    auto field = std::find_if(fields.begin(), fields.end(), [&](const auto& f) { return f.key == key; });
    TITAN_CHECK(field != fields.end(), "llama3 has no argument '", key, "'");
    field->set(args.get(), value);
  }
  return args;
}

inline nn::Loss loss_named(const std::string& name) {
  const nn::LossKind& kind = nn::losses().get(name);
  return kind.make(kind.make_args().get());
}

/// A deferred model; apply a plan, then materialize it. `stage_modules`: a pipeline stage's modules; empty:
/// the whole model.
inline std::unique_ptr<train::TrainableModel> build_llama(const LlamaCase& llama, at::ScalarType dtype,
                                                          std::vector<std::string> stage_modules = {}) {
  auto args = make_args(llama);
  auto model = llama_spec().build(args.get(), {.construct = deferred(device(), dtype),
                                               .seq_len = llama.seq_len,
                                               .stage_modules = std::move(stage_modules)});
  nn::set_loss(model->root().module(), loss_named(llama.loss));
  return model;
}

inline train::Meshes meshes_of(const DataLayout& layout) {
  return train::build_meshes(world(), {.dp_replicate = layout.replicate, .dp_shard = layout.shard});
}

/// Fills in `fsdp.mesh`.
inline std::unique_ptr<train::TrainableModel> build_sharded_llama(const LlamaCase& llama,
                                                                  at::ScalarType dtype,
                                                                  const train::Meshes& meshes,
                                                                  FsdpOptions fsdp) {
  auto model = build_llama(llama, dtype);
  fsdp.mesh = meshes.fsdp;
  llama_spec().parallelize(*model, {.meshes = meshes, .fsdp = fsdp});
  return model;
}

/// int64 [rows, sequence]; labels of -100 are ignored.
struct Batch {
  at::Tensor tokens;
  at::Tensor labels;
  std::optional<int64_t> document_end = {};
  int64_t num_valid() const { return labels.ne(-100).sum().item<int64_t>(); }
  /// The rows first, first + step, ...
  Batch rows(int64_t first, int64_t step) const {
    return {tokens.slice(0, first, {}, step).contiguous(), labels.slice(0, first, {}, step).contiguous(),
            document_end};
  }
};

/// The same on every rank. Labels are masked unevenly over the rows, one row completely.
inline Batch random_batch(const LlamaCase& llama, uint64_t seed) {
  at::manual_seed(seed);
  int64_t vocab_size = std::get<int64_t>(llama.args.at("vocab_size"));
  Batch batch{at::randint(vocab_size, {llama.rows, llama.seq_len}, at::kLong),
              at::randint(vocab_size, {llama.rows, llama.seq_len}, at::kLong)};
  for (int64_t row = 0; row < llama.rows; ++row)
    batch.labels[row].slice(0, 0, row * 5 % llama.seq_len).fill_(-100);
  if (llama.rows > 1) batch.labels[1].fill_(-100);
  if (has_documents(llama)) batch.document_end = std::get<int64_t>(llama.args.at("eos_id"));
  return batch;
}

/// The loss of a batch's rows, divided by `num_valid`.
inline at::Tensor loss_of(train::TrainableModel& model, const Batch& rows, int64_t num_valid) {
  if (rows.document_end)
    model.set_documents(ops::documents_ending_with(*rows.document_end, rows.tokens).to(device()));
  return model.loss(rows.tokens.to(device()), rows.labels.to(device()), num_valid);
}

/// Runs forward and backward over this rank's rows (rank, rank + degree, ...) in `micro_batches` parts.
/// Returns the loss over all ranks.
inline double forward_backward(train::TrainableModel& model, const Batch& batch, int rank, int degree,
                               int micro_batches) {
  int64_t num_valid = batch.num_valid();
  Batch mine = batch.rows(rank, degree);
  double loss = 0;
  for (int m = 0; m < micro_batches; ++m) {
    set_last_micro_batch(model.root(), m + 1 == micro_batches);
    Batch part = mine.rows(m, micro_batches);
    at::Tensor part_loss = loss_of(model, part, num_valid);
    part_loss.backward();
    loss += part_loss.item<double>();
  }
  return degree > 1 ? world().everyone()->sum(loss, {.phase = "test::loss"}) : loss;
}

/// The loss and gradients of one forward and backward.
struct LlamaStep {
  double loss = 0;
  std::map<std::string, at::Tensor> gradients;
};

inline LlamaStep run_on_one_rank(const LlamaCase& llama, const Batch& batch, at::ScalarType dtype,
                                 uint64_t seed) {
  auto model = build_llama(llama, dtype);
  materialize(model->root(), seed);
  LlamaStep step{forward_backward(*model, batch, 0, 1, 1), {}};
  for (const Parameter& parameter : parameters(model->root()))
    step.gradients[parameter.name] = parameter.data.local.grad();
  return step;
}

inline void forget_gradients(train::TrainableModel& model) {
  for (const Parameter& parameter : parameters(model.root()))
    at::Tensor(parameter.data.local).mutable_grad().reset();
}

/// The whole gradient of a parameter, on every rank.
inline at::Tensor full_gradient(const Parameter& parameter) {
  TITAN_CHECK(parameter.data.local.grad().defined(), parameter.name, " has no gradient");
  DTensor gradient = parameter.data;
  gradient.local = gradient.local.grad();
  return full_tensor(gradient);
}

}  // namespace titan::testing
