#include "titan/ops/linear.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>

#include "ops/cpu_features.h"
#include "ops/joint_node.h"
#include "titan/config/table.h"

namespace titan::ops {

// ---- products

namespace {

// [Note: products on a CPU]
// In fp32, LibTorch's at::mm calls MKL. On AMD processors with AVX-512, oneDNN is up to twice as fast in all
// three products. With AVX2 only, oneDNN is faster in two, and MKL in the weight's gradient, which MKL also
// adds in place. 16-bit products have a vector kernel (oneDNN's) only with AVX-512: elsewhere at::mm runs
// plain loops, ten times slower than widening to fp32. A call of oneDNN takes 25 us before it multiplies, so
// it is used from a certain size on.

constexpr int64_t kSmallProduct = int64_t{1} << 23;  // multiplications; 0.2 ms on a core with AVX2

// mkldnn::_linear_pointwise: x W^T by oneDNN without prepacking; it takes transposed views.
class OneDnnLinear {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                               std::string_view, c10::List<std::optional<at::Scalar>>,
                               std::optional<std::string_view>);
  using AddSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                  const std::optional<at::Tensor>&, std::string_view);

 public:
  static const OneDnnLinear& get() {
    static const OneDnnLinear linear;
    return linear;
  }
  bool available() const { return multiply_.has_value() && add_.has_value(); }
  at::Tensor add(const at::Tensor& sum, const at::Tensor& x, const at::Tensor& weight) const {
    return add_->call(x, sum, weight, std::nullopt, "add");
  }
  at::Tensor operator()(const at::Tensor& x, const at::Tensor& weight) const {
    return multiply_->call(x, weight, std::nullopt, "none", no_scalars_, "");
  }

 private:
  OneDnnLinear() {
    const auto find = [](const char* overload) {
      return c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", overload});
    };
    if (const auto schema = find("")) multiply_ = schema->typed<Signature>();
    if (const auto schema = find("binary")) add_ = schema->typed<AddSignature>();
  }
  std::optional<c10::TypedOperatorHandle<Signature>> multiply_;
  std::optional<c10::TypedOperatorHandle<AddSignature>> add_;
  c10::List<std::optional<at::Scalar>> no_scalars_;
};

class PlainProducts : public Products {
 public:
  PlainProducts(bool onednn, bool onednn_grad_weight)
      : onednn_(onednn), onednn_grad_weight_(onednn_grad_weight) {}

  at::Tensor forward(const Operand& x_NI, const Operand& weight_OI) const override {
    return multiply(x_NI.values, weight_OI.values, onednn_);
  }
  at::Tensor grad_input(const Operand& grad_NO, const Operand& weight_OI) const override {
    return multiply(grad_NO.values, weight_OI.values.t(), onednn_);
  }
  at::Tensor add_grad_input(const at::Tensor& sum_NI, const Operand& grad,
                            const Operand& weight) const override {
    const at::Tensor &grad_NO = grad.values, &weight_OI = weight.values;
    const at::Tensor weight_IO = weight_OI.t();
    if (widens(grad_NO)) return Products::add_grad_input(sum_NI, grad, weight);
    if (uses_onednn(grad_NO, weight_IO, onednn_)) return OneDnnLinear::get().add(sum_NI, grad_NO, weight_IO);
    return sum_NI.addmm_(grad_NO, weight_OI);
  }
  at::Tensor grad_weight(const Operand& grad_NO, const Operand& x_NI) const override {
    return multiply(grad_NO.values.t(), x_NI.values.t(), onednn_grad_weight_);
  }
  void add_grad_weight(const at::Tensor& out_OI, const Operand& grad, const Operand& x) const override {
    const at::Tensor &grad_NO = grad.values, &x_NI = x.values;
    if (widens(grad_NO)) return add_grad_weight(out_OI, grad_NO.to(at::kFloat), x_NI.to(at::kFloat));
    const bool same_dtype = out_OI.scalar_type() == grad_NO.scalar_type();
    if (same_dtype && !uses_onednn(grad_NO.t(), x_NI.t(), onednn_grad_weight_)) {
      out_OI.addmm_(grad_NO.t(), x_NI);
    } else if (!same_dtype && grad_NO.is_cuda() && out_OI.scalar_type() == at::kFloat) {
      at::Tensor out = out_OI;
      at::addmm_out(out, out_OI, grad_NO.t(), x_NI,
                    at::kFloat);  // in place: LibTorch copies only other tensors
    } else {
      out_OI.add_(grad_weight(grad_NO, x_NI));
    }
  }
  bool put_product(const at::Tensor& out, Pass pass, const Operand& rows,
                   const Operand& weight) const override {
    const at::Tensor factor = pass == Pass::Forward ? weight.values.t() : weight.values;
    if (widens(rows.values) || uses_onednn(rows.values, factor.t(), onednn_)) return false;
    at::Tensor place = out;
    if (out.dim() == 2) {
      at::mm_out(place, rows.values, factor);
      return true;
    }
    if (!out.is_cuda()) return false;
    // One kernel, which steps over the gaps and reads the weight for each b.
    at::bmm_out(place, rows.values.view({out.size(0), out.size(1), -1}),
                factor.expand({out.size(0), -1, -1}));
    return true;
  }
  // On CPUs a gradient in 16 bits is rounded before it is added, as PyTorch's is.
  bool put_grad_weight(const at::Tensor& out_OI, const Operand& grad, const Operand& x,
                       bool adds) const override {
    const at::Tensor &grad_NO = grad.values, &x_NI = x.values;
    const bool same_dtype = out_OI.scalar_type() == grad_NO.scalar_type();
    if (!grad_NO.is_cuda() || !(same_dtype || out_OI.scalar_type() == at::kFloat)) return false;
    at::Tensor out = out_OI;
    if (adds) {
      add_grad_weight(out_OI, grad, x);
    } else if (same_dtype) {
      at::mm_out(out, grad_NO.t(), x_NI);
    } else {
      at::mm_out(out, grad_NO.t(), x_NI, at::kFloat);
    }
    return true;
  }

