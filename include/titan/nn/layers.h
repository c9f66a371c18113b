#pragma once

// The layers of a transformer, and the interfaces by which wrappers change a layer:
// tensor parallelism cuts its weight, Float8 replaces its products, and context parallelism replaces its
// attention.
//
//   nn::Linear linear(in, out, nn::LinearOptions{.bias = true});
//   nn::RotaryEmbedding rotary(nn::RotaryOptions{.head_dim = 64, .max_positions = 4096});
//   nn::Attention attention(nn::AttentionOptions{.dim = 512, .num_heads = 8, .num_kv_heads = 4}, rotary);
//   h = h + attention(norm(h));

#include <initializer_list>
#include <utility>

#include "titan/nn/loss.h"
#include "titan/nn/module.h"
#include "titan/ops/functional.h"

namespace titan::nn {

// ---- layers with a weight

/// How tensor parallelism cuts a module's weights (Shoeybi et al., "Megatron-LM", 2019).
enum class Split {
  Columns,  ///< by output: each rank computes a part of the output features (or logits)
  Rows,     ///< by input: each rank has a part of the input features (or vocabulary) and computes a summand
};

/// How one parameter is cut when its module is split.
struct ParamSplit {
  std::string name;                  ///< within the module
  int64_t dim = -1;                  ///< the dimension that is cut; -1: every rank keeps it whole
  bool gradient_is_summand = false;  ///< for a whole parameter: each rank's gradient is a summand
};

/// A module that defines how it is cut. Others are cut as torch.nn.Linear: weight [out, in], bias [out].
class Splittable {
 public:
  virtual ~Splittable() = default;
  /// Throws Error for a split that the module doesn't support.
  virtual std::vector<ParamSplit> param_splits(Split split) const = 0;
  /// Called when the parameters have become this rank's parts.
  virtual void set_split(Split split, std::shared_ptr<const ops::RankParts> parts) = 0;
};

/// A module whose matrix products can be replaced (Float8, fused communication).
class ProductsUser {
 public:
  virtual ~ProductsUser() = default;
  virtual void set_products(ops::SharedProducts products) = 0;
};

/// Gives these products to all modules at and below `root` that multiply by a weight.
void set_products(torch::nn::Module& root, const ops::SharedProducts& products);

/// A module with a parameter "weight" whose gradient a sink may receive.
class WeightedModule : public Module {
 public:
  bool set_grad_sink(std::string_view name, std::shared_ptr<ops::GradSink> sink) override;

  at::Tensor weight;

 protected:
  std::shared_ptr<ops::GradSink> weight_sink_;
};

struct LinearOptions {
  bool bias = false;
  /// The weight's initial values; default: uniform in +-1/sqrt(in), as is the bias (torch.nn.Linear's).
  std::optional<Init> init = std::nullopt;
  Construct construct = {};
};

class Linear;

/// y = x W^T + b. x: [..., in]; weight: [out, in]; bias: [out], or undefined; y: [..., out].
class LinearImpl : public WeightedModule, public ProductsUser, public Splittable {
 public:
  LinearImpl(int64_t in_features, int64_t out_features, const LinearOptions& options = {});
  at::Tensor forward(const at::Tensor& x);

  void set_products(ops::SharedProducts products) override;
  const ops::SharedProducts& products() const { return products_; }
  /// Sets where the weight's values come from instead of the parameter; null: the parameter.
  void set_weight_source(std::shared_ptr<const ops::WeightSource> source) {
    weight_source_ = std::move(source);
  }
  /// Split::Columns cuts weight and bias. Split::Rows cuts the weight, and one rank adds the bias.
  std::vector<ParamSplit> param_splits(Split split) const override;
  void set_split(Split split, std::shared_ptr<const ops::RankParts> parts) override;
  /// For a split layer without bias: gathers its sequence (columns), or sums and scatters its result (rows),
  /// while it multiplies. x: [B, S, in].
  void set_exchange(Split split, std::shared_ptr<const ops::SequenceExchange> exchange);

  at::Tensor bias;

 private:
  /// Whether the two layers may be computed together, because neither has its own hooks.
  bool joins(const LinearImpl& other) const;
  ops::SinkedWeight sinked_weight() const { return {weight, weight_sink_, weight_source_}; }

  ops::SharedProducts products_;  // for `parts_`
  ops::SpreadFeatures parts_;
  std::shared_ptr<const ops::WeightSource> weight_source_;
  bool adds_bias_ = true;  // in a sum over ranks, only one rank adds it
  Split exchange_split_ = Split::Columns;
  std::shared_ptr<const ops::SequenceExchange> exchange_;

