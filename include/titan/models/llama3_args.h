#pragma once

// Sizes of Llama 3 and 3.1 (Grattafiori et al., "The Llama 3 herd of models", 2024), without the model.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "titan/config/table.h"

namespace titan::models {

/// Llama 3.1's stretching of the slow rotations; [model.args.rope_scaling].
struct RopeScalingArgs {
  bool enabled = true;
  double scaling_factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_max_position_embeddings = 8192;
};
void describe(config::Table<RopeScalingArgs>& table);

/// Sizes of a model; [model.args]. Names and defaults are TorchTitan's.
struct Llama3Args {
  int64_t dim = 4096;
  int64_t n_layers = 32;
  int64_t n_heads = 32;
  std::optional<int64_t> n_kv_heads = std::nullopt;  ///< unset: as many as heads
  int64_t vocab_size = 128256;
  int64_t multiple_of = 256;  ///< the feed-forward's hidden size is rounded up to a multiple of it
  std::optional<double> ffn_dim_multiplier = std::nullopt;  ///< of that hidden size, before it is rounded
  double norm_eps = 1e-5;
  double rope_theta = 10000;
  RopeScalingArgs rope_scaling = {};
  int64_t max_seq_len = 131072;  ///< positions in the rotary table; the trainer sets it to the training's
  bool depth_init = true;        ///< deeper layers start with smaller output weights
  bool tie_embeddings = false;   ///< one matrix for tok_embeddings and output

  int64_t head_dim() const { return dim / n_heads; }
  int64_t num_kv_heads() const { return n_kv_heads.value_or(n_heads); }
  int64_t ffn_hidden_dim() const;
};
void describe(config::Table<Llama3Args>& table);

/// debugmodel, 1B, 3B, 8B, 70B, 405B.
const std::map<std::string, Llama3Args>& llama3_flavours();
/// Adds what is wrong with the sizes.
void check(const Llama3Args& args, std::vector<std::string>& problems);
/// Parameters, a tied matrix once.
int64_t num_params(const Llama3Args& args);
/// Floating point operations of forward and backward per token, as TorchTitan counts: six per parameter
/// (without an untied embedding), and attention's products without the discount for the causal mask.
double flops_per_token(const Llama3Args& args, int64_t seq_len);

}  // namespace titan::models