 private:
  static bool widens(const at::Tensor& a) {
    const bool is_16bit = a.scalar_type() == at::kBFloat16 || a.scalar_type() == at::kHalf;
    return a.is_cpu() && is_16bit && !cpu_features().fast_16bit_products;
  }
  static bool uses_onednn(const at::Tensor& a_NK, const at::Tensor& b_MK, bool wanted) {
    return wanted && a_NK.is_cpu() && a_NK.scalar_type() == at::kFloat &&
           a_NK.numel() * b_MK.size(0) >= kSmallProduct;
  }
  // a [N, K] b^T [K, M]
  static at::Tensor multiply(const at::Tensor& a, const at::Tensor& b, bool onednn) {
    if (widens(a)) return multiply(a.to(at::kFloat), b.to(at::kFloat), onednn).to(a.scalar_type());
    return uses_onednn(a, b, onednn) ? OneDnnLinear::get()(a, b) : at::mm(a, b.t());
  }

  bool onednn_, onednn_grad_weight_;
};

}  // namespace

SharedProducts default_products(CpuMatmul policy) {
  static const auto mkl = std::make_shared<const PlainProducts>(false, false);
  static const auto onednn = std::make_shared<const PlainProducts>(true, true);
  static const auto onednn_but_grad_weight = std::make_shared<const PlainProducts>(true, false);
  if (policy == CpuMatmul::Mkl || !OneDnnLinear::get().available()) return mkl;
  if (policy == CpuMatmul::OneDnn) return onednn;
  if (!cpu_features().amd) return mkl;
  return cpu_features().avx512 ? onednn : onednn_but_grad_weight;
}

void describe(config::Table<OpsSettings>& table) {
  table.field(
      "cpu_matmul", &OpsSettings::cpu_matmul,
      "library of fp32 products on CPUs; \"auto\" chooses by processor, so that reruns stay bit-equal",
      config::one_of({"auto", "mkl", "onednn"}));
  table.field(
      "kernels", &OpsSettings::kernels,
      "\"reference\" computes norms, rotary positions, SwiGLU, attention, the loss, Float8's casts and "
      "optimizer.state_dtype's steps by LibTorch's operations in place of LibTitan's kernels: slower, to "
      "find "
      "out whether a kernel is at fault",
      config::one_of({"auto", "reference"}));
}

CpuMatmul OpsSettings::cpu_matmul_policy() const {
  if (cpu_matmul == "mkl") return CpuMatmul::Mkl;
  if (cpu_matmul == "onednn") return CpuMatmul::OneDnn;
  return CpuMatmul::Auto;
}

// ---- layers

namespace {

std::vector<size_t> leaders_of(const ProductsOfEach& products) {
  std::vector<size_t> leaders;
  for (size_t i = 0; i < products.size(); ++i) {
    size_t leader = 0;
    while (leader < i && !(leaders[leader] == leader && products[i]->joins(*products[leader]))) ++leader;
    leaders.push_back(leader);
  }
  return leaders;
}

const char* op_name(size_t num_layers) { return num_layers == 1 ? "linear" : "joint_linears"; }

struct LinearsBackward final : JointNode {
  std::vector<int64_t> x_sizes;

  void backward(const variable_list& grads, variable_list& results) override {
    both_gradients(grads, results, x_sizes);
    const size_t bias = weights.size() + 1;
    if (bias < results.size() && task_should_compute_output(bias)) results[bias] = as_rows(grads[0]).sum(0);
  }
  std::string name() const override { return std::string("titan::") + op_name(weights.size()) + " backward"; }
};

}  // namespace

