// The cross-entropy of a chunk of tokens whose logits are spread over ranks by vocabulary.

#include "titan/ops/loss.h"

#include <algorithm>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "ops/autograd_node.h"
#include "ops/operators.h"
#include "titan/core/error.h"
#include "titan/ops/products.h"
#include "titan/tensor/placement.h"

namespace titan::ops {

/// Sum of the token losses (double, the same on all ranks). logits: [N, rows of this part]; with_grad turns
/// them into their gradient. labels: int64 [N] in the whole vocabulary, or kIgnoredLabel.
at::Tensor vocabulary_cross_entropy_(at::Tensor& logits, const at::Tensor& labels, const VocabularyPart& part,
                                     bool with_grad);

namespace {

int64_t padded_part(const VocabularyPart& part) {
  return (part.size + part.parts->count() - 1) / part.parts->count();
}

// [N, rows of this part] to [N, vocabulary]; the last parts may be shorter, so they travel padded.
at::Tensor whole_logits(const at::Tensor& logits, const VocabularyPart& part) {
  const int64_t width = padded_part(part), tokens = logits.size(0);
  const at::Tensor mine = at::constant_pad_nd(logits, {0, width - logits.size(1)}).contiguous();
  const at::Tensor all = at::empty({part.parts->count(), tokens, width}, logits.options());
  part.parts->all_gather(all.flatten(1), mine.flatten(), "tp::vocabulary");
  return all.transpose(0, 1).reshape({tokens, -1}).narrow(1, 0, part.size).contiguous();
}

at::Tensor from_whole_logits(at::Tensor& logits, const at::Tensor& labels, const VocabularyPart& part,
                             bool with_grad) {
  using Signature = at::Tensor(at::Tensor&, const at::Tensor&, bool);
  static const auto cross_entropy = find_operator<Signature>("titan::cross_entropy_");
  at::Tensor whole = whole_logits(logits, part);
  const at::Tensor loss = cross_entropy.call(whole, labels, with_grad);
  if (with_grad) logits.copy_(whole.narrow(1, part.first, logits.size(1)));
  return loss;
}

// Over the first dimension; LibTorch's own doesn't know meta tensors. Some part has a token, so there is a
// largest number.
at::Tensor log_sum_exp(const at::Tensor& x) {
  const at::Tensor largest = x.amax(0);
  return (x - largest).exp().sum(0).log() + largest;
}

at::Tensor from_parts(at::Tensor& logits, const at::Tensor& labels, const VocabularyPart& part,
                      bool with_grad) {
  using Stats = at::Tensor(const at::Tensor&, const at::Tensor&, int64_t);
  using Grad = void(at::Tensor&, const at::Tensor&, int64_t, const at::Tensor&);
  static const auto stats_op = find_operator<Stats>("titan::vocabulary_stats");
  static const auto grad_op = find_operator<Grad>("titan::vocabulary_grad_");
  const at::Tensor mine = stats_op.call(logits, labels, part.first);
  const at::Tensor all = at::empty({part.parts->count(), mine.numel()}, mine.options());
  part.parts->all_gather(all, mine.view(-1), "tp::vocabulary");
  const at::Tensor stats = all.view({part.parts->count(), 2, -1});
  const at::Tensor log_sum = log_sum_exp(stats.select(1, 0)), target = stats.select(1, 1).sum(0);
  if (with_grad) grad_op.call(logits, labels, part.first, log_sum);
  return (log_sum - target).masked_fill_(labels.eq(kIgnoredLabel), 0).sum();
}

}  // namespace

at::Tensor vocabulary_cross_entropy_(at::Tensor& logits, const at::Tensor& labels, const VocabularyPart& part,
                                     bool with_grad) {
  TITAN_INTERNAL_ASSERT(part.parts, "a vocabulary that isn't spread");
  return part.gather_logits ? from_whole_logits(logits, labels, part, with_grad)
                            : from_parts(logits, labels, part, with_grad);
}

namespace {

struct LinearCrossEntropyBackward final : BackwardNode {
  enum Input : size_t { Hidden, Weight };
  at::Tensor grad_hidden, grad_weight;  // of the sum of token losses
  at::ScalarType weight_dtype = at::kFloat;
  double scale = 0;  // one over the number of tokens
  std::shared_ptr<GradSink> weight_sink;

  variable_list backward(const at::Tensor& grad) override {
    TITAN_CHECK(grad_hidden.defined() || grad_weight.defined(),
                "linear_cross_entropy: a second backward through the same loss");
    const at::Tensor factor = grad * scale;  // not read by the host, which would wait for the device
    variable_list grads(2);
    if (task_should_compute_output(Hidden)) grads[Hidden] = scaled(take(grad_hidden), factor);
    if (!task_should_compute_output(Weight)) return grads;
    if (weight_sink) {
      weight_sink->accept(take(grad_weight), factor);
    } else {
      grads[Weight] = scaled(take(grad_weight), factor).to(weight_dtype);
    }
    return grads;
  }
  // A device would round a scalar tensor to the other operand's 16 bits; a CPU takes its value as it is.
  static at::Tensor scaled(at::Tensor tensor, const at::Tensor& factor) {
    if (tensor.element_size() > 2 || tensor.is_cpu()) return tensor.mul_(factor);
    return tensor.to(factor.scalar_type()).mul_(factor).to(tensor.scalar_type());
  }
  // Scaled in place and handed on: a large buffer less. So the graph can be walked once.
  static at::Tensor take(at::Tensor& tensor) { return std::exchange(tensor, at::Tensor()); }
  void release_variables() override {
    grad_hidden.reset();
    grad_weight.reset();
  }
  std::string name() const override { return "titan::linear_cross_entropy backward"; }
};

// Runs the chunks; gradients are of the sum.
struct ChunkLoop {
  const Products& products;
  const VocabularyPart& part;
  at::Tensor hidden_ND, weight_VD, labels_N;
  at::Tensor grad_hidden_ND, grad_weight_VD;  // undefined where they aren't wanted
  at::Tensor loss_sum;                        // double

