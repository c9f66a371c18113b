#include "ops/joint_input.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>

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

}  // namespace titan::ops
