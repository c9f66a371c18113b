#pragma once

#include <cstdint>

#include "titan/models/llama3.h"

namespace titan::models {

/// All sizes differ from each other.
inline Llama3Args small_llama(bool tied, int64_t num_layers) {
  return {.dim = 32,
          .n_layers = num_layers,
          .n_heads = 4,
          .n_kv_heads = 2,
          .vocab_size = 50,
          .multiple_of = 8,
          .max_seq_len = 16,
          .tie_embeddings = tied};
}

}  // namespace titan::models
