#include "titan/ops/linear.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>

#include "ops/joint_node.h"
#include "ops/saved_outputs.h"

namespace titan::ops {

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

bool is_of_the_whole(const at::Tensor& scale) { return scale.defined() && scale.dim() == 0; }

}  // namespace

JointInput::JointInput(const ProductsOfEach& products, const std::vector<bool>& keeps)
    : products_(products),
      leaders_(leaders_of(products)),
      forms_(products.size()),
      trains_(at::GradMode::is_enabled()) {
  for (size_t i = 0; i < products.size(); ++i) {
    Form& form = forms_[leaders_[i]];
    form.keeps = form.keeps || keeps[i];
  }
}

bool JointInput::alike() const {
  return std::all_of(leaders_.begin(), leaders_.end(), [](size_t leader) { return leader == 0; });
}

const Operand& JointInput::scaled(size_t i, const Operand& rows) {
  BelowAutograd guard;
  Form& form = forms_[leaders_[i]];
  if (!form.operand) form.operand = products_[leaders_[i]]->scaled(rows, trains_);
  return *form.operand;
}

const Operand& JointInput::cast(size_t i, const Operand& rows) {
  BelowAutograd guard;
  Form& form = forms_[leaders_[i]];
  if (!form.is_cast) form.operand = products_[leaders_[i]]->input(scaled(i, rows), trains_);
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
    if (is_of_the_whole(scale)) scales_[leader] = save_input(scale);
  }
}

void KeptJointInput::reset_data() {
  saved_.reset_data();
  for (SavedVariable& scale : scales_) scale.reset_data();
}

void KeptJointInput::unpack() {
  if (unpacked_) return;
  unpacked_ = Unpacked{as_rows(saved_.unpack()), {}, {}};
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

void KeptJointInput::forget_unpacked() { unpacked_.reset(); }

namespace {

std::vector<int64_t> with_last(at::IntArrayRef sizes, int64_t last) {
  std::vector<int64_t> result = sizes.vec();
  result.back() = last;
  return result;
}

struct LinearBackward final : BackwardNode {
  enum Input : size_t { X, Weight, Bias };
  SavedInput x;
  SavedVariable weight;
  std::vector<int64_t> x_sizes;
  std::shared_ptr<const Products> products;
  std::shared_ptr<GradSink> weight_sink;
  std::shared_ptr<const WeightSource> weight_source;

  variable_list backward(const at::Tensor& grad) override {
    variable_list grads(3);
    const bool wants_x = task_should_compute_output(X), wants_weight = task_should_compute_output(Weight);
    const at::Tensor grad_NO = as_rows(grad);
    const Operand operand = products->grad(grad_NO, wants_x, wants_weight);
    if (wants_x) grads[X] = products->grad_input(operand, unpacked(weight, weight_source)).view(x_sizes);
    if (wants_weight) grads[Weight] = weight_gradient(products, weight_sink, operand, as_rows(x.unpack()));
    if (task_should_compute_output(Bias)) grads[Bias] = grad_NO.sum(0);
    return grads;
  }
  void release_variables() override {
    x.reset_data();
    weight.reset_data();
  }
  std::string name() const override { return "titan::linear backward"; }
};

void check_shapes(const at::Tensor& x, const at::Tensor& weight) {
  TITAN_CHECK(weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1), "linear: x ", x.sizes(),
              " doesn't fit weight ", weight.sizes(), "; expected [..., in] and [out, in]");
  TITAN_CHECK(x.scalar_type() == weight.scalar_type(), "linear: x is ", x.scalar_type(), ", the weight ",
              weight.scalar_type());
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                  const std::shared_ptr<const Products>& products,
                  const std::shared_ptr<GradSink>& weight_sink,
                  const std::shared_ptr<const WeightSource>& weight_source) {
  check_shapes(x, weight);
  const bool keeps = compute_requires_grad(weight);
  Operand input;
  {
    BelowAutograd guard;
    input = products->scaled(as_rows(x), at::GradMode::is_enabled());
  }
  std::shared_ptr<LinearBackward> node;
  if (compute_requires_grad(x, weight, bias)) {
    // Before the product ([Note: kept outputs]).
    node = make_node<LinearBackward>(x, weight, bias);
    if (keeps) node->x = SavedInput(x, input, *products);
    if (x.requires_grad() && !weight_source) node->weight = save_input(weight);
    node->x_sizes = x.sizes().vec();
    node->products = products;
    node->weight_sink = weight_sink;
    node->weight_source = weight_source;
  }
  const at::Tensor y = kept(KeptKind::Product, weight, [&] {
    BelowAutograd guard;
    const at::Tensor rows = products->forward(input, weight_source ? weight_source->weight() : weight);
    if (bias.defined()) rows.add_(bias);
    return rows.view(with_last(x.sizes(), weight.size(0)));
  });
  if (node) set_history(y, node);
  return y;
}

namespace {

struct JointLinearsBackward final : JointNode {
  std::vector<int64_t> x_sizes;

  void backward(const variable_list& grads, variable_list& results) override {
    const at::Tensor grad_x = both_gradients(grads, results);
    if (grad_x.defined()) results[0] = grad_x.view(x_sizes);
  }
  std::string name() const override { return "titan::joint_linears backward"; }
};

void check_joint_shapes(const at::Tensor& x, const at::Tensor& weight) {
  TITAN_CHECK(weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1), "joint_linears: x ",
              x.sizes(), " doesn't fit weight ", weight.sizes(), "; expected [..., in] and [out, in]");
  TITAN_CHECK(x.scalar_type() == weight.scalar_type(), "joint_linears: x is ", x.scalar_type(),
              ", the weight ", weight.scalar_type());
}

}  // namespace

std::vector<at::Tensor> joint_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                      const ProductsOfEach& products) {
  for (const SinkedWeight& each : weights) check_joint_shapes(x, each.weight);
  const auto node = make_joint_node<JointLinearsBackward>(x, weights, products);
  const std::vector<bool> keeps = keeps_of(node, weights);
  JointInput input(products, keeps);
  Operand rows;
  {
    BelowAutograd guard;
    rows = as_rows(x);
  }
  for (size_t i = 0; i < weights.size(); ++i) input.scaled(i, rows);
  if (keeps_any(keeps)) node->x.save(x, rows, input);  // before the products ([Note: kept outputs])
  if (node) node->x_sizes = x.sizes().vec();
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < weights.size(); ++i) {
    outputs.push_back(kept(KeptKind::Product, weights[i].weight, [&] {
      BelowAutograd guard;
      std::vector<int64_t> sizes = x.sizes().vec();
      sizes.back() = weights[i].weight.size(0);
      return products[i]->forward(input.cast(i, rows), operand_of(weights[i])).view(sizes);
    }));
  }
  if (node)
    for (at::Tensor& output : outputs) torch::autograd::set_history(output, node);
  return outputs;
}

std::vector<at::Tensor> joint_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                      const std::shared_ptr<const Products>& products) {
  return joint_linears(x, weights, ProductsOfEach(weights.size(), products));
}

}  // namespace titan::ops
