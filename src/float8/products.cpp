// Scales of weights, which only change with the weights.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>

#include "float8/cast.h"
#include "float8/products.h"
#include "float8/scaled_product.h"
#include "titan/core/error.h"
#include "titan/float8/convert.h"

namespace titan::float8 {

/// Of one layer's weight, by its memory and version, so that the products of a step, its micro-batches and
/// recomputes find a weight's largest magnitude once: one pass over the weight, and with tensor parallelism
/// one collective. Whoever gives a parameter other values without an operation of LibTorch raises its
/// version, as FSDP does. With another weight all is right, and made anew. Thread-safe.
class WeightScales {
 public:
  /// What `make` returned for these values and this `kind` of scale.
  at::Tensor of(const at::Tensor& weight, int64_t kind, const std::function<at::Tensor()>& make);

 private:
  using Storage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Entry {
    int64_t kind = 0;
    Storage storage;     // its address isn't another's while this is here
    int64_t offset = 0;  // of the weight in it
    uint64_t version = 0;
    at::Tensor scale;
  };

  std::mutex mutex_;
  std::vector<Entry> entries_;  // one a kind: one or two
};

at::Tensor WeightScales::of(const at::Tensor& weight, int64_t kind, const std::function<at::Tensor()>& make) {
  if (weight.is_inference()) return make();  // has no version
  const auto version = static_cast<uint64_t>(weight._version());
  c10::StorageImpl* memory = weight.storage().unsafeGetStorageImpl();
  const int64_t offset = weight.storage_offset();
  const std::lock_guard lock(mutex_);
  const auto found =
      std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.kind == kind; });
  const bool known = found != entries_.end();
  if (known && found->storage._unsafe_get_target() == memory && found->offset == offset &&
      found->version == version)
    return found->scale;
  Entry made{kind, Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(memory)), offset, version,
             make()};
  const at::Tensor scale = made.scale;
  if (known) {
    *found = std::move(made);
  } else {
    entries_.push_back(std::move(made));
  }
  return scale;
}

namespace {

using ops::Operand;
using ops::Products;
using ops::RankParts;
using ops::ScaledMatrix;

// Which vectors of a matrix a product sums over.
enum class Vectors { Rows, Columns };

// Where a matrix is spread over ranks; `parts` is null where it isn't.
struct Spread {
  const RankParts* parts = nullptr;
  Vectors across = Vectors::Rows;  ///< the vectors of which each rank has a part of every one
};

// The largest of all ranks' magnitudes, each for itself. NaN stays NaN.
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

// What a layer remembers of a matrix; without `scale` its scales are dynamic.
struct History {
  const DelayedScale* scale = nullptr;
  bool ready = false;    ///< no rank's magnitudes are asked for any more
  bool records = false;  ///< this cast is a training step's
};

// [Note: delayed scales]
at::Tensor remembered_scale(const at::Tensor& matrix, const Cast& how, bool power_of_two,
                            const Spread& spread, const History& history) {
  at::Tensor largest = amax(matrix, Over::Matrix);
  if (spread.parts && !history.ready) largest = over_ranks(*spread.parts, largest);
  return delayed_scale(largest, *history.scale, how.dtype, power_of_two, history.records);
}

// Blocks are cut where vectors lie across ranks; a rank's part has to be whole blocks.
ScaledMatrix cast_in_blocks(const at::Tensor& matrix, Vectors vectors, const Cast& how,
                            const BlockScaling& blocks, const Spread& spread) {
  const bool columns = vectors == Vectors::Columns;
  const int64_t length = matrix.size(columns ? 0 : 1);
  if (spread.parts && spread.across == vectors && length % kBlock != 0)
    throw ConfigError(titan::str(
        "MXFP8: tensor parallelism over ", spread.parts->count(), " ranks leaves ", length, " of the ",
        "features of a linear layer to a rank, which cuts its blocks of ", kBlock,
        "; name the layer in quantize.linear.mx.filter_fqns, or take a smaller tensor_parallel_degree"));
  return cast_blocks(matrix, {.dtype = how.dtype,
                              .rounding = blocks.rounding,
                              .transposed = columns,
                              .composed = columns && blocks.composed_columns});
}

class Float8Products final : public Products {
 public:
  Float8Products(std::shared_ptr<const Recipe> recipe, Arithmetic arithmetic,
                 std::shared_ptr<const Products> plain, ops::SpreadFeatures parts,
                 const GatherOptions& gather, std::shared_ptr<LayerScales> scales)
      : recipe_(std::move(recipe)),
        arithmetic_(arithmetic),
        plain_(std::move(plain)),
        parts_(std::move(parts)),
        gather_(gather),
        scales_(std::move(scales)) {}

