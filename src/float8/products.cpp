#include "float8/products.h"

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/core/StorageImpl.h>

#include "float8/cast.h"
#include "titan/core/error.h"

namespace titan::float8 {

// ---- one product of two matrices in 8 bits

// Within a tile, vector v is at 16 (v mod 32) + 4 (v / 32): four groups of 32 side by side.
at::Tensor blocked_layout(const at::Tensor& scale) {
  const auto missing_to = [](int64_t size, int64_t multiple) {
    return (multiple - size % multiple) % multiple;
  };
  at::Tensor bytes = scale.contiguous().view(at::kByte);
  bytes = at::constant_pad_nd(bytes, {0, missing_to(scale.size(1), 4), 0, missing_to(scale.size(0), 128)});
  const int64_t rows = bytes.size(0) / 128, columns = bytes.size(1) / 4;
  return bytes.view({rows, 4, 32, columns, 4})
      .permute({0, 3, 2, 1, 4})
      .contiguous()
      .view({-1})
      .view(at::kFloat8_e8m0fnu);
}

namespace {

constexpr int64_t kAlignment = 16;  // the summed dimension is a multiple of this

bool by_vector(const ops::ScaledMatrix& matrix) { return matrix.scale.numel() > 1; }

// Contiguous rows, padded to a length that the hardware supports by zeros, which add nothing to a sum.
at::Tensor aligned(const at::Tensor& data) {
  const int64_t rest = data.size(1) % kAlignment;
  if (rest == 0) return data.contiguous();
  const at::Tensor bytes = at::constant_pad_nd(data.view(at::kByte), {0, kAlignment - rest});
  return bytes.view(data.scalar_type());
}

// Scales [vectors, 1], from either kind of scale.
at::Tensor per_vector(const ops::ScaledMatrix& matrix) {
  const at::Tensor inverse = matrix.scale.reciprocal();
  return by_vector(matrix) ? inverse : inverse.expand({matrix.data.size(0), 1}).contiguous();
}

}  // namespace

at::Tensor hardware_product(const ops::ScaledMatrix& a_NK, const ops::ScaledMatrix& b_MK,
                            const ScaledProductOptions& options) {
  if (in_blocks(a_NK))
    return at::_scaled_mm(a_NK.data, b_MK.data.t(), blocked_layout(a_NK.scale), blocked_layout(b_MK.scale),
                          /*bias=*/{}, /*scale_result=*/{}, options.out_dtype);
  const at::Tensor a = aligned(a_NK.data), b = aligned(b_MK.data);
  const auto multiply = [&](const at::Tensor& scale_a, const at::Tensor& scale_b, at::ScalarType dtype) {
    return at::_scaled_mm(a, b.t(), scale_a, scale_b, /*bias=*/{}, /*scale_result=*/{}, dtype,
                          options.fast_accumulation);
  };
  if (!by_vector(a_NK) && !by_vector(b_MK))
    return multiply(a_NK.scale.reciprocal().reshape({}), b_MK.scale.reciprocal().reshape({}),
                    options.out_dtype);
  const at::Tensor scale_a = per_vector(a_NK), scale_b = per_vector(b_MK).t();
  // The kernel with a scale per row returns only bf16, and is slow without fast accumulation. The kernel for
  // whole matrices returns the sums in fp32, which are scaled afterwards.
  if (options.fast_accumulation && options.out_dtype == at::kBFloat16)
    return multiply(scale_a, scale_b, options.out_dtype);
  // Rounding to bf16 and scaling by a power of two commute (except for denormals), so the sums can be bf16,
  // which takes half the memory.
  const bool rounded_first = options.power_of_two_scales && options.out_dtype == at::kBFloat16;
  const at::Tensor one = at::ones({}, scale_a.options());
  return multiply(one, one, rounded_first ? at::kBFloat16 : at::kFloat)
      .mul_(scale_a)
      .mul_(scale_b)
      .to(options.out_dtype);
}

// Scales before multiplying, as torchao does, so that nothing overflows fp32 unless the result does.
at::Tensor emulated_product(const ops::Products& plain, const ops::ScaledMatrix& a_NK,
                            const ops::ScaledMatrix& b_MK, const ScaledProductOptions& options) {
  const auto values = [](const ops::ScaledMatrix& matrix) {
    return in_blocks(matrix) ? block_values(matrix) : matrix.data.to(at::kFloat).div_(matrix.scale);
  };
  return plain.forward(values(a_NK), values(b_MK)).to(options.out_dtype);
}

namespace {

// ---- scales of weights, which only change with the weights

// The scales of one layer's weight, by its memory and version. All products of a step, its micro-batches and
// recomputes compute a weight's largest magnitude once, with one pass over the weight and, with tensor
// parallelism, one collective. Code that changes a parameter without an operation of LibTorch must raise its
// version, as FSDP does. For another weight, scales are computed again. Thread-safe.
class WeightScales {
 public:
  // The scale of this `kind` for these values, computed by `make` if needed.
  at::Tensor of(const at::Tensor& weight, int64_t kind, const std::function<at::Tensor()>& make) {
    if (weight.is_inference()) return make();  // it has no version
    c10::StorageImpl* memory = weight.storage().unsafeGetStorageImpl();
    const Values values{memory, weight.storage_offset(), static_cast<uint64_t>(weight._version())};
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_[kind];
    if (entry.scale.defined() && entry.values == values) return entry.scale;
    const at::Tensor scale = make();
    entry = {values, Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(memory)), scale};
    return scale;
  }

