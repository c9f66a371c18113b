#pragma once

// Containers whose children are called through their holders, so that hooks run; and LayerSequence, a model
// that names the modules it calls one after the other, so that a pipeline stage can have some of them.
//
//   class TinyImpl : public nn::Module, public nn::LayerSequence {
//    public:
//     TinyImpl() {
//       register_module("embedding", embedding);
//       register_module("layers", layers.ptr());
//       register_module("head", head);
//       call_in_order({part("embedding", embedding), part("layers", layers), part("head", head)});
//     }
//     at::Tensor forward(const at::Tensor& input) {
//       at::Tensor h = embedding ? embedding(input) : input;  // another stage's modules are empty here
//       for (const Layer& layer : layers) h = layer(h);
//       return head ? head(h) : h;
//     }
//     nn::Embedding embedding; nn::ModuleList<Layer> layers; nn::Linear head;
//   };

#include <cstddef>

#include "titan/nn/module.h"

namespace titan::nn {

/// A container of layers whose elements can be removed: a pipeline stage keeps some of them, under their
/// names in the whole model.
class LayerList {
 public:
  virtual ~LayerList() = default;
  /// The elements' names, in call order.
  const std::vector<std::string>& names() const { return names_; }
  /// The number of elements erased before the first one left.
  int64_t first_number() const { return first_number_; }
  virtual void erase(const std::string& name) = 0;

 protected:
  /// The default name of the next element.
  std::string next_name() const {
    return std::to_string(first_number_ + static_cast<int64_t>(names_.size()));
  }
  void note_added(const std::string& name) { names_.push_back(name); }
  /// Returns the element's position. Throws Error if there is none.
  ptrdiff_t note_erased(const std::string& name);

 private:
  std::vector<std::string> names_;
  int64_t first_number_ = 0;
};

/// Modules of one type, in order. Children are named "0", "1", ..., or as given.
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
  /// In a pipeline stage, the position of the first element in the whole model.
  int64_t first_number() const { return this->ptr()->first_number(); }
  RefType& operator[](size_t i) const { return all().at(i); }
  auto begin() const { return all().begin(); }
  auto end() const { return all().end(); }

 private:
  std::vector<RefType>& all() const { return this->ptr()->modules(); }
};

/// Modules from one tensor to one tensor, called one after the other. Children are named "0", "1", ....
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

/// A parameter that several modules of a sequence use (tied embeddings).
struct SharedParameter {
  std::string name;                  ///< its first name, in registration order, in the whole model
  std::vector<std::string> modules;  ///< modules of the sequence, in call order: "tok_embeddings", "output"
  ParamInit init;                    ///< the last declaration; its name is "" if there is none
  at::Tensor parameter;
};

/// A model that calls a list of modules one after the other.
class LayerSequence {
 public:
  virtual ~LayerSequence() = default;

  /// Dotted names of the present modules, in call order: modules before the first list, elements of lists
  /// (and modules between lists), modules after the last list. A model without lists has only layers.
  struct Names {
    std::vector<std::string> before, layers, after;
    std::vector<std::string> all() const;
  };
  Names layer_names() const;

  /// Drops all modules of the sequence except these, which must be consecutive in it. Names stay as in the
  /// whole model. Call it before any wrapper; in a deferred model, dropped modules never have memory. A
  /// parameter that a dropped module shares with a kept one stays, with its name and values in the whole
  /// model, and shared_parameters() lists it. Throws ConfigError for names that aren't in the sequence or
  /// leave a gap.
  void keep_layers(const std::vector<std::string>& names);

  bool is_first() const { return first_; }  ///< has the first module, so takes the model's input
  bool is_last() const { return last_; }    ///< has the last module, so returns the model's output
  bool is_whole() const { return first_ && last_; }

  /// The names of dropped modules and of all modules below them.
  const std::vector<std::string>& dropped_modules() const { return dropped_; }

  /// Parameters that several modules of the sequence use, including dropped modules.
  std::vector<SharedParameter> shared_parameters() const;

 protected:
  struct Part {
    std::string name;
    LayerList* list = nullptr;     // null: a single module
    std::function<void()> forget;  // for a single module: empties the model's holder
  };

  template <class Impl>
  static Part part(std::string name, Ref<Impl>& module) {
    if constexpr (std::derived_from<Impl, LayerList>) {
      return {std::move(name), module.get(), {}};
    } else {
      return {std::move(name), nullptr, [&module] { module = Ref<Impl>(nullptr); }};
    }
  }
  template <class RefType>
  static Part part(std::string name, ModuleList<RefType>& list) {
    return {std::move(name), list.get(), {}};
  }

  /// Call it once, in the constructor, with children of this module under their registered names.
  void call_in_order(std::vector<Part> parts) { parts_ = std::move(parts); }

  /// Called after keep_layers(). A model may drop modules here that only dropped layers used.
  virtual void layers_dropped() {}

 private:
  torch::nn::Module& module() const;
  void drop(const Part& part, const std::string& name);
  std::vector<SharedParameter> find_shared() const;

  std::vector<Part> parts_;
  bool first_ = true, last_ = true;
  std::vector<std::string> dropped_;
  std::vector<SharedParameter> shared_;  // shared with dropped modules
};

/// The sequence of a model, or null.
LayerSequence* layer_sequence(const AnyRef& model);

}  // namespace titan::nn