  friend std::vector<at::Tensor> linears(const at::Tensor& x, std::initializer_list<const Linear*> layers);
};
TITAN_MODULE(Linear);

/// Calls several layers on one input. If they have no hooks they are computed as one node: the products add
/// up the input's gradients, and an input that is gathered is gathered once.
std::vector<at::Tensor> linears(const at::Tensor& x, std::initializer_list<const Linear*> layers);

// ---- embedding, norm, feed-forward

/// Rows of weight [num_embeddings, dim] by token. tokens: int64 [...]; result: [..., dim]. The default
/// distribution is N(0, 1).
class EmbeddingImpl : public WeightedModule, public Splittable {
 public:
  EmbeddingImpl(int64_t num_embeddings, int64_t dim, const Construct& construct = {},
                const Init& init = Init::normal(0, 1));
  at::Tensor forward(const at::Tensor& tokens);

  bool backward_reads_parameters() const override { return false; }

  /// Split::Rows: each rank has a part of the vocabulary, and returns zeros for tokens of other ranks.
  /// Split::Columns: each rank has a part of `dim`.
  std::vector<ParamSplit> param_splits(Split split) const override;
  void set_split(Split split, std::shared_ptr<const ops::RankParts> parts) override;

 private:
  int64_t num_embeddings_;
  ops::VocabularyPart part_;
};
TITAN_MODULE(Embedding);

/// x / sqrt(mean(x^2) + eps) * weight over the last dimension. x: [..., dim]; weight: [dim], initially ones.
class RMSNormImpl : public WeightedModule {
 public:
  RMSNormImpl(int64_t dim, double eps = 1e-5, const Construct& construct = {});
  at::Tensor forward(const at::Tensor& x);
  /// For a residual stream: also adds to it what a layer returns (ops::add_rms_norm). `added` may be undefined.
  ops::NormedSum forward(const at::Tensor& x, const at::Tensor& added);

 private:
  double eps_;
};
TITAN_MODULE(RMSNorm);

struct FeedForwardOptions {
  int64_t dim = 0;
  int64_t hidden_dim = 0;
  Init gate_init;    ///< for w1
  Init output_init;  ///< for w2 and w3
  Construct construct = {};
};

/// w2(silu(w1 x) * w3 x). x: [..., dim]; result the same.
class FeedForwardImpl : public Module {
 public:
  explicit FeedForwardImpl(const FeedForwardOptions& options);
  at::Tensor forward(const at::Tensor& x);

  Linear w1, w2, w3;
};
TITAN_MODULE(FeedForward);

// ---- positions and attention

// [Note: replaceable attention]
// A model's attention and positions can be replaced, so that a sequence may be split over ranks
// (titan::context_parallel) without changing the model. Your own module takes part by implementing
// AttentionUser or PositionUser and using the object that it is given.

/// Causal attention, as ops::causal_attention computes it: q [B, S, H, E]; k, v [B, S, K, E]; result as q. S
/// is the number of tokens on this rank. Differentiable. Shared by a module's calls, one at a time.
class AttentionCore {
 public:
  virtual ~AttentionCore() = default;
  virtual at::Tensor attend(const at::Tensor& q_BSHE, const at::Tensor& k_BSKE, const at::Tensor& v_BSKE) = 0;
};

/// A module that attends.
class AttentionUser {
 public:
  virtual ~AttentionUser() = default;
  /// Replaces ops::causal_attention from now on.
  virtual void set_attention_core(std::shared_ptr<AttentionCore> core) = 0;
};

/// The positions, within their sequence, of this rank's tokens.
class TokenPositions {
 public:
  virtual ~TokenPositions() = default;
  /// int64 [num_tokens] on `device`. Stays valid until the next call.
  virtual const at::Tensor& of(int64_t num_tokens, at::Device device) = 0;
};

/// A module that computes with positions (rotary or learned embeddings).
class PositionUser {
 public:
  virtual ~PositionUser() = default;
  /// Sets the positions to use if a caller passes none, instead of 0, 1, 2, ...
  virtual void set_token_positions(std::shared_ptr<TokenPositions> positions) = 0;
};

/// Llama 3.1's stretching of the slow rotations (Grattafiori et al., "The Llama 3 herd of models", 2024, and
/// Meta's model.py). A frequency f with wavelength l = 2 pi / f, in tokens, stays f if l < original_length /
/// high_freq_factor, becomes f / factor if l > original_length / low_freq_factor, and is a linear blend in
/// 1/l in between.
struct RotaryScaling {
  double factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_length = 8192;
};

struct RotaryOptions {
  int64_t head_dim = 0;  ///< even
  int64_t max_positions = 0;
  double theta = 10000;
  std::optional<RotaryScaling> scaling = std::nullopt;
  Construct construct = {};
};

/// f_i = theta^(-2i/head_dim) for i < head_dim/2, scaled. Computed in fp32 with PyTorch's kernels and
/// rounding, so that the angles equal TorchTitan's.
at::Tensor rotary_frequencies(int64_t head_dim, double theta, const std::optional<RotaryScaling>& scaling,
                              at::ScalarType dtype = at::kFloat);

/// Rotates queries and keys by position, in interleaved pairs (ops::joint_rotary). It has no parameters, only a table (cos, sin)
/// in fp32, which isn't saved with the model and which deferred construction leaves empty until
/// reset_buffers(). One module serves all layers.
class RotaryEmbeddingImpl : public Module, public PositionUser {
 public:
  explicit RotaryEmbeddingImpl(const RotaryOptions& options);
  /// q: [B, S, H, head_dim]; k: [B, S, K, head_dim]; positions: int64 [S] or [B, S]; undefined: the positions
  /// from set_token_positions(), or 0..S-1.
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& q_BSHD, const at::Tensor& k_BSKD,
                                            const at::Tensor& positions = {});

