#include <cmath>

#include "titan/models/llama3_args.h"

namespace titan::models {

// Both truncations as in Meta's code: the published shapes depend on them.
int64_t Llama3Args::ffn_hidden_dim() const {
  int64_t hidden = static_cast<int64_t>(2.0 * static_cast<double>(4 * dim) / 3.0);
  if (ffn_dim_multiplier) hidden = static_cast<int64_t>(*ffn_dim_multiplier * static_cast<double>(hidden));
  return (hidden + multiple_of - 1) / multiple_of * multiple_of;
}

namespace {

int64_t params_of_block(const Llama3Args& args) {
  const int64_t kv_dim = args.num_kv_heads() * args.head_dim();
  const int64_t attention = 2 * args.dim * args.dim + 2 * args.dim * kv_dim;
  const int64_t feed_forward = 3 * args.dim * args.ffn_hidden_dim();
  const int64_t norms = 2 * args.dim;
  return attention + feed_forward + norms;
}

}  // namespace

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
