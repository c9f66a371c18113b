#include "titan/ops/loss.h"

#include <algorithm>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "ops/autograd_node.h"
#include "ops/operators.h"
#include "ops/reference_kernels.h"
#include "titan/tensor/placement.h"

namespace titan::ops {

namespace {

constexpr const char* kPhase = "tp::vocabulary";

struct LinearCrossEntropyBackward final : BackwardNode {
  enum Input : size_t { Hidden, Weight };
  // Gradients of the sum of token losses; the weight's in memory of the sink or in its own.
  at::Tensor grad_hidden, grad_weight;
  std::vector<at::Tensor> lent_grad_weight;
  at::ScalarType weight_dtype = at::kFloat;
  ValidTokens tokens = 0;
  std::shared_ptr<GradSink> weight_sink;

  variable_list backward(const at::Tensor& grad) override {
    TITAN_CHECK(grad_hidden.defined() || grad_weight.defined() || !lent_grad_weight.empty(),
                "linear_cross_entropy: second backward through the same loss");
    const at::Tensor factor = grad / tokens;  // stays on the device: reading it would make the host wait
    variable_list grads(2);
    if (task_should_compute_output(Hidden)) grads[Hidden] = scaled(take(grad_hidden), factor);
    if (!task_should_compute_output(Weight)) return grads;
    if (!lent_grad_weight.empty()) {
      weight_sink->accept_lent(std::exchange(lent_grad_weight, {}), factor);
    } else if (weight_sink) {
      weight_sink->accept(take(grad_weight), factor);
    } else {
      grads[Weight] = scaled(take(grad_weight), factor).to(weight_dtype);
    }
    return grads;
  }
  // GPUs would round a scalar tensor to the other operand's 16 bits, but a vector makes them compute in its dtype. CPUs
  // use a scalar's exact value, and would make a wide copy for a vector.
  static at::Tensor scaled(at::Tensor tensor, const at::Tensor& factor) {
    return tensor.mul_(tensor.is_cpu() ? factor : factor.view({1}));
  }
  // Scaling in place saves a large buffer, but allows only one backward.
  static at::Tensor take(at::Tensor& tensor) { return std::exchange(tensor, at::Tensor()); }
  void release_variables() override {
    grad_hidden.reset();
    grad_weight.reset();
    lent_grad_weight.clear();
  }
  std::string name() const override { return "titan::linear_cross_entropy backward"; }
};

// Over the first dimension; LibTorch's logsumexp has no meta kernel. At least one part has tokens, so the
// maximum is finite.
at::Tensor log_sum_exp(const at::Tensor& x) {
  const at::Tensor largest = x.amax(0);
  return (x - largest).exp().sum(0).log() + largest;
}

// Runs the chunks; gradients are those of the sum of token losses.
struct ChunkLoop {
  const LossOptions& options;
  at::Tensor hidden_ND, weight_VD, labels_N;
  at::Tensor grad_hidden_ND;  // undefined if it isn't needed
  std::vector<at::Tensor>
      grad_weight;      // [V, D] in blocks of rows, written by run(); empty if it isn't needed
  at::Tensor loss_sum;  // double

  const VocabularyPart& part() const { return options.part; }
  bool with_grad() const { return grad_hidden_ND.defined() || !grad_weight.empty(); }
  int64_t padded_rows() const { return padded_chunk_length(part().size, part().parts->count()); }

  // On a GPU, every chunk reads and writes the weight's gradient, so that small ones would move mostly that. Where no
  // kernel takes the logits, chunks stay small, because LibTorch's operations make several wide copies of one.
  int64_t fewest_rows(int64_t row_bytes) const {
    const bool has_kernel = !ReferenceKernels::in_use() && row_bytes % 16 == 0 &&
                            hidden_ND.scalar_type() != at::kDouble && hidden_ND.scalar_type() != at::kHalf &&
                            !(part().parts && part().gather_logits);
    return hidden_ND.is_cuda() && has_kernel ? 4096 : 1;
  }

  // All ranks of a split vocabulary cut the same chunks.
  void run() {
    const int64_t columns = !part().parts          ? weight_VD.size(0)
                            : part().gather_logits ? part().size
                                                   : padded_rows();
    const int64_t row_bytes = columns * static_cast<int64_t>(hidden_ND.element_size());
    const int64_t rows =
        std::max(fewest_rows(row_bytes), options.chunk_bytes / std::max<int64_t>(row_bytes, 1));
    const int64_t count = hidden_ND.size(0);
    loss_sum = at::zeros({}, hidden_ND.options().dtype(at::kDouble));
    if (count == 0)
      for (const at::Tensor& block : grad_weight) block.zero_();
    for (int64_t first = 0; first < count; first += rows) run_chunk(first, std::min(rows, count - first));
  }