std::vector<at::Tensor> joint_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                      const ProductsOfEach& products, const at::Tensor& bias) {
  for (const SinkedWeight& each : weights) check_linear_shapes(op_name(weights.size()), x, each.weight);
  const auto node = make_joint_node<LinearsBackward>(x, weights, products, bias);
  const std::vector<bool> keeps = keeps_of(node, weights);
  JointInput input(products, keeps, SavedInput::recomputes(x));
  const Operand rows = below_autograd([&] { return as_rows(x); });
  for (size_t i = 0; i < weights.size(); ++i) input.scaled(i, rows);
  if (any_of(keeps)) node->x.save(x, rows, input);  // before the products ([Note: kept outputs])
  if (node) node->x_sizes = x.sizes().vec();
  ForwardWeights read(weights, products);
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < weights.size(); ++i) {
    outputs.push_back(kept(KeptKind::Product, weights[i].weight, [&] {
      const at::Tensor y = products[i]->forward(input.cast(i, rows), read.take(i));
      if (bias.defined()) y.add_(bias);
      return y.view(with_features(x.sizes(), weights[i].weight.size(0)));
    }));
  }
  if (node)
    for (at::Tensor& output : outputs) set_history(output, node);
  return outputs;
}

at::Tensor linear(const at::Tensor& x, const SinkedWeight& weight, const at::Tensor& bias,
                  const SharedProducts& products) {
  return joint_linears(x, {weight}, {products}, bias)[0];
}

JointInput::JointInput(const ProductsOfEach& products, const std::vector<bool>& keeps, bool recomputed)
    : products_(products),
      leaders_(leaders_of(products)),
      forms_(products.size()),
      trains_(at::GradMode::is_enabled()) {
  for (size_t i = 0; i < products.size(); ++i) {
    Form& form = forms_[leaders_[i]];
    form.keeps = form.keeps || keeps[i];
  }
  const auto keeps_form = [](const Form& form) { return form.keeps; };
  const bool one = std::count_if(forms_.begin(), forms_.end(), keeps_form) == 1;
  if (!one || recomputed || saved_tensors_are_dropped()) return;
  std::find_if(forms_.begin(), forms_.end(), keeps_form)->is_kept = true;
}

ForwardWeights::ForwardWeights(const std::vector<SinkedWeight>& weights, const ProductsOfEach& products)
    : weights_(weights) {
  if (weights.size() == 1 || SavedOutputs::current()) return;
  std::vector<const Products*> readers;
  for (size_t i = 0; i < weights.size(); ++i) {
    operands_.push_back(operand_of(weights[i]));
    readers.push_back(products[i].get());
  }
  cast_weights(readers, operands_, Pass::Forward);
}

Operand ForwardWeights::take(size_t i) {
  return operands_.empty() ? operand_of(weights_[i]) : std::exchange(operands_[i], {});
}

bool JointInput::alike() const {
  return std::all_of(leaders_.begin(), leaders_.end(), [](size_t leader) { return leader == 0; });
}

const Operand& JointInput::scaled(size_t i, const Operand& rows) {
  BelowAutograd guard;
  Form& form = forms_[leaders_[i]];
  if (form.operand) return *form.operand;
  const Products& products = *products_[leaders_[i]];
  form.operand = form.is_kept ? products.scaled_to_keep(rows, trains_) : products.scaled(rows, trains_);
  return *form.operand;
}

const Operand& JointInput::cast(size_t i, const Operand& rows) {
  BelowAutograd guard;
  Form& form = forms_[leaders_[i]];
  const Operand& scaled = this->scaled(i, rows);
  if (!form.is_cast) form.operand = products_[leaders_[i]]->input(scaled, trains_);
  form.is_cast = true;
  return *form.operand;
}

void KeptJointInput::save(const at::Tensor& x, const Operand& rows, JointInput& input) {
  leaders_ = input.leaders_;
  std::vector<size_t> kept;
  for (size_t i = 0; i < input.forms_.size(); ++i)
    if (input.forms_[i].keeps) kept.push_back(i);
  if (kept.size() == 1) {
    const Products& products = *input.products_[kept[0]];
    const Operand& form = input.scaled(kept[0], rows);
    saved_ = x.defined() ? SavedInput(x, form, products) : SavedInput(kept_of(form, products));
    return;
  }
  saved_ = SavedInput(x.defined() ? x : rows.values);
  scales_.resize(leaders_.size());
  for (const size_t leader : kept) {
    const at::Tensor& scale = input.scaled(leader, rows).along_rows.scale;
    if (scale.defined() && scale.dim() == 0) scales_[leader] = save_input(scale);  // the whole matrix's scale
  }
}

void KeptJointInput::reset_data() {
  saved_.reset_data();
  for (SavedVariable& scale : scales_) scale.reset_data();
}

void KeptJointInput::unpack(const at::Tensor& grad) {
  if (unpacked_) return;
  unpacked_ = Unpacked{as_rows(saved_.unpack(grad)), {}, {}};
  unpacked_->forms.resize(leaders_.size());
  for (const SavedVariable& scale : scales_) unpacked_->scales.push_back(scale.unpack());
}

const Operand& KeptJointInput::of(size_t i, const ProductsOfEach& products) {
  const size_t leader = leaders_[i];
  std::optional<Operand>& form = unpacked_->forms[leader];
  if (!form) {
    Operand rows = unpacked_->rows;
    if (!scales_.empty()) rows.along_rows.scale = unpacked_->scales[leader];
    form = products[leader]->kept(rows);
  }
  return *form;
}

}  // namespace titan::ops