 private:
  using Storage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Values {
    const c10::StorageImpl* memory = nullptr;
    int64_t offset = 0;
    uint64_t version = 0;
    bool operator==(const Values&) const = default;
  };
  struct Entry {
    Values values;
    std::optional<Storage> keeps_address;  // keeps other storages from getting this address
    at::Tensor scale;
  };

  std::mutex mutex_;
  std::map<int64_t, Entry> entries_;  // by kind; one or two entries
};

// ---- scales of matrices

using ops::Operand;
using ops::Products;
using ops::RankParts;
using ops::ScaledMatrix;

// Which vectors of a matrix a product sums over.
enum class Vectors { Rows, Columns };

// How a matrix is spread over ranks.
struct Spread {
  const RankParts* parts = nullptr;  ///< null: it isn't spread
  Vectors across = Vectors::Rows;    ///< each rank has a part of each of these vectors
};

// The elementwise maximum over all ranks. NaN stays NaN.
at::Tensor over_ranks(const RankParts& parts, const at::Tensor& amax) {
  const at::Tensor all = at::empty({parts.count(), amax.numel()}, amax.options());
  parts.all_gather(all, amax.reshape({-1}), ops::kScalesPhase);
  return all.amax(0).view(amax.sizes());
}

Over scaled_over(Vectors vectors, const Cast& how) {
  if (how.granularity == Granularity::Matrix) return Over::Matrix;
  return vectors == Vectors::Rows ? Over::Row : Over::Column;
}

at::Tensor dynamic_scale(const at::Tensor& matrix, Vectors vectors, const Cast& how, bool power_of_two,
                         const Spread& spread) {
  const Over over = scaled_over(vectors, how);
  at::Tensor largest = amax(matrix, over);
  if (spread.parts && (over == Over::Matrix || spread.across == vectors))
    largest = over_ranks(*spread.parts, largest);
  return scale_of(largest, how.dtype, power_of_two);
}

// A layer's history of a matrix.
struct History {
  const DelayedScale* scale = nullptr;  ///< null: scales are dynamic
  bool ready = false;                   ///< the ranks' histories agree, so no collective is needed
  bool records = false;                 ///< this cast belongs to a training step
};

// [Note: delayed scales]
at::Tensor remembered_scale(const at::Tensor& matrix, const Cast& how, bool power_of_two,
                            const Spread& spread, const History& history) {
  at::Tensor largest = amax(matrix, Over::Matrix);
  if (spread.parts && !history.ready) largest = over_ranks(*spread.parts, largest);
  return delayed_scale(largest, *history.scale, how.dtype, power_of_two, history.records);
}

// If vectors are spread over ranks, each rank's part must be whole blocks.
ScaledMatrix cast_in_blocks(const at::Tensor& matrix, Vectors vectors, const Cast& how,
                            const BlockScaling& blocks, const Spread& spread) {
  const bool columns = vectors == Vectors::Columns;
  const int64_t length = matrix.size(columns ? 0 : 1);
  if (spread.parts && spread.across == vectors && length % kBlock != 0)
    throw ConfigError(titan::str(
        "MXFP8: tensor parallelism over ", spread.parts->count(), " ranks gives a rank ", length,
        " features of a linear layer, which isn't a multiple of the block size ", kBlock,
        "; name the layer in quantize.linear.mx.filter_fqns, or use a smaller tensor_parallel_degree"));
  return cast_blocks(matrix, {.dtype = how.dtype,
                              .rounding = blocks.rounding,
                              .transposed = columns,
                              .composed = columns && blocks.composed_columns});
}

class Float8Products final : public Products {
 public:
  struct Layer {
    std::shared_ptr<const Recipe> recipe;
    Arithmetic arithmetic;
    std::shared_ptr<const Products> plain;
    ops::SpreadFeatures spread;
    GatherOptions gather;
    std::shared_ptr<LayerScales> scales;  ///< this layer's; null: all scales are dynamic
  };
  explicit Float8Products(Layer layer) : layer_(std::move(layer)) {}

