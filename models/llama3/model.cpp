// Llama 3 on one device. Suffixes name dimensions: B batch, S sequence, D model, V vocabulary.

#include <cmath>
#include <utility>

#include "titan/core/error.h"
#include "titan/models/llama3.h"

namespace titan::models {

namespace {

// TorchTitan's distribution. Its bounds of +-2 are absolute, so a hundred standard deviations away, but are
// kept for parity.
nn::Init projection_init(double std) { return nn::Init::truncated_normal(std, -2, 2); }

// Weights that add to the residual stream start smaller in deeper layers, or in models with more layers.
nn::Init residual_init(int64_t layer_id, const Llama3Args& args) {
  const int64_t depth = args.depth_init ? layer_id + 1 : args.n_layers;
  return projection_init(0.02 / std::sqrt(2.0 * static_cast<double>(depth)));
}

nn::Init head_init(const Llama3Args& args) {
  const double std = 1.0 / std::sqrt(static_cast<double>(args.dim));
  return nn::Init::truncated_normal(std, -3 * std, 3 * std);
}

nn::RotaryOptions rotary_options(const Llama3Args& args, const nn::Construct& construct) {
  nn::RotaryOptions options{.head_dim = args.head_dim(),
                            .max_positions = args.max_seq_len,
                            .theta = args.rope_theta,
                            .construct = construct};
  const RopeScalingArgs& scaling = args.rope_scaling;
  if (scaling.enabled)
    options.scaling = nn::RotaryScaling{.factor = scaling.scaling_factor,
                                        .low_freq_factor = scaling.low_freq_factor,
                                        .high_freq_factor = scaling.high_freq_factor,
                                        .original_length = scaling.original_max_position_embeddings};
  return options;
}

}  // namespace

TransformerBlockImpl::TransformerBlockImpl(int64_t layer_id, const Llama3Args& args,
                                           const nn::RotaryEmbedding& rotary, const nn::Construct& construct)
    : attention(nn::AttentionOptions{.dim = args.dim,
                                     .num_heads = args.n_heads,
                                     .num_kv_heads = args.num_kv_heads(),
                                     .input_init = projection_init(0.02),
                                     .output_init = residual_init(layer_id, args),
                                     .construct = construct},
                rotary),
      feed_forward(nn::FeedForwardOptions{.dim = args.dim,
                                          .hidden_dim = args.ffn_hidden_dim(),
                                          .gate_init = projection_init(0.02),
                                          .output_init = residual_init(layer_id, args),
                                          .construct = construct}),
      attention_norm(args.dim, args.norm_eps, construct),
      ffn_norm(args.dim, args.norm_eps, construct) {
  register_module("attention", attention);
  register_module("feed_forward", feed_forward);
  register_module("attention_norm", attention_norm);
  register_module("ffn_norm", ffn_norm);
}

at::Tensor TransformerBlockImpl::forward(const at::Tensor& x_BSD, const at::Tensor& positions,
                                         const ops::Documents& documents) {
  check_entered_through_ref();
  // The norms add to the residual stream, and what they return of it has the gradients of all its users.
  const ops::NormedSum x = attention_norm(x_BSD, at::Tensor());
  const ops::NormedSum h = ffn_norm(x.sum, attention(x.normed, positions, documents));
  return h.sum + feed_forward(h.normed);
}

Llama3Impl::Llama3Impl(const Llama3Args& args, const nn::Construct& construct)
    : args_(args),
      block_causal_(args.block_causal()),
      tok_embeddings(args.vocab_size, args.dim, construct),
      rotary(rotary_options(args, construct)),
      norm(args.dim, args.norm_eps, construct),
      output(args.dim, args.vocab_size,
             nn::LossHeadOptions{.init = head_init(args),
                                 .tied_weight = args.tie_embeddings ? tok_embeddings->weight : at::Tensor(),
                                 .construct = construct}) {
  register_module("tok_embeddings", tok_embeddings);
  register_module("rotary", rotary);
  for (int64_t layer_id = 0; layer_id < args.n_layers; ++layer_id)
    layers.push_back(TransformerBlock(layer_id, args, rotary, construct));
  register_module("layers", layers.ptr());
  register_module("norm", norm);
  register_module("output", output);
  call_in_order({part("tok_embeddings", tok_embeddings), part("layers", layers), part("norm", norm),
                 part("output", output)});
}

// Only layers use the rotary table.
void Llama3Impl::layers_dropped() {
  if (!layers.empty()) return;
  unregister_module("rotary");
  rotary = nullptr;
}

at::Tensor Llama3Impl::forward(const at::Tensor& input, const at::Tensor& labels_BS,
                               const ops::ValidTokens& global_valid_tokens, const ops::Documents& documents) {
  check_entered_through_ref();
  TITAN_CHECK(block_causal_ == static_cast<bool>(documents) || input.is_meta(), "llama3: attn_mask_type = \"",
              args_.attn_mask_type, "\" was called ", documents ? "with" : "without",
              " the batch's documents");
  TITAN_CHECK(output || !labels_BS.defined(),
              "llama3: only the last pipeline stage has `output` and computes the loss");
  at::Tensor h_BSD = tok_embeddings ? tok_embeddings(input) : input;
  for (const TransformerBlock& layer : layers) h_BSD = layer(h_BSD, at::Tensor(), documents);
  if (norm) h_BSD = norm(h_BSD);
  if (!output) return h_BSD;
  return labels_BS.defined() ? output(h_BSD, labels_BS, global_valid_tokens) : output(h_BSD);
}

// ---- the model as the trainer sees it

namespace {

class TrainableLlama3 final : public train::TrainableModel {
 public:
  explicit TrainableLlama3(Llama3 model) : model_(std::move(model)) {}
  nn::AnyRef root() override { return model_; }
  at::Tensor hidden(const at::Tensor& input) override {
    TITAN_CHECK(!model_->output, "llama3: a stage with `output` returns a loss, not hidden states");
    return model_(input, at::Tensor(), int64_t{0}, std::exchange(documents_, {}));
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& labels_BS,
                  const ops::ValidTokens& global_valid_tokens) override {
    return model_(input, labels_BS, global_valid_tokens, std::exchange(documents_, {}));
  }
  void set_documents(const ops::Documents& documents) override { documents_ = documents; }
  const Llama3& model() const { return model_; }

 private:
  Llama3 model_;
  ops::Documents documents_;  // for the next call
};

train::ModelSizes sizes_of(const Llama3Args& args) {
  return {.num_layers = args.n_layers,
          .num_heads = args.n_heads,
          .num_kv_heads = args.num_kv_heads(),
          .vocab_size = args.vocab_size,
          .num_params = num_params(args),
          .block_causal = args.block_causal(),
          .eos_id = args.eos_id};
}

std::unique_ptr<train::TrainableModel> build(Llama3Args args, const train::BuildOptions& options) {
  if (options.seq_len > 0) args.max_seq_len = options.seq_len;
  return std::make_unique<TrainableLlama3>(Llama3(args, options.construct));
}

}  // namespace

void register_llama3() {
  train::register_model<Llama3Args>(
      "llama3", {.flavors = llama3_flavors(),
                 .sizes = sizes_of,
                 .flops_per_token = flops_per_token,
                 .check = check,
                 .build = build,
                 .parallelize =
                     [](train::TrainableModel& model, const train::ParallelPlan& plan) {
                       parallelize_llama3(dynamic_cast<TrainableLlama3&>(model).model(), plan);
                     },
                 .hugging_face = {.model = hugging_face_model, .args = args_of_hugging_face}});
}

}  // namespace titan::models
