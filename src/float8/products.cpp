#include "float8/products.h"

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>

#include "float8/cast.h"
#include "ops/parts_estimate.h"
#include "titan/core/error.h"

namespace titan::float8 {

// ---- one product of two matrices in 8 bits

namespace {

constexpr int64_t kAlignment = 16;  // the summed dimension is a multiple of this

bool by_vector(const ops::ScaledMatrix& matrix) { return matrix.scale.numel() > 1; }

// Contiguous rows, padded to a length that the hardware supports by zeros, which add nothing to a sum.
at::Tensor aligned(const at::Tensor& data) {
  const int64_t rest = data.size(1) % kAlignment;
  if (rest == 0)
    return !data.is_contiguous() && data.t().is_contiguous() ? transpose_many(data.t())[0]
                                                             : data.contiguous();
  const at::Tensor bytes = at::constant_pad_nd(data.view(at::kByte), {0, kAlignment - rest});
  return bytes.view(data.scalar_type());
}

at::Tensor inverse_of(const ops::ScaledMatrix& matrix) {
  return matrix.inverse.defined() ? matrix.inverse : matrix.scale.reciprocal();
}

// Scales of blocks; a cast may have written them so.
at::Tensor for_hardware(const at::Tensor& scale) { return scale.dim() == 1 ? scale : blocked_layout(scale); }

VectorProduct vector_product(const ops::ScaledMatrix& a_NK, const ops::ScaledMatrix& b_MK,
                             const ScaledProductOptions& options) {
  if (in_blocks(a_NK))
    return {.a_NK = a_NK.data,
            .b_MK = b_MK.data,
            .inverse_a = for_hardware(a_NK.scale),
            .inverse_b = for_hardware(b_MK.scale)};
  return {.a_NK = aligned(a_NK.data),
          .b_MK = aligned(b_MK.data),
          .inverse_a = inverse_of(a_NK),
          .inverse_b = inverse_of(b_MK),
          .fast_accumulation = options.fast_accumulation,
          .power_of_two_scales = options.power_of_two_scales};
}

}  // namespace

void put_hardware_product(const at::Tensor& out_NM, const ops::ScaledMatrix& a_NK,
                          const ops::ScaledMatrix& b_MK, const ScaledProductOptions& options) {
  const VectorProduct product = vector_product(a_NK, b_MK, options);
  if (in_blocks(a_NK)) return put_product(out_NM, product, /*adds=*/false);
  if (by_vector(a_NK) || by_vector(b_MK)) return multiply_vectors(out_NM, product);
  at::Tensor out = out_NM;
  at::_scaled_mm_out(out, product.a_NK, product.b_MK.t(), product.inverse_a.reshape({}),
                     product.inverse_b.reshape({}), /*bias=*/{},
                     /*scale_result=*/{}, options.out_dtype, options.fast_accumulation);
}

namespace {

// One matrix, or [B, n, features] where B products are worth it. Their scales of rows, if there are any, then begin at multiples of 16 bytes.
bool can_write_each(const at::Tensor& out, const ops::Operand& rows) {
  if (out.dim() == 2) return true;
  if (out.size(1) % 4 != 0) return false;
  const at::Tensor& stored = rows.along_rows.defined() ? rows.along_rows.data : rows.values;
  return ops::gains_by_writing_each(out.size(0), stored.size(0), stored.size(1), out.size(2));
}

// _scaled_mm multiplies no batches.
void put_each_product(const at::Tensor& out, ops::ScaledMatrix a, ops::ScaledMatrix b,
                      const ScaledProductOptions& options) {
  a = {aligned(a.data), a.scale, inverse_of(a)};
  b = {aligned(b.data), b.scale, inverse_of(b)};
  const auto of_rows = [&](const at::Tensor& scale, int64_t first) {
    return by_vector(a) ? scale.narrow(0, first, out.size(1)) : scale;
  };
  for (int64_t i = 0; i < out.size(0); ++i) {
    const int64_t first = i * out.size(1);
    put_hardware_product(
        out[i], {a.data.narrow(0, first, out.size(1)), of_rows(a.scale, first), of_rows(a.inverse, first)}, b,
        options);
  }
}

}  // namespace

void add_hardware_product(const at::Tensor& out_NM, const ops::ScaledMatrix& a_NK,
                          const ops::ScaledMatrix& b_MK, const ScaledProductOptions& options) {
  put_product(out_NM, vector_product(a_NK, b_MK, options), /*adds=*/true);
}

at::Tensor hardware_product(const ops::ScaledMatrix& a_NK, const ops::ScaledMatrix& b_MK,
                            const ScaledProductOptions& options) {
  if (in_blocks(a_NK))
    return at::_scaled_mm(a_NK.data, b_MK.data.t(), for_hardware(a_NK.scale), for_hardware(b_MK.scale),
                          /*bias=*/{}, /*scale_result=*/{}, options.out_dtype);
  const at::Tensor out =
      at::empty({a_NK.data.size(0), b_MK.data.size(0)}, a_NK.data.options().dtype(options.out_dtype));
  put_hardware_product(out, a_NK, b_MK, options);
  return out;
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
  /// Casts the weight by the scale of this `kind` for these values, or anew, which makes one.
  ops::ScaledMatrix cast(const at::Tensor& weight, int64_t kind,
                         const std::function<ops::ScaledMatrix(const ops::ScaledMatrix& scale)>& cast_by,
                         const std::function<ops::ScaledMatrix()>& cast_anew) {
    if (weight.is_inference()) return cast_anew();  // it has no version
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_[kind];
    if (entry.scale.scale.defined() && entry.values == Values(weight)) return cast_by(entry.scale);
    const ops::ScaledMatrix cast = cast_anew();
    entry = Entry(weight, cast);
    return cast;
  }
  /// The scale of this `kind` for these values, without data; nullopt if there is none.
  std::optional<ops::ScaledMatrix> find(const at::Tensor& weight, int64_t kind) {
    if (weight.is_inference()) return std::nullopt;
    const std::lock_guard lock(mutex_);
    const auto entry = entries_.find(kind);
    if (entry == entries_.end() || !(entry->second.values == Values(weight))) return std::nullopt;
    return entry->second.scale;
  }
  /// Remembers the scale of a cast that was made anew.
  void remember(const at::Tensor& weight, int64_t kind, const ops::ScaledMatrix& cast) {
    if (weight.is_inference()) return;
    const std::lock_guard lock(mutex_);
    entries_[kind] = Entry(weight, cast);
  }

 private:
  using Storage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Values {
    Values() = default;
    explicit Values(const at::Tensor& weight)
        : memory(weight.storage().unsafeGetStorageImpl()),
          offset(weight.storage_offset()),
          version(static_cast<uint64_t>(weight._version())) {}
    const c10::StorageImpl* memory = nullptr;
    int64_t offset = 0;
    uint64_t version = 0;
    bool operator==(const Values&) const = default;
  };
  struct Entry {
    Entry() = default;
    Entry(const at::Tensor& weight, const ops::ScaledMatrix& cast)
        : values(weight),
          keeps_address(
              c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(weight.storage().unsafeGetStorageImpl())),
          scale{.data = {}, .scale = cast.scale, .inverse = cast.inverse} {}
    Values values;
    std::optional<Storage> keeps_address;  // keeps other storages from getting this address
    ops::ScaledMatrix scale;               // without data
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

// All ranks' magnitudes, [ranks, n].
at::Tensor of_ranks(const RankParts& parts, const at::Tensor& amax) {
  const at::Tensor all = at::empty({parts.count(), amax.numel()}, amax.options());
  parts.all_gather(all, amax.reshape({-1}), ops::kScalesPhase);
  return all;
}

Over scaled_over(Vectors vectors, const Cast& how) {
  if (how.granularity == Granularity::Matrix) return Over::Matrix;
  return vectors == Vectors::Rows ? Over::Row : Over::Column;
}

// The magnitudes of all parts of a matrix, also of those on other ranks.
at::Tensor magnitudes_of(const at::Tensor& matrix, const RankParts* ranks) {
  return ranks ? of_ranks(*ranks, amax(matrix, Over::Matrix)).view({-1}) : magnitudes(matrix, Over::Matrix);
}

// Each vector by its own scale. Ranks that have parts of the vectors agree on their scales.
ScaledMatrix cast_vectors(const at::Tensor& matrix, Vectors vectors, const ScaleForm& form,
                          const Spread& spread) {
  const bool columns = vectors == Vectors::Columns;
  if (!spread.parts || spread.across != vectors)
    return columns ? cast_columns(matrix, magnitudes(matrix, Over::Column), form)
                   : cast_rows(matrix, form, /*measures_columns=*/false).along_rows;
  const at::Tensor mine = amax(matrix, columns ? Over::Column : Over::Row);
  const at::Tensor largest = of_ranks(*spread.parts, mine).amax(0).view(mine.sizes());  // NaN stays NaN
  ScaledMatrix made = scale_and_inverse_of(largest, form.dtype, form.power_of_two);
  made.data = cast(matrix, made.scale, form.dtype, columns);
  return made;
}

// A layer's history of a matrix.
struct History {
  const DelayedScale* scale = nullptr;  ///< null: scales are dynamic
  bool ready = false;                   ///< the ranks' histories agree, so no collective is needed
  bool records = false;                 ///< this cast belongs to a training step
};

// With one scale ([Note: delayed scales]).
BothCasts cast_whole(const at::Tensor& matrix, const ScaleForm& form, const RankParts* ranks,
                     const History& history, bool rows, bool columns) {
  if (!history.scale) return cast_measured(matrix, magnitudes_of(matrix, ranks), form, rows, columns);
  if (history.ready) return cast_delayed(matrix, *history.scale, form, history.records, rows, columns);
  // The kernels of later steps are loaded in the first one, in which the host may wait for that ([Note: first run of a schedule]).
  if (matrix.is_cuda())
    cast_delayed(matrix.narrow(0, 0, std::min(matrix.size(0), 2 * kAlignment)), *history.scale, form,
                 /*records=*/false, rows, columns);
  const at::Tensor scale = delayed_scale(magnitudes_of(matrix, ranks), *history.scale, form.dtype,
                                         form.power_of_two, history.records);
  return cast_scaled(matrix, scale, form.dtype, rows, columns);
}

// If vectors are spread over ranks, each rank's part must be whole blocks.
void check_parts_of_blocks(const at::Tensor& matrix, Vectors vectors, const Spread& spread) {
  const int64_t length = matrix.size(vectors == Vectors::Columns ? 0 : 1);
  if (spread.parts && spread.across == vectors && length % kBlock != 0)
    throw ConfigError(titan::str(
        "MXFP8: tensor parallelism over ", spread.parts->count(), " ranks gives a rank ", length,
        " features of a linear layer, which isn't a multiple of the block size ", kBlock,
        "; name the layer in quantize.linear.mx.filter_fqns, or use a smaller tensor_parallel_degree"));
}

ScaledMatrix cast_in_blocks(const at::Tensor& matrix, Vectors vectors, const Cast& how,
                            const BlockScaling& blocks, const Spread& spread, bool for_hardware) {
  check_parts_of_blocks(matrix, vectors, spread);
  const bool columns = vectors == Vectors::Columns;
  return cast_blocks(matrix, {.dtype = how.dtype,
                              .rounding = blocks.rounding,
                              .transposed = columns,
                              .composed = columns && blocks.composed_columns,
                              .for_hardware = for_hardware});
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
  at::Tensor add_grad_input(const at::Tensor& sum, const Operand& grad,
                            const Operand& weight) const override {
    if (!layer_.recipe->grad_input) return layer_.plain->add_grad_input(sum, grad, weight);
    add(sum, *layer_.recipe->grad_input, grad_rows(grad), weight_columns(weight));
    return sum;
  }
  at::Tensor grad_weight(const Operand& grad, const Operand& x) const override {
    if (!layer_.recipe->grad_weight) return layer_.plain->grad_weight(grad, x);
    return multiply(*layer_.recipe->grad_weight, grad.dtype, grad_columns(grad), x_columns(x));
  }
  void add_grad_weight(const at::Tensor& out, const Operand& grad, const Operand& x) const override {
    if (!layer_.recipe->grad_weight) return layer_.plain->add_grad_weight(out, grad, x);
    const ProductCasts& casts = *layer_.recipe->grad_weight;
    add(out, casts, grad_columns(grad), x_columns(x));
  }
  bool put_grad_weight(const at::Tensor& out, const Operand& grad, const Operand& x,
                       bool adds) const override {
    if (!layer_.recipe->grad_weight) return layer_.plain->put_grad_weight(out, grad, x, adds);
    const ProductCasts& casts = *layer_.recipe->grad_weight;
    if (layer_.arithmetic != Arithmetic::Hardware || !out.is_cuda() || !out.is_contiguous()) return false;
    if (adds) {
      add_grad_weight(out, grad, x);
    } else {
      put_hardware_product(out, grad_columns(grad), x_columns(x), product_options(casts, out.scalar_type()));
    }
    return true;
  }

  bool put_product(const at::Tensor& out, ops::Pass pass, const Operand& rows,
                   const Operand& weight) const override {
    const bool forward = pass == ops::Pass::Forward;
    const auto& casts = forward ? layer_.recipe->output : layer_.recipe->grad_input;
    if (!casts) return layer_.plain->put_product(out, pass, rows, weight);
    if (layer_.arithmetic != Arithmetic::Hardware || !out.is_cuda() ||
        casts->left.granularity == Granularity::Block || !can_write_each(out, rows))
      return false;
    const ops::ScaledMatrix left = forward ? x_rows(rows) : grad_rows(rows);
    const ops::ScaledMatrix right = forward ? weight_rows(weight) : weight_columns(weight);
    const ScaledProductOptions options = product_options(*casts, out.scalar_type());
    if (out.dim() == 2) {
      put_hardware_product(out, left, right, options);
    } else {
      put_each_product(out, left, right, options);
    }
    return true;
  }

  // A GPU casts in the pass that makes the scale.
  Operand scaled(const Operand& x_NI, bool trains) const override {
    Operand x = x_NI;
    if (!layer_.recipe->output || x.along_rows.scale.defined()) return x;
    const Cast& how = layer_.recipe->output->left;
    if (how.granularity != Granularity::Matrix) return x;
    x.values = x.values.contiguous();
    x.along_rows = cast_whole(x.values, form(how), layer_.spread.in.get(), input_history(trains),
                              /*rows=*/x.values.is_cuda(), /*columns=*/false)
                       .along_rows;
    return x;
  }
  Operand scaled_to_keep(const Operand& x_NI, bool trains) const override {
    const Recipe& recipe = *layer_.recipe;
    if (!recipe.output || !recipe.grad_weight || x_NI.along_rows.scale.defined() || !x_NI.values.is_cuda())
      return scaled(x_NI, trains);
    // With tensor parallelism rows may be multiplied part by part, and then no cast of all of them along rows is needed.
    if (recipe.output->left.granularity == Granularity::Block && (layer_.spread.in || layer_.spread.out))
      return scaled(x_NI, trains);
    Operand x = x_NI;
    cast_both_ways(x, recipe.output->left, recipe.grad_weight->right, {layer_.spread.in.get(), Vectors::Rows},
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
      kept.down_columns = with_inverse(x_columns(x));
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
  // A weight whose scale is known is cast by it, and others are measured, each in one launch for all. Ranks that share a
  // scale exchange magnitudes weight by weight.
  void cast_weights(at::ArrayRef<const Products*> products, std::vector<Operand>& weights,
                    ops::Pass pass) const override {
    const bool forward = pass == ops::Pass::Forward;
    const auto& casts = forward ? layer_.recipe->output : layer_.recipe->grad_input;
    if (!casts || casts->right.granularity == Granularity::Block || layer_.recipe->delayed.weight) return;
    const Vectors vectors = forward ? Vectors::Rows : Vectors::Columns;
    const bool by_vector = casts->right.granularity == Granularity::Vector;
    const int64_t kind = kind_of(vectors, casts->right);
    WeightsToCast known, unknown;
    WeightsToCast narrow;  // gathered in Float8
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto* each = dynamic_cast<const Float8Products*>(products[i]);
      const Operand& weight = weights[i];
      if (!each || each->layer_.recipe != layer_.recipe || weight.down_columns.defined()) continue;
      if (!weight.values.defined() && !forward && layer_.recipe->output &&
          layer_.arithmetic == Arithmetic::Hardware &&
          shares(casts->right, layer_.recipe->output->right, weight))
        narrow.add(each, weights[i], {});
      if (!weight.values.defined() || !weight.values.is_cuda() || weight.along_rows.scale.defined()) continue;
      if (const auto scale = each->weight_scales_.find(weight.values, kind)) {
        known.add(each, weights[i], *scale);
      } else if (const Spread spread = each->weight_spread();
                 !spread.parts || (by_vector && spread.across != vectors)) {
        unknown.add(each, weights[i], {});
      }
    }
    const std::vector<at::Tensor> transposes = transpose_many(narrow.values);
    for (size_t i = 0; i < transposes.size(); ++i) {
      const ScaledMatrix& rows = narrow.weights[i]->along_rows;
      narrow.weights[i]->down_columns = {transposes[i], rows.scale, rows.inverse};
    }
    for (WeightsToCast* some : {&known, &unknown}) {
      if (some->values.size() < 2) continue;
      const std::vector<ScaledMatrix> made =
          cast_many(some->values, some->scales,
                    {.form = form(casts->right), .by_vector = by_vector, .transposed = !forward});
      for (size_t i = 0; i < made.size(); ++i) {
        Operand& weight = *some->weights[i];
        (forward ? weight.along_rows : weight.down_columns) = made[i];
        if (some == &unknown) some->products[i]->weight_scales_.remember(weight.values, kind, made[i]);
      }
    }
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
    if (for_input && layer_.recipe->grad_input && for_weight && layer_.recipe->grad_weight &&
        !grad.along_rows.defined() && !grad.down_columns.defined())
      cast_both_ways(grad, layer_.recipe->grad_input->left, layer_.recipe->grad_weight->left,
                     {layer_.spread.out.get(), Vectors::Rows}, grad_history());
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
    return cast_scaled(x.values.contiguous(), x.along_rows.scale, how.dtype, /*rows=*/true, /*columns=*/false)
        .along_rows;
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
    const bool columns = vectors == Vectors::Columns;
    const auto cast_by = [&](const ScaledMatrix& known) -> ScaledMatrix {
      const at::Tensor matrix = weight.values.contiguous();
      return {cast(matrix, known.scale, how.dtype, columns), known.scale, known.inverse};
    };
    const auto cast_anew = [&] { return cast_of(weight, vectors, how, weight_spread(), {}); };
    return weight_scales_.cast(weight.values, kind_of(vectors, how), cast_by, cast_anew);
  }
  // Split::Columns keeps the weight's rows whole and cuts its columns.
  Spread weight_spread() const {
    if (layer_.spread.in) return {layer_.spread.in.get(), Vectors::Rows};
    return {layer_.spread.out.get(), Vectors::Columns};
  }

  static int64_t kind_of(Vectors vectors, const Cast& how) {
    return static_cast<int64_t>(how.dtype) * 4 + static_cast<int64_t>(scaled_over(vectors, how));
  }
  struct WeightsToCast {
    void add(const Float8Products* owner, Operand& weight, const ScaledMatrix& scale) {
      products.push_back(owner);
      weights.push_back(&weight);
      values.push_back((weight.values.defined() ? weight.values : weight.along_rows.data).contiguous());
      if (scale.scale.defined()) scales.push_back(scale);
    }
    std::vector<const Float8Products*> products;
    std::vector<Operand*> weights;
    std::vector<at::Tensor> values;
    std::vector<ScaledMatrix> scales;  // without data; empty if they aren't known
  };

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
    if (view && rows.defined()) return {rows.data.t(), rows.scale, rows.inverse};
    return cast_scaled(operand.values.contiguous(), rows.scale, how.dtype, /*rows=*/false, /*columns=*/true)
        .down_columns;
  }

  // Hardware multiplies by the inverse, also when the product is repeated.
  ScaledMatrix with_inverse(ScaledMatrix matrix) const {
    const bool reads = layer_.arithmetic == Arithmetic::Hardware && !in_blocks(matrix);
    matrix.inverse = reads ? inverse_of(matrix) : at::Tensor();
    return matrix;
  }

  ScaleForm form(const Cast& how) const { return {how.dtype, layer_.recipe->power_of_two_scales}; }

  // Adds both forms, if one pass can make them or helps to.
  void cast_both_ways(Operand& operand, const Cast& rows, const Cast& columns, const Spread& spread,
                      const History& history) const {
    if (rows == columns && rows.granularity == Granularity::Matrix) {
      const at::Tensor matrix = operand.values.contiguous();
      const bool view = layer_.arithmetic == Arithmetic::Emulated;
      BothCasts both =
          cast_whole(matrix, form(rows), spread.parts, history, /*rows=*/true, /*columns=*/!view);
      operand.along_rows = both.along_rows;
      operand.down_columns = view ? transposed(operand, columns) : both.down_columns;
    } else if (rows.granularity == Granularity::Vector && columns.granularity == Granularity::Vector &&
               !spread.parts) {
      const at::Tensor matrix = operand.values.contiguous();
      const MeasuredRows measured = cast_rows(matrix, form(rows), /*measures_columns=*/true);
      operand.along_rows = measured.along_rows;
      operand.down_columns = cast_columns(matrix, measured.magnitudes, form(columns));
    } else if (rows == columns && rows.granularity == Granularity::Block &&
               !layer_.recipe->blocks.composed_columns) {
      const at::Tensor matrix = operand.values.contiguous();
      check_parts_of_blocks(matrix, Vectors::Rows, spread);
      BothCasts both = cast_blocks_both(matrix, {.dtype = rows.dtype,
                                                 .rounding = layer_.recipe->blocks.rounding,
                                                 .for_hardware = layer_.arithmetic == Arithmetic::Hardware});
      operand.along_rows = std::move(both.along_rows);
      operand.down_columns = std::move(both.down_columns);
    }
  }
  ScaledMatrix cast_of(const Operand& operand, Vectors vectors, const Cast& how, const Spread& spread,
                       const History& history) const {
    const at::Tensor matrix = operand.values.contiguous();
    if (how.granularity == Granularity::Block)
      return cast_in_blocks(matrix, vectors, how, layer_.recipe->blocks, spread,
                            layer_.arithmetic == Arithmetic::Hardware);
    if (how.granularity == Granularity::Vector) return cast_vectors(matrix, vectors, form(how), spread);
    const bool columns = vectors == Vectors::Columns;
    const BothCasts casts = cast_whole(matrix, form(how), spread.parts, history, !columns, columns);
    return columns ? casts.down_columns : casts.along_rows;
  }
  ScaledProductOptions product_options(const ProductCasts& casts, at::ScalarType out_dtype) const {
    return {.out_dtype = out_dtype,
            .fast_accumulation = casts.fast_accumulation,
            .power_of_two_scales = layer_.recipe->power_of_two_scales};
  }
  at::Tensor multiply(const ProductCasts& casts, at::ScalarType out_dtype, const ScaledMatrix& a_NK,
                      const ScaledMatrix& b_MK) const {
    const ScaledProductOptions options = product_options(casts, out_dtype);
    return layer_.arithmetic == Arithmetic::Hardware ? hardware_product(a_NK, b_MK, options)
                                                     : emulated_product(*layer_.plain, a_NK, b_MK, options);
  }

  void add(const at::Tensor& out, const ProductCasts& casts, const ScaledMatrix& a_NK,
           const ScaledMatrix& b_MK) const {
    if (layer_.arithmetic == Arithmetic::Hardware && out.is_cuda())
      return add_hardware_product(out, a_NK, b_MK, product_options(casts, out.scalar_type()));
    out.add_(multiply(casts, out.scalar_type(), a_NK, b_MK));
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