  at::Tensor forward(const Operand& x, const Operand& weight) const override {
    if (!recipe_->output) return plain_->forward(x, weight);
    return multiply(*recipe_->output, x.dtype, x_rows(x), weight_rows(weight));
  }
  at::Tensor grad_input(const Operand& grad, const Operand& weight) const override {
    if (!recipe_->grad_input) return plain_->grad_input(grad, weight);
    return multiply(*recipe_->grad_input, grad.dtype, grad_rows(grad), weight_columns(weight));
  }
  at::Tensor grad_weight(const Operand& grad, const Operand& x) const override {
    if (!recipe_->grad_weight) return plain_->grad_weight(grad, x);
    return multiply(*recipe_->grad_weight, grad.dtype, grad_columns(grad), x_columns(x));
  }
  void add_grad_weight(const at::Tensor& out, const Operand& grad, const Operand& x) const override {
    if (!recipe_->grad_weight) return plain_->add_grad_weight(out, grad, x);
    out.add_(multiply(*recipe_->grad_weight, out.scalar_type(), grad_columns(grad), x_columns(x)));
  }

  Operand scaled(const Operand& x_NI, bool trains) const override {
    Operand x = x_NI;
    if (!recipe_->output || x.along_rows.scale.defined()) return x;
    const Cast& how = recipe_->output->left;
    if (how.granularity != Granularity::Matrix) return x;
    x.values = x.values.contiguous();
    x.along_rows.scale =
        scale_of(x.values, Vectors::Rows, how, {parts_.in.get(), Vectors::Rows}, input_history(trains));
    return x;
  }
  Operand input(const Operand& x_NI, bool trains) const override {
    Operand x = scaled(x_NI, trains);
    if (recipe_->output) x.along_rows = x_rows(x);
    return x;
  }
  Operand kept(const Operand& x) const override {
    Operand kept;
    kept.dtype = x.dtype;
    if (recipe_->grad_weight) {
      kept.down_columns = x_columns(x);
    } else {
      kept.values = x.values;
    }
    return kept;
  }
  Operand weight(const Operand& weight_OI, ops::Pass pass) const override {
    Operand weight = weight_OI;
    if (pass == ops::Pass::Forward && recipe_->output) weight.along_rows = weight_rows(weight);
    if (pass == ops::Pass::Backward && recipe_->grad_input) weight.down_columns = weight_columns(weight);
    return weight;
  }
  // A layer that is cut by columns gathers its input, one that is cut by rows its output's gradient.
  Operand part(const at::Tensor& rows, ops::Pass pass, bool trains) const override {
    const bool forward = pass == ops::Pass::Forward;
    const RankParts* ranks = (forward ? parts_.out : parts_.in).get();
    if (!ranks || !(forward ? casts_input_once(*recipe_) : casts_grad_once(*recipe_))) return rows;
    // Of what no step remembers each rank would make a scale of its own.
    if ((forward ? input_history(trains) : grad_history()).scale) return rows;
    Operand part;
    part.dtype = rows.scalar_type();
    part.along_rows = cast_of(rows, Vectors::Rows, (forward ? recipe_->output : recipe_->grad_input)->left,
                              {ranks, Vectors::Rows}, {});
    return part;
  }
  bool multiplies_rows_apart(ops::Pass pass) const override {
    const auto& casts = pass == ops::Pass::Forward ? recipe_->output : recipe_->grad_input;
    return !casts || casts->left.granularity != Granularity::Matrix;
  }
  Operand grad(const Operand& grad_NO, bool for_input, bool for_weight) const override {
    Operand grad = grad_NO;
    if (for_input && recipe_->grad_input) grad.along_rows = grad_rows(grad);
    if (for_weight && recipe_->grad_weight) grad.down_columns = grad_columns(grad);
    const bool read = (for_input && !recipe_->grad_input) || (for_weight && !recipe_->grad_weight);
    if (!read) grad.values = at::Tensor();
    return grad;
  }

  std::shared_ptr<const Products> for_parts(const ops::SpreadFeatures& parts) const override {
    return std::make_shared<Float8Products>(recipe_, arithmetic_, plain_, parts, gather_, scales_);
  }
  // Parts differ by the names under which they communicate, not by the ranks: a model has one such axis.
  bool joins(const Products& other) const override {
    const auto* same = dynamic_cast<const Float8Products*>(&other);
    return same && same->recipe_ == recipe_ && same->scales_ == scales_ && !same->parts_.in == !parts_.in &&
           !same->parts_.out == !parts_.out;
  }

