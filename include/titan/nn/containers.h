#pragma once

// Containers whose children are called through their holders, so that hooks run.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "titan/nn/module.h"
#include "titan/nn/ref.h"

namespace titan::nn {

/// Modules of one type, in order; children are named "0", "1", ..., or as given (a pipeline stage keeps its
/// layers' global numbers).
template <class RefType>
class ModuleListImpl : public Module {
 public:
  void push_back(RefType module) { insert(std::to_string(modules_.size()), std::move(module)); }
  void insert(const std::string& name, RefType module) {
    register_module(name, module.ptr());
    modules_.push_back(std::move(module));
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
  RefType& operator[](size_t i) const { return all().at(i); }
  auto begin() const { return all().begin(); }
  auto end() const { return all().end(); }

 private:
  std::vector<RefType>& all() const { return this->ptr()->modules(); }
};

/// Modules from one tensor to one tensor, called one after the other; children are named "0", "1", ....
class SequentialImpl : public Module {
 public:
  template <class... Refs>
  explicit SequentialImpl(Refs... modules) {
    (push_back(std::move(modules)), ...);
  }
  template <class RefType>
  void push_back(RefType module) {
    register_module(std::to_string(calls_.size()), module.ptr());
    calls_.push_back([module = std::move(module)](const at::Tensor& x) { return module(x); });
  }
  at::Tensor forward(const at::Tensor& x);

 private:
  std::vector<std::function<at::Tensor(const at::Tensor&)>> calls_;
};
TITAN_MODULE(Sequential);

}  // namespace titan::nn