  at::Tensor forward(const Operand& x, const Operand& weight) const override {
    if (!layer_.recipe->output) return layer_.plain->forward(x, weight);
    return multiply(*layer_.recipe->output, x.dtype, x_rows(x), weight_rows(weight));
  }
  at::Tensor grad_input(const Operand& grad, const Operand& weight) const override {
    if (!layer_.recipe->grad_input) return layer_.plain->grad_input(grad, weight);
    return multiply(*layer_.recipe->grad_input, grad.dtype, grad_rows(grad), weight_columns(weight));
  }
  at::Tensor grad_weight(const Operand& grad, const Operand& x) const override {
    if (!layer_.recipe->grad_weight) return layer_.plain->grad_weight(grad, x);
    return multiply(*layer_.recipe->grad_weight, grad.dtype, grad_columns(grad), x_columns(x));
  }
  void add_grad_weight(const at::Tensor& out, const Operand& grad, const Operand& x) const override {
    if (!layer_.recipe->grad_weight) return layer_.plain->add_grad_weight(out, grad, x);
    out.add_(multiply(*layer_.recipe->grad_weight, out.scalar_type(), grad_columns(grad), x_columns(x)));
  }

  Operand scaled(const Operand& x_NI, bool trains) const override {
    Operand x = x_NI;
    if (!layer_.recipe->output || x.along_rows.scale.defined()) return x;
    const Cast& how = layer_.recipe->output->left;
    if (how.granularity != Granularity::Matrix) return x;
    x.values = x.values.contiguous();
    x.along_rows.scale = scale_of(x.values, Vectors::Rows, how, {layer_.spread.in.get(), Vectors::Rows},
                                  input_history(trains));
    return x;
  }
  Operand input(const Operand& x_NI, bool trains) const override {
    Operand x = scaled(x_NI, trains);
    if (layer_.recipe->output) x.along_rows = x_rows(x);
    return x;
  }
  Operand kept(const Operand& x) const override {
    Operand kept;
    kept.dtype = x.dtype;
    if (layer_.recipe->grad_weight) {
      kept.down_columns = x_columns(x);
    } else {
      kept.values = x.values;
    }
    return kept;
  }
  Operand weight(const Operand& weight_OI, ops::Pass pass) const override {
    Operand weight = weight_OI;
    if (pass == ops::Pass::Forward && layer_.recipe->output) weight.along_rows = weight_rows(weight);
    if (pass == ops::Pass::Backward && layer_.recipe->grad_input)
      weight.down_columns = weight_columns(weight);
    return weight;
  }
  // A layer cut by columns gathers its input; a layer cut by rows gathers its output's gradient.
  Operand part(const at::Tensor& rows, ops::Pass pass, bool trains) const override {
    const bool forward = pass == ops::Pass::Forward;
    const RankParts* ranks = (forward ? layer_.spread.out : layer_.spread.in).get();
    if (!ranks || !(forward ? casts_input_once(*layer_.recipe) : casts_grad_once(*layer_.recipe)))
      return rows;
    // With delayed scales, each rank would compute a different scale.
    if ((forward ? input_history(trains) : grad_history()).scale) return rows;
    Operand part;
    part.dtype = rows.scalar_type();
    part.along_rows =
        cast_of(rows, Vectors::Rows, (forward ? layer_.recipe->output : layer_.recipe->grad_input)->left,
                {ranks, Vectors::Rows}, {});
    return part;
  }
  bool multiplies_rows_apart(ops::Pass pass) const override {
    const auto& casts = pass == ops::Pass::Forward ? layer_.recipe->output : layer_.recipe->grad_input;
    return !casts || casts->left.granularity != Granularity::Matrix;
  }
  Operand grad(const Operand& grad_NO, bool for_input, bool for_weight) const override {
    Operand grad = grad_NO;
    if (for_input && layer_.recipe->grad_input) grad.along_rows = grad_rows(grad);
    if (for_weight && layer_.recipe->grad_weight) grad.down_columns = grad_columns(grad);
    const bool read =
        (for_input && !layer_.recipe->grad_input) || (for_weight && !layer_.recipe->grad_weight);
    if (!read) grad.values = at::Tensor();
    return grad;
  }