  std::optional<WeightGather> weight_gather() const {
    if (!gather_.in_float8) return std::nullopt;
    return WeightGather{.dtype = recipe_->output->right.dtype,
                        .scales_at_once = gather_.scales_at_once,
                        .power_of_two_scales = recipe_->power_of_two_scales,
                        .parts = parts_.in ? parts_.in : parts_.out};
  }

  const std::shared_ptr<LayerScales>& scales() const { return scales_; }
  const Recipe& recipe() const { return *recipe_; }
  Arithmetic arithmetic() const { return arithmetic_; }

 private:
  ScaledMatrix x_rows(const Operand& x) const {
    if (x.along_rows.defined()) return x.along_rows;
    const Cast& how = recipe_->output->left;
    if (!x.along_rows.scale.defined())
      return cast_of(x, Vectors::Rows, how, {parts_.in.get(), Vectors::Rows}, input_history(false));
    const at::Tensor& scale = x.along_rows.scale;
    return {cast(x.values.contiguous(), scale, how.dtype, /*transposed=*/false), scale};
  }
  ScaledMatrix x_columns(const Operand& x) const {
    if (x.down_columns.defined()) return x.down_columns;
    const Cast& how = recipe_->grad_weight->right;
    if (recipe_->output && shares(how, recipe_->output->left, x)) return turned(x, how);
    // Of a meta tensor nobody reads the values ([Note: dropped tensors]): ranks needn't agree on them.
    const RankParts* ranks = x.values.is_meta() ? nullptr : parts_.in.get();
    return cast_of(x, Vectors::Columns, how, {ranks, Vectors::Rows}, input_history(/*records=*/true));
  }
  ScaledMatrix grad_rows(const Operand& grad) const {
    if (grad.along_rows.defined()) return grad.along_rows;
    return cast_of(grad, Vectors::Rows, recipe_->grad_input->left, {parts_.out.get(), Vectors::Rows},
                   grad_history());
  }
  ScaledMatrix grad_columns(const Operand& grad) const {
    if (grad.down_columns.defined()) return grad.down_columns;
    const Cast& how = recipe_->grad_weight->left;
    if (recipe_->grad_input && shares(how, recipe_->grad_input->left, grad)) return turned(grad, how);
    return cast_of(grad, Vectors::Columns, how, {parts_.out.get(), Vectors::Rows}, grad_history());
  }
  ScaledMatrix weight_rows(const Operand& weight) const {
    if (weight.along_rows.defined()) return weight.along_rows;
    return cast_weight(weight, Vectors::Rows, recipe_->output->right);
  }
  ScaledMatrix weight_columns(const Operand& weight) const {
    if (weight.down_columns.defined()) return weight.down_columns;
    const Cast& how = recipe_->grad_input->right;
    if (recipe_->output && shares(how, recipe_->output->right, weight)) return turned(weight, how);
    return cast_weight(weight, Vectors::Columns, how);
  }
  ScaledMatrix cast_weight(const Operand& weight, Vectors vectors, const Cast& how) const {
    const History delayed = weight_history();
    if (delayed.scale || how.granularity == Granularity::Block)
      return cast_of(weight, vectors, how, weight_spread(), delayed);
    const auto kind = static_cast<int64_t>(how.dtype) * 4 + static_cast<int64_t>(scaled_over(vectors, how));
    const at::Tensor matrix = weight.values.contiguous();
    const at::Tensor scale = weight_scales_.of(weight.values, kind, [&] {
      return dynamic_scale(matrix, vectors, how, recipe_->power_of_two_scales, weight_spread());
    });
    return {cast(matrix, scale, how.dtype, vectors == Vectors::Columns), scale};
  }
  // A split by columns cuts the weight's rows apart from each other, and so its columns across.
  Spread weight_spread() const {
    if (parts_.in) return {parts_.in.get(), Vectors::Rows};
    return {parts_.out.get(), Vectors::Columns};
  }

  History history(bool delayed, const DelayedScale LayerScales::*which, bool records) const {
    if (!delayed || !(*scales_.*which).defined()) return {};
    return {&(*scales_.*which), scales_->ready, records};
  }
  History input_history(bool records) const {
    return history(recipe_->delayed.input, &LayerScales::input, records);
  }
  History weight_history() const {
    return history(recipe_->delayed.weight, &LayerScales::weight, /*records=*/true);
  }
  History grad_history() const {
    return history(recipe_->delayed.grad_output, &LayerScales::grad_output, /*records=*/true);
  }