  void run_chunk(int64_t first, int64_t rows) {
    const Products& products = *options.products;
    const at::Tensor hidden = hidden_ND.narrow(0, first, rows), labels = labels_N.narrow(0, first, rows);
    at::Tensor logits = products.forward(hidden, weight_VD);
    loss_sum.add_(part().parts && part().gather_logits ? loss_of_gathered_(logits, labels)
                  : part().parts                       ? loss_of_parts_(logits, labels)
                                                       : loss_of_whole_(logits, labels));
    if (grad_hidden_ND.defined())
      grad_hidden_ND.narrow(0, first, rows).copy_(products.grad_input(logits, weight_VD));
    int64_t row = 0;
    for (const at::Tensor& block : grad_weight) {
      const at::Tensor grad = logits.narrow(1, row, block.size(0));
      const bool is_written = first == 0 && products.put_grad_weight(block, grad, hidden, /*adds=*/false);
      if (first == 0 && !is_written) block.zero_();
      if (!is_written) products.add_grad_weight(block, grad, hidden);
      row += block.size(0);
    }
  }

  // The following functions return the sum of the chunk's losses and replace the logits by their gradient.

  at::Tensor loss_of_whole_(at::Tensor& logits, const at::Tensor& labels) const {
    static const auto fused = find_operator<decltype(composite::cross_entropy_)>("titan::cross_entropy_");
    if (!options.loss) return fused.call(logits, labels, with_grad());
    return loss_of_statistics_(logits, labels, 0, own_statistics(logits, labels, 0).unsqueeze(0));
  }

  at::Tensor loss_of_parts_(at::Tensor& logits, const at::Tensor& labels) const {
    const at::Tensor mine = own_statistics(logits, labels, part().first);
    const at::Tensor all = at::empty({part().parts->count(), mine.numel()}, mine.options());
    part().parts->all_gather(all, mine.view(-1), kPhase);
    return loss_of_statistics_(logits, labels, part().first, all.view({-1, mine.size(0), mine.size(1)}));
  }

  at::Tensor loss_of_gathered_(at::Tensor& logits, const at::Tensor& labels) const {
    at::Tensor whole = gathered(logits);
    const at::Tensor loss = loss_of_whole_(whole, labels);
    if (with_grad()) logits.copy_(whole.narrow(1, part().first, logits.size(1)));
    return loss;
  }

  // Gathers [N, rows of this part] to [N, vocabulary]. The last parts may be shorter, so they are padded for
  // the gather.
  at::Tensor gathered(const at::Tensor& logits) const {
    const int64_t width = padded_rows(), tokens = logits.size(0);
    const at::Tensor mine = at::constant_pad_nd(logits, {0, width - logits.size(1)}).contiguous();
    const at::Tensor all = at::empty({part().parts->count(), tokens, width}, logits.options());
    part().parts->all_gather(all.flatten(1), mine.flatten(), kPhase);
    return all.transpose(0, 1).reshape({tokens, -1}).narrow(1, 0, part().size).contiguous();
  }

  // [2, N], or [3, N] with the sum of the logits if the loss needs their mean.
  at::Tensor own_statistics(const at::Tensor& logits, const at::Tensor& labels, int64_t first) const {
    static const auto op = find_operator<decltype(composite::vocabulary_stats)>("titan::vocabulary_stats");
    const at::Tensor statistics = op.call(logits, labels, first);
    if (!options.loss || !options.loss->needs_mean()) return statistics;
    // On a GPU, a sum of 16-bit numbers in double would first copy them in double.
    const bool is_wide = logits.is_cpu() || logits.scalar_type() == at::kDouble;
    const at::Tensor sum = logits.sum({1}, /*keepdim=*/false, is_wide ? at::kDouble : at::kFloat);
    return at::cat({statistics, sum.to(statistics.scalar_type()).unsqueeze(0)});
  }

