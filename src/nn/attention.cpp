#include "titan/nn/attention.h"

#include "titan/core/error.h"
#include "titan/ops/attention.h"

// Shapes: B batch, S sequence, D model, H query heads, K key/value heads, E size of a head.

namespace titan::nn {

AttentionImpl::AttentionImpl(const AttentionOptions& options, RotaryEmbedding rotary)
    : wq(nullptr),
      wk(nullptr),
      wv(nullptr),
      wo(nullptr),
      head_dim_(options.dim / options.num_heads),
      rotary_(std::move(rotary)) {
  TITAN_CHECK(options.dim % options.num_heads == 0 && options.num_heads % options.num_kv_heads == 0,
              "attention: ", options.num_heads, " heads have to divide the model's size ", options.dim,
              " and be a multiple of the ", options.num_kv_heads, " key/value heads");
  const int64_t kv_dim = options.num_kv_heads * head_dim_;
  const LinearOptions input{.init = options.input_init, .construct = options.construct};
  const LinearOptions output{.init = options.output_init, .construct = options.construct};
  wq = register_module("wq", Linear(options.dim, options.dim, input));
  wk = register_module("wk", Linear(options.dim, kv_dim, input));
  wv = register_module("wv", Linear(options.dim, kv_dim, input));
  wo = register_module("wo", Linear(options.dim, options.dim, output));
}

at::Tensor AttentionImpl::forward(const at::Tensor& x_BSD, const at::Tensor& positions) {
  check_entered_through_ref();
  const auto split_heads = [this](const at::Tensor& x) { return x.unflatten(-1, {-1, head_dim_}); };
  const std::vector<at::Tensor> products = linears(x_BSD, {&wq, &wk, &wv});
  const at::Tensor q_BSHE = rotary_(split_heads(products[0]), positions);
  const at::Tensor k_BSKE = rotary_(split_heads(products[1]), positions);
  const at::Tensor v_BSKE = split_heads(products[2]);
  const at::Tensor out_BSHE =
      core_ ? core_->attend(q_BSHE, k_BSKE, v_BSKE) : ops::causal_attention(q_BSHE, k_BSKE, v_BSKE);
  return wo(out_BSHE.flatten(2));
}

}  // namespace titan::nn