  bool with_grad() const { return grad_hidden_ND.defined() || grad_weight_VD.defined(); }

  // All ranks of a spread vocabulary cut the same chunks.
  void run(int64_t chunk_bytes) {
    const int64_t columns = !part.parts          ? weight_VD.size(0)
                            : part.gather_logits ? part.size
                                                 : padded_chunk_length(part.size, part.parts->count());
    const int64_t row_bytes = columns * static_cast<int64_t>(hidden_ND.element_size());
    const int64_t rows = std::max<int64_t>(1, chunk_bytes / std::max<int64_t>(row_bytes, 1));
    const int64_t count = hidden_ND.size(0);
    loss_sum = at::zeros({}, hidden_ND.options().dtype(at::kDouble));
    for (int64_t first = 0; first < count; first += rows) run_chunk(first, std::min(rows, count - first));
  }

  void run_chunk(int64_t first, int64_t rows) {
    const at::Tensor hidden = hidden_ND.narrow(0, first, rows);
    at::Tensor logits = products.forward(hidden, weight_VD);
    loss_sum.add_(cross_entropy_(logits, labels_N.narrow(0, first, rows)));
    if (grad_hidden_ND.defined())
      grad_hidden_ND.narrow(0, first, rows).copy_(products.grad_input(logits, weight_VD));
    if (grad_weight_VD.defined()) products.add_grad_weight(grad_weight_VD, logits, hidden);
  }

  at::Tensor cross_entropy_(at::Tensor& logits, const at::Tensor& labels) const {
    using Signature = at::Tensor(at::Tensor&, const at::Tensor&, bool);
    static const auto whole = find_operator<Signature>("titan::cross_entropy_");
    return part.parts ? vocabulary_cross_entropy_(logits, labels, part, with_grad())
                      : whole.call(logits, labels, with_grad());
  }
};

// Each rank sees its own part of the labels' vocabulary, so the kernels can't tell.
void check_labels(const at::Tensor& labels, const VocabularyPart& part) {
  if (!part.parts || labels.is_meta() || labels.numel() == 0) return;
  const at::Tensor wrong = (labels.lt(0) | labels.ge(part.size)) & labels.ne(kIgnoredLabel);
  if (!labels.is_cpu())
    return at::_assert_async(wrong.any().logical_not());  // without waiting for the device
  TITAN_CHECK(!wrong.any().item<bool>(), "label ", labels.masked_select(wrong)[0].item<int64_t>(),
              " isn't in a vocabulary of ", part.size, "; ", kIgnoredLabel, " marks tokens that don't count");
}

void check_arguments(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                     const LossOptions& options) {
  TITAN_CHECK(weight.dim() == 2 && hidden.dim() >= 1 && hidden.size(-1) == weight.size(1),
              "linear_cross_entropy: hidden states ", hidden.sizes(), " don't fit weight ", weight.sizes());
  TITAN_CHECK(hidden.scalar_type() == weight.scalar_type(), "linear_cross_entropy: the hidden states are ",
              hidden.scalar_type(), ", the weight ", weight.scalar_type());
  TITAN_CHECK(labels.scalar_type() == at::kLong &&
                  labels.sizes() == hidden.sizes().slice(0, static_cast<size_t>(hidden.dim()) - 1),
              "linear_cross_entropy: expected an int64 label for each token, got ", labels.scalar_type(), " ",
              labels.sizes(), " for ", hidden.sizes());
  TITAN_CHECK(options.global_valid_tokens >= 0 && options.products,
              "linear_cross_entropy: ", options.global_valid_tokens, " valid tokens; products are ",
              options.products ? "set" : "missing");
  check_labels(labels, options.part);
}

}  // namespace

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight_VD,
                                const at::Tensor& labels, const LossOptions& options) {
  check_arguments(hidden, weight_VD, labels, options);
  const bool recorded = compute_requires_grad(hidden, weight_VD);
  const double scale =
      options.global_valid_tokens > 0 ? 1.0 / static_cast<double>(options.global_valid_tokens) : 0.0;
  const at::ScalarType wide = composite::accumulate_type(hidden);
  ChunkLoop loop{*options.products, options.part, {}, weight_VD, {}, {}, {}, {}};
  at::Tensor loss;
  {
    BelowAutograd guard;
    loop.hidden_ND = hidden.reshape({-1, hidden.size(-1)});
    loop.labels_N = labels.reshape({-1});
    if (recorded && hidden.requires_grad())
      loop.grad_hidden_ND = at::empty(loop.hidden_ND.sizes(), hidden.options());
    if (recorded && weight_VD.requires_grad())
      loop.grad_weight_VD = at::zeros(weight_VD.sizes(), weight_VD.options().dtype(wide));
    loop.run(options.chunk_bytes);
    loss = loop.loss_sum.mul(scale).to(wide);
  }
  if (!recorded) return loss;
  const auto node = record<LinearCrossEntropyBackward>(loss, hidden, weight_VD);
  if (loop.grad_hidden_ND.defined()) node->grad_hidden = loop.grad_hidden_ND.view(hidden.sizes());
  node->grad_weight = std::move(loop.grad_weight_VD);
  node->weight_dtype = weight_VD.scalar_type();
  node->scale = scale;
  node->weight_sink = options.weight_sink;
  return loss;
}

}  // namespace titan::ops
