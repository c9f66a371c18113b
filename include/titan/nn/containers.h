#pragma once

// Containers whose children are called through their holders, so that hooks run.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "titan/nn/module.h"
#include "titan/nn/ref.h"

namespace titan::nn {

/// A container of layers whose elements can be taken out: a pipeline stage keeps some of them, under the
/// names that they have in the whole model.
class LayerList {
 public:
  virtual ~LayerList() = default;
  /// Of the elements, in call order.
  const std::vector<std::string>& names() const { return names_; }
  /// How many were erased in front of the first that is left.
  int64_t first_number() const { return first_number_; }
  virtual void erase(const std::string& name) = 0;

 protected:
  /// The name of the next element, where nobody gives one.
  std::string next_name() const {
    return std::to_string(first_number_ + static_cast<int64_t>(names_.size()));
  }
  void note_added(const std::string& name) { names_.push_back(name); }
  /// Returns where the element stood. Throws Error when there is none.
  ptrdiff_t note_erased(const std::string& name);

 private:
  std::vector<std::string> names_;
  int64_t first_number_ = 0;
};

/// Modules of one type, in order; children are named "0", "1", ..., or as given.
template <class RefType>
class ModuleListImpl : public Module, public LayerList {
 public:
  void push_back(RefType module) { insert(next_name(), std::move(module)); }
  void insert(const std::string& name, RefType module) {
    register_module(name, module.ptr());
    modules_.push_back(std::move(module));
    note_added(name);
  }
  void erase(const std::string& name) override {
    modules_.erase(modules_.begin() + note_erased(name));
    unregister_module(name);
  }
  std::vector<RefType>& modules() { return modules_; }

 private:
  std::vector<RefType> modules_;
};

/// `for (auto& layer : model->layers) x = layer(x);`
template <class RefType>
class ModuleList : public torch::nn::ModuleHolder<ModuleListImpl<RefType>> {
 public:
  ModuleList()
      : torch::nn::ModuleHolder<ModuleListImpl<RefType>>(std::make_shared<ModuleListImpl<RefType>>()) {}

  void push_back(RefType module) const { this->ptr()->push_back(std::move(module)); }
  void insert(const std::string& name, RefType module) const { this->ptr()->insert(name, std::move(module)); }
  size_t size() const { return all().size(); }
  bool empty() const { return all().empty(); }
  /// Of a pipeline stage's part: the position of its first element in the whole model.
  int64_t first_number() const { return this->ptr()->first_number(); }
  RefType& operator[](size_t i) const { return all().at(i); }
  auto begin() const { return all().begin(); }
  auto end() const { return all().end(); }

 private:
  std::vector<RefType>& all() const { return this->ptr()->modules(); }
};

/// Modules from one tensor to one tensor, called one after the other; children are named "0", "1", ....
class SequentialImpl : public Module, public LayerList {
 public:
  template <class... Refs>
  explicit SequentialImpl(Refs... modules) {
    (push_back(std::move(modules)), ...);
  }
  template <class RefType>
  void push_back(RefType module) {
    const std::string name = next_name();
    register_module(name, module.ptr());
    calls_.push_back([module = std::move(module)](const at::Tensor& x) { return module(x); });
    note_added(name);
  }
  void erase(const std::string& name) override;
  at::Tensor forward(const at::Tensor& x);

 private:
  std::vector<std::function<at::Tensor(const at::Tensor&)>> calls_;
};
TITAN_MODULE(Sequential);

}  // namespace titan::nn