  void reset_buffers(const at::Device& device) override;
  void set_token_positions(std::shared_ptr<TokenPositions> positions) override {
    token_positions_ = std::move(positions);
  }
  const at::Tensor& table() const { return table_; }

 private:
  RotaryOptions options_;
  std::shared_ptr<TokenPositions> token_positions_;  // null: 0..S-1
  // [max_positions, head_dim]: cos, sin, cos, sin, ...; fp32, or float64 in a float64 model.
  at::Tensor table_;
};
TITAN_MODULE(RotaryEmbedding);

struct AttentionOptions {
  int64_t dim = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;  ///< a divisor of num_heads
  Init input_init;           ///< for wq, wk, wv
  Init output_init;          ///< for wo
  Construct construct = {};
};

/// Causal self-attention with grouped queries and rotary positions (Ainslie et al., GQA, 2023). x: [B, S,
/// dim]; result the same.
///
/// The number of heads follows from the width of the products, so tensor parallelism, where a rank has some
/// of the heads, runs the same code.
class AttentionImpl : public Module, public AttentionUser {
 public:
  /// `rotary` is shared with the other layers; it belongs to the model.
  AttentionImpl(const AttentionOptions& options, RotaryEmbedding rotary);
  /// With `documents`, tokens attend within their documents; not through an attention core.
  at::Tensor forward(const at::Tensor& x_BSD, const at::Tensor& positions = {},
                     const ops::Documents& documents = {});
  void set_attention_core(std::shared_ptr<AttentionCore> core) override { core_ = std::move(core); }

  Linear wq, wk, wv, wo;

 private:
  int64_t head_dim_;
  RotaryEmbedding rotary_;
  std::shared_ptr<AttentionCore> core_;  // null: ops::causal_attention
};
TITAN_MODULE(Attention);

// ---- the loss head

struct LossHeadOptions {
  Init init;
  at::Tensor tied_weight = {};  ///< the embedding's [vocab, dim], for models that share it
  int64_t chunk_bytes =
      64 * 1024 * 1024;  ///< size of the logits that exist at one time; on a GPU, at least 4,096 rows do
  Construct construct = {};
  Loss loss = nullptr;
};

/// The model's last layer and its loss in one call. It turns hidden states into logits or, with labels, into
/// the loss, without storing all logits.
class LinearCrossEntropyImpl : public WeightedModule,
                               public ProductsUser,
                               public Splittable,
                               public LossUser {
 public:
  LinearCrossEntropyImpl(int64_t dim, int64_t vocab_size, const LossHeadOptions& options);

  /// hidden: [..., dim]; logits: [..., vocab], in hidden's dtype.
  at::Tensor forward(const at::Tensor& hidden);
  /// labels: int64 [...], where -100 is ignored. Returns the sum of this batch's token losses divided by
  /// `global_valid_tokens`, the number of labels that aren't ignored in the whole optimizer step (0: the loss
  /// is 0). The result is a scalar in fp32, or float64 in a float64 model.
  at::Tensor forward(const at::Tensor& hidden, const at::Tensor& labels,
                     const ops::ValidTokens& global_valid_tokens);

  void set_products(ops::SharedProducts products) override { products_ = std::move(products); }
  void set_loss(Loss loss) override { loss_ = std::move(loss); }

  /// Supports only Split::Columns, where each rank has a part of the vocabulary. The loss is whole on every
  /// rank (loss parallel), and the hidden states' gradient is a summand. The call without labels returns this
  /// rank's part of the logits.
  std::vector<ParamSplit> param_splits(Split split) const override;
  void set_split(Split split, std::shared_ptr<const ops::RankParts> parts) override;
  /// For a split vocabulary: whether to compute the loss from whole logits, gathered chunk by chunk.
  void set_gather_logits(bool gather) { part_.gather_logits = gather; }

 private:
  int64_t vocab_size_;
  int64_t chunk_bytes_;
  ops::VocabularyPart part_;
  ops::SharedProducts products_;
  Loss loss_;
};
TITAN_MODULE(LinearCrossEntropy);

}  // namespace titan::nn