  // One scale for the matrix: the cast that is there serves both ways.
  static bool shares(const Cast& wanted, const Cast& done, const Operand& operand) {
    return wanted == done && wanted.granularity == Granularity::Matrix && operand.along_rows.scale.defined();
  }
  // The hardware wants vectors in one piece, and casting once more turns faster than a copy; an emulation
  // reads a view. Of a matrix that is made again the scale alone is there.
  ScaledMatrix turned(const Operand& operand, const Cast& how) const {
    const ScaledMatrix& rows = operand.along_rows;
    const bool view = arithmetic_ == Arithmetic::Emulated || !operand.values.defined();
    if (view && rows.defined()) return {rows.data.t(), rows.scale};
    return {cast(operand.values.contiguous(), rows.scale, how.dtype, /*transposed=*/true), rows.scale};
  }

  at::Tensor scale_of(const at::Tensor& matrix, Vectors vectors, const Cast& how, const Spread& spread,
                      const History& history) const {
    const bool power_of_two = recipe_->power_of_two_scales;
    return history.scale ? remembered_scale(matrix, how, power_of_two, spread, history)
                         : dynamic_scale(matrix, vectors, how, power_of_two, spread);
  }
  ScaledMatrix cast_of(const Operand& operand, Vectors vectors, const Cast& how, const Spread& spread,
                       const History& history) const {
    const at::Tensor matrix = operand.values.contiguous();
    if (how.granularity == Granularity::Block)
      return cast_in_blocks(matrix, vectors, how, recipe_->blocks, spread);
    const at::Tensor scale = scale_of(matrix, vectors, how, spread, history);
    return {cast(matrix, scale, how.dtype, vectors == Vectors::Columns), scale};
  }
  at::Tensor multiply(const ProductCasts& casts, at::ScalarType out_dtype, const ScaledMatrix& a_NK,
                      const ScaledMatrix& b_MK) const {
    const ScaledProductOptions options{.out_dtype = out_dtype,
                                       .fast_accumulation = casts.fast_accumulation,
                                       .power_of_two_scales = recipe_->power_of_two_scales};
    return arithmetic_ == Arithmetic::Hardware ? hardware_product(a_NK, b_MK, options)
                                               : emulated_product(*plain_, a_NK, b_MK, options);
  }

  std::shared_ptr<const Recipe> recipe_;
  Arithmetic arithmetic_;
  std::shared_ptr<const Products> plain_;
  ops::SpreadFeatures parts_;
  GatherOptions gather_;
  std::shared_ptr<LayerScales> scales_;  // of this layer; null: all scales are dynamic
  mutable WeightScales weight_scales_;   // of this layer
};

}  // namespace

std::optional<WeightGather> weight_gather(const ops::Products& products) {
  const auto* scaled = dynamic_cast<const Float8Products*>(&products);
  return scaled ? scaled->weight_gather() : std::nullopt;
}

std::optional<Arithmetic> arithmetic_of(const ops::Products& products) {
  const auto* scaled = dynamic_cast<const Float8Products*>(&products);
  return scaled ? std::optional(scaled->arithmetic()) : std::nullopt;
}

bool multiplies_blocks(const ops::Products& products) {
  const auto* scaled = dynamic_cast<const Float8Products*>(&products);
  return scaled && scales_blocks(scaled->recipe());
}

std::shared_ptr<LayerScales> layer_scales(const ops::Products& products) {
  const auto* scaled = dynamic_cast<const Float8Products*>(&products);
  return scaled ? scaled->scales() : nullptr;
}

std::shared_ptr<const ops::Products> products(Recipe recipe, Arithmetic arithmetic,
                                              std::shared_ptr<const ops::Products> plain,
                                              const GatherOptions& gather) {
  TITAN_CHECK(!gather.in_float8 || casts_weight_once(recipe),
              "a weight can't be gathered in Float8 whose products cast it in two ways, or vector by vector");
  TITAN_CHECK(!gather.in_float8 || !recipe.delayed.weight,
              "weights that are gathered in Float8 have dynamic scales, not delayed ones");
  auto scales = recipe.delayed.any() ? std::make_shared<LayerScales>() : nullptr;
  return std::make_shared<Float8Products>(std::make_shared<const Recipe>(recipe), arithmetic,
                                          std::move(plain), ops::SpreadFeatures{}, gather, std::move(scales));
}

}  // namespace titan::float8