  std::shared_ptr<const Products> for_parts(const ops::SpreadFeatures& parts) const override {
    Layer layer = layer_;
    layer.spread = parts;
    return std::make_shared<Float8Products>(std::move(layer));
  }
  // Parts differ in the names of their calls, not in their ranks, because a model has only one such axis.
  bool joins(const Products& other) const override {
    const auto* same = dynamic_cast<const Float8Products*>(&other);
    return same && same->layer_.recipe == layer_.recipe && same->layer_.scales == layer_.scales &&
           !same->layer_.spread.in == !layer_.spread.in && !same->layer_.spread.out == !layer_.spread.out;
  }

  std::optional<WeightGather> weight_gather() const {
    if (!layer_.gather.in_float8) return std::nullopt;
    return WeightGather{.dtype = layer_.recipe->output->right.dtype,
                        .scales_at_once = layer_.gather.scales_at_once,
                        .power_of_two_scales = layer_.recipe->power_of_two_scales,
                        .parts = layer_.spread.in ? layer_.spread.in : layer_.spread.out};
  }

  Float8Layer layer() const { return {layer_.recipe, layer_.arithmetic, layer_.scales}; }

 private:
  ScaledMatrix x_rows(const Operand& x) const {
    if (x.along_rows.defined()) return x.along_rows;
    const Cast& how = layer_.recipe->output->left;
    if (!x.along_rows.scale.defined())
      return cast_of(x, Vectors::Rows, how, {layer_.spread.in.get(), Vectors::Rows}, input_history(false));
    const at::Tensor& scale = x.along_rows.scale;
    return {cast(x.values.contiguous(), scale, how.dtype, /*transposed=*/false), scale};
  }
  ScaledMatrix x_columns(const Operand& x) const {
    if (x.down_columns.defined()) return x.down_columns;
    const Cast& how = layer_.recipe->grad_weight->right;
    if (layer_.recipe->output && shares(how, layer_.recipe->output->left, x)) return transposed(x, how);
    // A meta tensor has no values ([Note: dropped tensors]), so ranks needn't agree on a scale.
    const RankParts* ranks = x.values.is_meta() ? nullptr : layer_.spread.in.get();
    return cast_of(x, Vectors::Columns, how, {ranks, Vectors::Rows}, input_history(/*records=*/true));
  }
  ScaledMatrix grad_rows(const Operand& grad) const {
    if (grad.along_rows.defined()) return grad.along_rows;
    return cast_of(grad, Vectors::Rows, layer_.recipe->grad_input->left,
                   {layer_.spread.out.get(), Vectors::Rows}, grad_history());
  }
  ScaledMatrix grad_columns(const Operand& grad) const {
    if (grad.down_columns.defined()) return grad.down_columns;
    const Cast& how = layer_.recipe->grad_weight->left;
    if (layer_.recipe->grad_input && shares(how, layer_.recipe->grad_input->left, grad))
      return transposed(grad, how);
    return cast_of(grad, Vectors::Columns, how, {layer_.spread.out.get(), Vectors::Rows}, grad_history());
  }
  ScaledMatrix weight_rows(const Operand& weight) const {
    if (weight.along_rows.defined()) return weight.along_rows;
    return cast_weight(weight, Vectors::Rows, layer_.recipe->output->right);
  }
  ScaledMatrix weight_columns(const Operand& weight) const {
    if (weight.down_columns.defined()) return weight.down_columns;
    const Cast& how = layer_.recipe->grad_input->right;
    if (layer_.recipe->output && shares(how, layer_.recipe->output->right, weight))
      return transposed(weight, how);
    return cast_weight(weight, Vectors::Columns, how);
  }
  ScaledMatrix cast_weight(const Operand& weight, Vectors vectors, const Cast& how) const {
    const History delayed = weight_history();
    if (delayed.scale || how.granularity == Granularity::Block)
      return cast_of(weight, vectors, how, weight_spread(), delayed);
    const auto kind = static_cast<int64_t>(how.dtype) * 4 + static_cast<int64_t>(scaled_over(vectors, how));
    const at::Tensor matrix = weight.values.contiguous();
    const at::Tensor scale = weight_scales_.of(weight.values, kind, [&] {
      return dynamic_scale(matrix, vectors, how, layer_.recipe->power_of_two_scales, weight_spread());
    });
    return {cast(matrix, scale, how.dtype, vectors == Vectors::Columns), scale};
  }
  // Split::Columns keeps the weight's rows whole and cuts its columns.
  Spread weight_spread() const {
    if (layer_.spread.in) return {layer_.spread.in.get(), Vectors::Rows};
    return {layer_.spread.out.get(), Vectors::Columns};
  }

