#pragma once

// LayerSequence: a model that names the modules it calls one after the other, so that a pipeline stage can
// have a part of them.
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
//       at::Tensor h = embedding ? embedding(input) : input;  // what another stage has is empty here
//       for (const Layer& layer : layers) h = layer(h);
//       return head ? head(h) : h;
//     }
//     nn::Embedding embedding; nn::ModuleList<Layer> layers; nn::Linear head;
//   };

#include <concepts>
#include <functional>
#include <string>
#include <vector>

#include "titan/nn/containers.h"
#include "titan/nn/ref.h"

namespace titan::nn {

/// A parameter that several modules of a sequence use (tied embeddings).
struct SharedParameter {
  std::string name;                  ///< in the whole model; the first in registration order
  std::vector<std::string> modules;  ///< of the sequence, in call order: "tok_embeddings", "output"
  ParamInit init;                    ///< the last declaration; its name is "" where there is none
  at::Tensor parameter;
};

class LayerSequence {
 public:
  virtual ~LayerSequence() = default;

  /// Dotted names of what is there, in call order: modules before the first list, elements of lists (and what
  /// stands between lists), modules behind the last list. A model without lists has layers only.
  struct Names {
    std::vector<std::string> before, layers, after;
    std::vector<std::string> all() const;
  };
  Names layer_names() const;

  /// Drops all modules of the sequence but these, which follow one another in it. Names stay those of the
  /// whole model. Before any wrapper; of a deferred model nothing that is dropped ever had memory. A
  /// parameter that a dropped module shares with a kept one stays, is called and drawn as in the whole model,
  /// and is told of by shared_parameters(). Throws ConfigError for names that aren't in the sequence or leave
  /// a gap.
  void keep_layers(const std::vector<std::string>& names);

  bool is_first() const { return first_; }  ///< has the first module: takes what the model takes
  bool is_last() const { return last_; }    ///< has the last module: gives what the model gives
  bool is_whole() const { return first_ && last_; }

  /// The names of dropped modules and of all below them.
  const std::vector<std::string>& dropped_modules() const { return dropped_; }

  /// Parameters that more than one module of the sequence uses; of a part, those of them that are shared with
  /// what was dropped.
  std::vector<SharedParameter> shared_parameters() const;

 protected:
  struct Part {
    std::string name;
    LayerList* list = nullptr;     // null: a module of its own
    std::function<void()> forget;  // of a module: empties the model's handle
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

  /// Once, in the constructor: children of this module under the names they are registered by.
  void call_in_order(std::vector<Part> parts) { parts_ = std::move(parts); }

  /// After keep_layers(): what only dropped layers used may go too.
  virtual void layers_dropped() {}

 private:
  torch::nn::Module& module() const;
  void drop(const Part& part, const std::string& name);
  std::vector<SharedParameter> find_shared() const;

  std::vector<Part> parts_;
  bool first_ = true, last_ = true;
  std::vector<std::string> dropped_;
  std::vector<SharedParameter> shared_;  // with what was dropped
};

/// The sequence of a model, or null.
LayerSequence* layer_sequence(const AnyRef& model);

}  // namespace titan::nn
