#include "titan/ops/linear.h"

#include <ATen/core/grad_mode.h>

#include "ops/joint_node.h"

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

struct LinearsBackward final : JointNode {
  std::vector<int64_t> x_sizes;
  const char* op = nullptr;

  void backward(const variable_list& grads, variable_list& results) override {
    const at::Tensor grad_x = both_gradients(grads, results);
    if (grad_x.defined()) results[0] = grad_x.view(x_sizes);
    const size_t bias = weights.size() + 1;
    if (bias < results.size() && task_should_compute_output(bias)) results[bias] = as_rows(grads[0]).sum(0);
  }
  std::string name() const override { return std::string("titan::") + op + " backward"; }
};

// `bias`: of the only layer, or undefined.
std::vector<at::Tensor> record_linears(const char* op, const at::Tensor& x,
                                       const std::vector<SinkedWeight>& weights,
                                       const ProductsOfEach& products, const at::Tensor& bias) {
  for (const SinkedWeight& each : weights) check_linear_shapes(op, x, each.weight);
  const auto node = make_joint_node<LinearsBackward>(x, weights, products, bias);
  const std::vector<bool> keeps = keeps_of(node, weights);
  JointInput input(products, keeps);
  Operand rows;
  {
    BelowAutograd guard;
    rows = as_rows(x);
  }
  for (size_t i = 0; i < weights.size(); ++i) input.scaled(i, rows);
  if (any_of(keeps)) node->x.save(x, rows, input);  // before the products ([Note: kept outputs])
  if (node) {
    node->x_sizes = x.sizes().vec();
    node->op = op;
  }
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < weights.size(); ++i) {
    outputs.push_back(kept(KeptKind::Product, weights[i].weight, [&] {
      BelowAutograd guard;
      const at::Tensor y = products[i]->forward(input.cast(i, rows), operand_of(weights[i]));
      if (bias.defined()) y.add_(bias);
      return y.view(with_features(x.sizes(), weights[i].weight.size(0)));
    }));
  }
  if (node)
    for (at::Tensor& output : outputs) set_history(output, node);
  return outputs;
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const SinkedWeight& weight, const at::Tensor& bias,
                  const SharedProducts& products) {
  return record_linears("linear", x, {weight}, {products}, bias)[0];
}

std::vector<at::Tensor> joint_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                      const ProductsOfEach& products) {
  return record_linears("joint_linears", x, weights, products, {});
}

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
    if (scale.defined() && scale.dim() == 0) scales_[leader] = save_input(scale);  // of the whole matrix
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

}  // namespace titan::ops