  History history(bool delayed, const DelayedScale LayerScales::*which, bool records) const {
    if (!delayed || !(*layer_.scales.*which).defined()) return {};
    return {&(*layer_.scales.*which), layer_.scales->ready, records};
  }
  History input_history(bool records) const {
    return history(layer_.recipe->delayed.input, &LayerScales::input, records);
  }
  History weight_history() const {
    return history(layer_.recipe->delayed.weight, &LayerScales::weight, /*records=*/true);
  }
  History grad_history() const {
    return history(layer_.recipe->delayed.grad_output, &LayerScales::grad_output, /*records=*/true);
  }

  // With one scale for the matrix, the cast along rows can be used along columns, too.
  static bool shares(const Cast& wanted, const Cast& done, const Operand& operand) {
    return wanted == done && wanted.granularity == Granularity::Matrix && operand.along_rows.scale.defined();
  }
  // The hardware needs contiguous vectors, and casting again transposes faster than a copy does. The
  // emulation reads a view. A matrix that is recomputed has only its scale.
  ScaledMatrix transposed(const Operand& operand, const Cast& how) const {
    const ScaledMatrix& rows = operand.along_rows;
    const bool view = layer_.arithmetic == Arithmetic::Emulated || !operand.values.defined();
    if (view && rows.defined()) return {rows.data.t(), rows.scale};
    return {cast(operand.values.contiguous(), rows.scale, how.dtype, /*transposed=*/true), rows.scale};
  }

  at::Tensor scale_of(const at::Tensor& matrix, Vectors vectors, const Cast& how, const Spread& spread,
                      const History& history) const {
    const bool power_of_two = layer_.recipe->power_of_two_scales;
    return history.scale ? remembered_scale(matrix, how, power_of_two, spread, history)
                         : dynamic_scale(matrix, vectors, how, power_of_two, spread);
  }
  ScaledMatrix cast_of(const Operand& operand, Vectors vectors, const Cast& how, const Spread& spread,
                       const History& history) const {
    const at::Tensor matrix = operand.values.contiguous();
    if (how.granularity == Granularity::Block)
      return cast_in_blocks(matrix, vectors, how, layer_.recipe->blocks, spread);
    const at::Tensor scale = scale_of(matrix, vectors, how, spread, history);
    return {cast(matrix, scale, how.dtype, vectors == Vectors::Columns), scale};
  }
  at::Tensor multiply(const ProductCasts& casts, at::ScalarType out_dtype, const ScaledMatrix& a_NK,
                      const ScaledMatrix& b_MK) const {
    const ScaledProductOptions options{.out_dtype = out_dtype,
                                       .fast_accumulation = casts.fast_accumulation,
                                       .power_of_two_scales = layer_.recipe->power_of_two_scales};
    return layer_.arithmetic == Arithmetic::Hardware ? hardware_product(a_NK, b_MK, options)
                                                     : emulated_product(*layer_.plain, a_NK, b_MK, options);
  }

  Layer layer_;
  mutable WeightScales weight_scales_;  // for this layer
};

}  // namespace

std::optional<Float8Layer> float8_layer(const ops::Products& products) {
  const auto* scaled = dynamic_cast<const Float8Products*>(&products);
  return scaled ? std::optional(scaled->layer()) : std::nullopt;
}

std::optional<WeightGather> weight_gather(const ops::Products& products) {
  const auto* scaled = dynamic_cast<const Float8Products*>(&products);
  return scaled ? scaled->weight_gather() : std::nullopt;
}

std::shared_ptr<const ops::Products> products(Recipe recipe, Arithmetic arithmetic,
                                              std::shared_ptr<const ops::Products> plain,
                                              const GatherOptions& gather) {
  TITAN_CHECK(
      !gather.in_float8 || casts_weight_once(recipe),
      "a weight can't be gathered in Float8 if its products cast it in two ways, or vector by vector");
  TITAN_CHECK(!gather.in_float8 || !recipe.delayed.weight,
              "weights that are gathered in Float8 have dynamic scales, not delayed ones");
  auto scales = recipe.delayed.any() ? std::make_shared<LayerScales>() : nullptr;
  return std::make_shared<Float8Products>(
      Float8Products::Layer{.recipe = std::make_shared<const Recipe>(recipe),
                            .arithmetic = arithmetic,
                            .plain = std::move(plain),
                            .spread = {},
                            .gather = gather,
                            .scales = std::move(scales)});
}

}  // namespace titan::float8
