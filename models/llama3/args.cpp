#include <cmath>

#include "titan/core/error.h"
#include "titan/models/llama3.h"

namespace titan::models {

void describe(config::Table<RopeScalingArgs>& table) {
  using Args = RopeScalingArgs;
  table.field("enabled", &Args::enabled, "stretch slow rotations as Llama 3.1 does");
  table.field("scaling_factor", &Args::scaling_factor, "how much the slowest rotations are stretched",
              config::above(0));
  table.field("low_freq_factor", &Args::low_freq_factor,
              "wavelengths above original length / this are stretched fully", config::above(0));
  table.field("high_freq_factor", &Args::high_freq_factor,
              "wavelengths below original length / this aren't stretched", config::above(0));
  table.field("original_max_position_embeddings", &Args::original_max_position_embeddings,
              "sequence length before stretching", config::at_least(1));
}

void describe(config::Table<Llama3Args>& table) {
  using Args = Llama3Args;
  table.field("dim", &Args::dim, "model size", config::at_least(1));
  table.field("n_layers", &Args::n_layers, "transformer blocks", config::at_least(1));
  table.field("n_heads", &Args::n_heads, "attention heads", config::at_least(1));
  table.field("n_kv_heads", &Args::n_kv_heads, "key and value heads; unset: n_heads", config::at_least(1));
  table.field("vocab_size", &Args::vocab_size, "rows of the embedding", config::at_least(1));
  table.field("multiple_of", &Args::multiple_of,
              "the feed-forward's hidden size is rounded up to a multiple of this", config::at_least(1));
  table.field("ffn_dim_multiplier", &Args::ffn_dim_multiplier,
              "factor on the feed-forward's hidden size, before rounding", config::above(0));
  table.field("norm_eps", &Args::norm_eps, "added to the mean square in RMS norms", config::at_least(0));
  table.field("rope_theta", &Args::rope_theta, "base of the rotary frequencies", config::above(0));
  table.table("rope_scaling", &Args::rope_scaling);
  table.field("max_seq_len", &Args::max_seq_len, "longest sequence; training.seq_len overrides it",
              config::at_least(1));
  table.field("depth_init", &Args::depth_init,
              "output weights start smaller in deeper layers, not by the number of layers");
  table.field("tie_embeddings", &Args::tie_embeddings, "one matrix for embedding and output");
  table.field("attn_mask_type", &Args::attn_mask_type,
              "the keys that a token sees: those before it in its row, or (\"block_causal\") in its document",
              config::one_of({"causal", "block_causal"}));
  table.field(
      "eos_id", &Args::eos_id,
      "with block_causal, the token that ends a document; unset: the tokenizer's end-of-sequence token",
      config::at_least(0));
}

namespace {

Llama3Args published(int64_t dim, int64_t n_layers, int64_t n_heads, int64_t multiple_of,
                     double ffn_dim_multiplier) {
  return {.dim = dim,
          .n_layers = n_layers,
          .n_heads = n_heads,
          .n_kv_heads = 8,
          .multiple_of = multiple_of,
          .ffn_dim_multiplier = ffn_dim_multiplier,
          .rope_theta = 500000};
}

// Llama 3.2's small models, which have longer rotations and one matrix at both ends.
Llama3Args tied(Llama3Args args) {
  args.rope_scaling.scaling_factor = 32;
  args.tie_embeddings = true;
  return args;
}

int64_t params_of_block(const Llama3Args& args) {
  const int64_t kv_dim = args.num_kv_heads() * args.head_dim();
  const int64_t attention = 2 * args.dim * args.dim + 2 * args.dim * kv_dim;
  const int64_t feed_forward = 3 * args.dim * args.ffn_hidden_dim();
  const int64_t norms = 2 * args.dim;
  return attention + feed_forward + norms;
}

}  // namespace

const std::map<std::string, Llama3Args>& llama3_flavors() {
  static const std::map<std::string, Llama3Args> flavors = {
      {"debugmodel", {.dim = 256, .n_layers = 6, .n_heads = 16, .vocab_size = 2048, .rope_theta = 500000}},
      // dim, layers, heads, multiple_of and ffn_dim_multiplier
      {"1B", tied(published(2048, 16, 32, 1024, 1.5))},
      {"3B", tied(published(3072, 28, 24, 1024, 1.0))},
      {"8B", published(4096, 32, 32, 1024, 1.3)},
      {"70B", published(8192, 80, 64, 4096, 1.3)},
      {"405B", published(16384, 126, 128, 4096, 1.2)},
  };
  return flavors;
}

void check(const Llama3Args& args, std::vector<std::string>& problems) {
  const auto expect = [&problems](bool holds, const auto&... message) {
    if (!holds) problems.push_back(str(message...));
  };
  expect(args.dim % args.n_heads == 0, "model.args: dim ", args.dim, " isn't divisible by n_heads ",
         args.n_heads);
  expect(args.head_dim() % 2 == 0, "model.args: heads of an odd size ", args.head_dim(),
         " can't be rotated; dim / n_heads must be even");
  expect(args.n_heads % args.num_kv_heads() == 0, "model.args: n_heads ", args.n_heads,
         " isn't a multiple of n_kv_heads ", args.num_kv_heads());
  expect(!args.eos_id || args.block_causal(),
         "model.args: eos_id is read only with attn_mask_type = \"block_causal\"");
  expect(args.eos_id.value_or(0) < args.vocab_size, "model.args: eos_id ", args.eos_id.value_or(0),
         " isn't one of the vocab_size = ", args.vocab_size, " tokens");
  expect(!args.rope_scaling.enabled || args.rope_scaling.low_freq_factor < args.rope_scaling.high_freq_factor,
         "model.args.rope_scaling: low_freq_factor must be below high_freq_factor");
}

// Truncates twice, as Meta's code does, because the published shapes depend on it.
int64_t Llama3Args::ffn_hidden_dim() const {
  int64_t hidden = static_cast<int64_t>(2.0 * static_cast<double>(4 * dim) / 3.0);
  if (ffn_dim_multiplier) hidden = static_cast<int64_t>(*ffn_dim_multiplier * static_cast<double>(hidden));
  return (hidden + multiple_of - 1) / multiple_of * multiple_of;
}

int64_t num_params(const Llama3Args& args) {
  const int64_t vocabulary_matrices = args.tie_embeddings ? 1 : 2;
  return vocabulary_matrices * args.vocab_size * args.dim + args.n_layers * params_of_block(args) + args.dim;
}

double flops_per_token(const Llama3Args& args, int64_t seq_len) {
  const int64_t looked_up = args.tie_embeddings ? 0 : args.vocab_size * args.dim;
  const int64_t attention = args.n_layers * args.n_heads * 2 * args.head_dim() * seq_len;
  return 6.0 * static_cast<double>(num_params(args) - looked_up) + 6.0 * static_cast<double>(attention);
}

}  // namespace titan::models