  // parts: [parts, 2 or 3, N].
  at::Tensor loss_of_statistics_(at::Tensor& logits, const at::Tensor& labels, int64_t first,
                                 const at::Tensor& parts) const {
    static const auto grad_ = find_operator<decltype(composite::vocabulary_grad_)>("titan::vocabulary_grad_");
    const at::Tensor ignored = labels.eq(kIgnoredLabel);
    TokenStatistics tokens{log_sum_exp(parts.select(1, 0)), parts.select(1, 1).sum(0), {}};
    if (!options.loss) {
      if (with_grad()) grad_.call(logits, labels, first, tokens.log_sum_exp, std::nullopt);
      return (tokens.log_sum_exp - tokens.target).masked_fill_(ignored, 0).sum();
    }
    const auto vocabulary = static_cast<double>(part().parts ? part().size : logits.size(1));
    if (parts.size(1) == 3) tokens.mean = parts.select(1, 2).sum(0) / vocabulary;
    const TokenLosses losses = options.loss->evaluate(tokens);
    if (with_grad()) {
      const auto or_zeros = [&](const at::Tensor& x) {
        return x.defined() ? x : at::zeros_like(losses.loss);
      };
      const at::Tensor factors = at::stack({or_zeros(losses.by_log_sum_exp), or_zeros(losses.by_target),
                                            or_zeros(losses.by_mean) / vocabulary});
      grad_.call(logits, labels, first, tokens.log_sum_exp, factors);
    }
    return losses.loss.masked_fill(ignored, 0).sum();
  }
};

// The fused kernel checks labels itself. The others can't, because each rank has only a part of the
// vocabulary.
void check_labels(const at::Tensor& labels, int64_t vocab_size, const LossOptions& options) {
  if ((!options.part.parts && !options.loss) || labels.is_meta() || labels.numel() == 0) return;
  const at::Tensor wrong = (labels.lt(0) | labels.ge(vocab_size)) & labels.ne(kIgnoredLabel);
  if (!labels.is_cpu()) return at::_assert_async(wrong.any().logical_not());  // the host doesn't wait
  TITAN_CHECK(!wrong.any().item<bool>(), "label ", labels.masked_select(wrong)[0].item<int64_t>(),
              " isn't in a vocabulary of ", vocab_size, "; ", kIgnoredLabel, " marks ignored tokens");
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
  TITAN_CHECK(options.products, "linear_cross_entropy: products are missing");
  check_labels(labels, options.part.parts ? options.part.size : weight.size(0), options);
}

}  // namespace

ValidTokens::ValidTokens(int64_t count) : count_(count) {
  TITAN_CHECK(count >= 0, "a step can't have ", count, " valid tokens");
}

ValidTokens ValidTokens::on_device(at::Tensor inverse) {
  TITAN_CHECK(inverse.dim() == 0 && inverse.scalar_type() == at::kDouble,
              "one over the number of valid tokens has to be a float64 scalar, and is ",
              inverse.scalar_type(), " ", inverse.sizes());
  ValidTokens tokens = 0;
  tokens.inverse_ = std::move(inverse);
  return tokens;
}

std::optional<int64_t> ValidTokens::on_host() const {
  return inverse_.defined() ? std::nullopt : std::optional(count_);
}

// Both ways multiply in at least fp32, so they have the same bits.
at::Tensor operator/(const at::Tensor& sum, const ValidTokens& number) {
  if (!number.inverse_.defined())
    return sum * (number.count_ > 0 ? 1.0 / static_cast<double>(number.count_) : 0.0);
  const at::ScalarType wide = composite::accumulate_type(sum);
  return (sum.to(wide) * number.inverse_.to(wide)).to(sum.scalar_type());
}

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight_VD,
                                const at::Tensor& labels, const LossOptions& options) {
  check_arguments(hidden, weight_VD, labels, options);
  const bool recorded = compute_requires_grad(hidden, weight_VD);
  const at::ScalarType wide = composite::accumulate_type(hidden);
  ChunkLoop loop{options, {}, weight_VD, {}, {}, {}, {}};
  at::Tensor loss;
  bool lent = false;
  {
    BelowAutograd guard;
    loop.hidden_ND = as_rows(hidden);
    loop.labels_N = labels.reshape({-1});
    if (recorded && hidden.requires_grad())
      loop.grad_hidden_ND = at::empty(loop.hidden_ND.sizes(), hidden.options());
    if (recorded && weight_VD.requires_grad()) {
      if (options.weight_sink) loop.grad_weight = options.weight_sink->lend(wide);
      lent = !loop.grad_weight.empty();
      if (!lent) loop.grad_weight = {at::empty(weight_VD.sizes(), weight_VD.options().dtype(wide))};
    }
    loop.run();
    loss = (loop.loss_sum / options.global_valid_tokens).to(wide);
  }
  if (!recorded) return loss;
  const auto node = record<LinearCrossEntropyBackward>(loss, hidden, weight_VD);
  if (loop.grad_hidden_ND.defined()) node->grad_hidden = loop.grad_hidden_ND.view(hidden.sizes());
  if (lent) {
    node->lent_grad_weight = std::move(loop.grad_weight);
  } else if (!loop.grad_weight.empty()) {
    node->grad_weight = std::move(loop.grad_weight[0]);
  }
  node->weight_dtype = weight_VD.scalar_type();
  node->tokens = options.global_valid_tokens;
  node->weight_sink = options.weight_sink;
  return loss;
}

}  // namespace titan::ops
