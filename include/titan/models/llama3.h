#pragma once

// Llama 3 and 3.1 (Grattafiori et al., "The Llama 3 herd of models", 2024): sizes, the model on one device,
// how it is spread over ranks, and its form in Hugging Face's transformers.
//
//   titan::models::Llama3 model(titan::models::llama3_flavors().at("8B"));
//   at::Tensor loss = model(tokens, labels, num_valid_labels);

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "titan/checkpoint/hugging_face.h"
#include "titan/config/table.h"
#include "titan/nn/containers.h"
#include "titan/nn/layers.h"
#include "titan/train/model_spec.h"

namespace titan::models {

/// [model.args.rope_scaling]: Llama 3.1's stretching of the slow rotations.
struct RopeScalingArgs {
  bool enabled = true;
  double scaling_factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_max_position_embeddings = 8192;
};
void describe(config::Table<RopeScalingArgs>& table);

/// [model.args]: the sizes of a model. Names and defaults are TorchTitan's.
struct Llama3Args {
  int64_t dim = 4096;
  int64_t n_layers = 32;
  int64_t n_heads = 32;
  std::optional<int64_t> n_kv_heads = std::nullopt;  ///< unset: n_heads
  int64_t vocab_size = 128256;
  int64_t multiple_of = 256;  ///< the feed-forward's hidden size is rounded up to a multiple of this
  std::optional<double> ffn_dim_multiplier = std::nullopt;  ///< scales that hidden size before it is rounded
  double norm_eps = 1e-5;
  double rope_theta = 10000;
  RopeScalingArgs rope_scaling = {};
  int64_t max_seq_len = 131072;  ///< positions in the rotary table; the trainer sets it to training.seq_len
  bool depth_init = true;        ///< deeper layers start with smaller output weights
  bool tie_embeddings = false;   ///< one matrix for tok_embeddings and output
  std::string attn_mask_type = "causal";  ///< "block_causal": attention stays within the documents of a row
  std::optional<int64_t> eos_id =
      std::nullopt;  ///< for block_causal: a document's last token; unset: the tokenizer's

  int64_t head_dim() const { return dim / n_heads; }
  int64_t num_kv_heads() const { return n_kv_heads.value_or(n_heads); }
  int64_t ffn_hidden_dim() const;
  bool block_causal() const { return attn_mask_type == "block_causal"; }
};
void describe(config::Table<Llama3Args>& table);

/// debugmodel, 1B, 3B, 8B, 70B, 405B.
const std::map<std::string, Llama3Args>& llama3_flavors();
/// Adds the errors in the sizes to `problems`.
void check(const Llama3Args& args, std::vector<std::string>& problems);
/// The number of parameters; a tied matrix counts once.
int64_t num_params(const Llama3Args& args);
/// Floating-point operations of forward and backward per token, as TorchTitan counts: six per parameter
/// (without an untied embedding), and attention's products without the discount for the causal mask.
double flops_per_token(const Llama3Args& args, int64_t seq_len);

// ---- the model

/// h = x + attention(norm(x)); h + feed_forward(norm(h)).
class TransformerBlockImpl : public nn::Module {
 public:
  TransformerBlockImpl(int64_t layer_id, const Llama3Args& args, const nn::RotaryEmbedding& rotary,
                       const nn::Construct& construct);
  /// x: [B, S, D]; positions: int64 [S] or [B, S], or undefined for 0..S-1.
  at::Tensor forward(const at::Tensor& x_BSD, const at::Tensor& positions = {},
                     const ops::Documents& documents = {});

  nn::Attention attention;
  nn::FeedForward feed_forward;
  nn::RMSNorm attention_norm, ffn_norm;
};
TITAN_MODULE(TransformerBlock);

/// A pipeline stage keeps some of the modules (keep_layers); the handles of the others are empty. Without
/// tok_embeddings, a stage takes the hidden states [B, S, D] of the stage before; without `output`, it
/// returns hidden states.
class Llama3Impl : public nn::Module, public nn::LayerSequence {
 public:
  explicit Llama3Impl(const Llama3Args& args, const nn::Construct& construct = {});

  /// Tokens, int64 [B, S], to logits [B, S, V]. With labels, int64 [B, S], where -100 is ignored: the sum of
  /// the token losses divided by `global_valid_tokens`, a scalar of at least fp32. A block_causal model needs the
  /// batch's `documents`, except on the meta device.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& labels_BS = {},
                     const ops::ValidTokens& global_valid_tokens = 0, const ops::Documents& documents = {});

  const Llama3Args& args() const { return args_; }

 private:
  void layers_dropped() override;
  Llama3Args args_;
  bool block_causal_;  // a forward compares no strings

 public:
  nn::Embedding tok_embeddings;
  nn::RotaryEmbedding rotary;
  nn::ModuleList<TransformerBlock> layers;
  nn::RMSNorm norm;
  nn::LinearCrossEntropy output;
};
TITAN_MODULE(Llama3);

// ---- Hugging Face's transformers

/// Names, rows and config.json of transformers' LlamaForCausalLM.
HfModel hugging_face_model(const Llama3Args& args);
/// The sizes in a config.json. Throws ConfigError with all values that are missing, wrong or not supported.
Llama3Args args_of_hugging_face(const HfConfig& config);

// ---- the trainer

/// Adds "llama3" to the trainer's models. Call it once per process.
void register_llama3();

/// TorchTitan's plan for Llama 3: how each module is cut over a tensor-parallel axis.
TensorPlan llama3_tp_plan(const TensorParallelOptions& options = {});

/// Applies all parallelisms: which modules form a sharding group, and which are freed between forward and
/// backward.
void parallelize_llama3(const Llama3& model, const train::ParallelPlan& plan);

}  // namespace titan::models
