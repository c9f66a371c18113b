// Applies a plan's styles to the modules whose names match: cuts parameters and installs conversions.

#include "titan/parallel/tensor_parallel.h"

#include <fnmatch.h>

#include <algorithm>
#include <map>
#include <ostream>
#include <set>

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include "parallel/interned.h"
#include "parallel/tensor/conversion.h"
#include "parallel/tensor/exchanges.h"
#include "parallel/tensor/split_params.h"
#include "tensor/memory.h"
#include "titan/core/error.h"
#include "titan/nn/containers.h"
#include "titan/nn/layers.h"

namespace titan {

namespace {

using tp::Conversion;
using tp::ConversionHook;
using tp::PartOfParam;
using tp::SplitParams;

// Matches component by component: FNM_PATHNAME keeps a "*" within one. The root's name "" matches only "".
bool matches(std::string pattern, std::string name) {
  if (pattern.empty() != name.empty()) return false;
  std::replace(pattern.begin(), pattern.end(), '.', '/');
  std::replace(name.begin(), name.end(), '.', '/');
  return ::fnmatch(pattern.c_str(), name.c_str(), FNM_PATHNAME) == 0;
}

const char* name_of(const ParallelStyle& style) {
  constexpr const char* kNames[] = {"Colwise", "Rowwise", "SequenceParallel", "PrepareInput",
                                    "PrepareOutput"};
  static_assert(std::size(kNames) == std::variant_size_v<ParallelStyle>);
  return kNames[style.index()];
}

struct NamedModule {
  std::string name;  ///< dotted, "" for the root
  torch::nn::Module* module;
};

std::vector<NamedModule> modules_of(const nn::AnyRef& root) {
  std::vector<NamedModule> modules;
  for (const auto& named : root.module().named_modules())
    modules.push_back({named.key(), named.value().get()});
  return modules;
}

// How modules of LibTorch are cut.
std::vector<nn::ParamSplit> default_splits(torch::nn::Module& module, nn::Split split,
                                           const std::string& name) {
  if (dynamic_cast<torch::nn::EmbeddingImpl*>(&module))
    throw ConfigError(str("parallelize: module '", name,
                          "' is LibTorch's embedding, which looks up whole tokens only; use nn::Embedding"));
  std::vector<nn::ParamSplit> splits;
  for (const auto& param : module.named_parameters(/*recurse=*/false)) {
    const bool is_weight = param.key() == "weight" && param.value().dim() == 2;
    const bool is_bias = param.key() == "bias" && param.value().dim() == 1;
    if (!is_weight && !(is_bias && split == nn::Split::Columns))
      throw ConfigError(titan::str("parallelize: don't know how to cut parameter '", param.key(), "' ",
                                   param.value().sizes(), " of module '", name, "' by ",
                                   split == nn::Split::Columns ? "columns" : "rows",
                                   "; the module must implement nn::Splittable"));
    splits.push_back({param.key(), is_weight && split == nn::Split::Rows ? 1 : 0});
  }
  return splits;
}

// Sums the gradient of `param` over the axis when autograd delivers it, unless the parameter is in a group of
// fully_shard, which sums it itself.
void sum_gradient(nn::HookHost& host, const at::Tensor& param, std::shared_ptr<const tp::TpGroup> group,
                  const char* module) {
  const std::weak_ptr<torch::nn::Module> owner = host.as_module().weak_from_this();
  const auto sum = [owner, group = std::move(group), module](const at::Tensor& gradient) {
    TITAN_CHECK(
        !at::GradMode::is_enabled(), "the gradient of module '", module,
        "' over tensor-parallel ranks has no second derivative: call backward with create_graph = false");
    const auto alive = owner.lock();
    const auto* host = dynamic_cast<const nn::HookHost*>(alive.get());
    if (host && host->param_owner) return gradient;
    return group->all_reduce(gradient, {"tp::gradient", module});
  };
  // A frozen parameter may become trainable later.
  const bool trainable = param.requires_grad();
  at::Tensor(param).set_requires_grad(true);
  param.register_hook(sum);
  at::Tensor(param).set_requires_grad(trainable);
}

bool same_way(const PartOfParam& a, const PartOfParam& b) {
  return a.placement == b.placement && a.gradient_is_summand == b.gradient_is_summand;
}

std::string described(const PartOfParam& part) {
  return str(part.placement, part.gradient_is_summand ? " with summed gradients" : "");
}

// Null for a parameter that is in no plan.
const PartOfParam* known_part(torch::nn::Module& module, const std::string& name) {
  const SplitParams* split = tp::split_params(dynamic_cast<const nn::HookHost*>(&module));
  return split ? split->find(name) : nullptr;
}

// Cuts parameters down to this rank's parts, shared ones once.
class ParamCutter {
 public:
  /// Starts with the cuts that earlier calls of parallelize() made in these modules.
  ParamCutter(DeviceMesh axis, std::shared_ptr<const tp::TpGroup> group,
              const std::vector<NamedModule>& modules)
      : axis_(std::move(axis)), group_(std::move(group)) {
    for (const NamedModule& named : modules)
      for (const auto& param : named.module->named_parameters(/*recurse=*/false))
        if (const PartOfParam* part = known_part(*named.module, param.key()))
          cut_.try_emplace(param.value().unsafeGetTensorImpl(), Cut{*part, named.name});
  }

  /// `tensor` is parameter `param` of the module `host`, whose name is `name`. Throws ConfigError if another
  /// module shares the parameter and has cut it differently.
  PartOfParam cut(nn::HookHost& host, const std::string& name, const at::Tensor& tensor,
                  const nn::ParamSplit& param) {
    PartOfParam part{param.name, param.dim < 0 ? Placement::replicate() : Placement::shard(param.dim),
                     tensor.sizes().vec(), param.gradient_is_summand};
    const auto [known, is_new] = cut_.try_emplace(tensor.unsafeGetTensorImpl(), Cut{part, name});
    if (is_new) {
      if (part.gradient_is_summand) sum_gradient(host, tensor, group_, interned(name));
      if (part.placement.is_shard()) shrink(tensor, param.dim);
      return part;
    }
    const Cut& other = known->second;
    if (!same_way(other.part, part))
      throw ConfigError(str("parallelize: modules '", other.module, "' and '", name, "' share parameter '",
                            param.name, "' but are cut differently: ", described(other.part), " and ",
                            described(part)));
    part.global_shape = other.part.global_shape;
    return part;
  }

  /// Adds a problem for each module that isn't cut but shares a parameter with a module that is.
  void check_users(const std::vector<NamedModule>& modules, std::vector<std::string>& problems) const {
    for (const NamedModule& named : modules)
      for (const auto& param : named.module->named_parameters(/*recurse=*/false)) {
        const auto cut = cut_.find(param.value().unsafeGetTensorImpl());
        if (cut == cut_.end() || known_part(*named.module, param.key())) continue;
        problems.push_back(str("parallelize: module '", named.name, "' shares its parameter '", param.key(),
                               "' with '", cut->second.module, "', which the plan cuts (",
                               described(cut->second.part), "); add a plan entry for it"));
      }
  }

 private:
  struct Cut {
    PartOfParam part;
    std::string module;
  };
  void shrink(const at::Tensor& tensor, int64_t dim) const {
    at::NoGradGuard no_grad;
    const Chunk mine = chunk_of(tensor.size(dim), axis_.size(), axis_.rank());
    std::vector<int64_t> sizes = tensor.sizes().vec();
    sizes[static_cast<size_t>(dim)] = mine.length;
    const at::Tensor part =
        is_deferred(tensor)
            ? deferred_tensor(sizes, tensor.options())
            : tensor.detach().narrow(dim, mine.offset, mine.length).clone(at::MemoryFormat::Contiguous);
    at::Tensor(tensor).set_data(part);
  }

  DeviceMesh axis_;
  std::shared_ptr<const tp::TpGroup> group_;
  std::map<const c10::TensorImpl*, Cut> cut_;
};

// Applies one plan to one tree of modules.
class Parallelizer {
 public:
  Parallelizer(const nn::AnyRef& root, const DeviceMesh& axis, OverlapTransport transport)
      : axis_(axis),
        transport_(transport),
        group_(std::make_shared<tp::TpGroup>(axis)),
        modules_(modules_of(root)),
        sequence_(nn::layer_sequence(root)),
        cutter_(axis, group_, modules_) {}

  void apply(const TensorPlan& plan) {
    std::vector<std::string> problems;
    for (const PlanEntry& entry : plan) {
      try {
        apply(entry);
      } catch (const ConfigError& error) {
        problems.insert(problems.end(), error.problems().begin(), error.problems().end());
      }
    }
    cutter_.check_users(modules_, problems);
    if (!problems.empty()) throw ConfigError(std::move(problems));
  }

 private:
  void apply(const PlanEntry& entry) {
    bool matched = false;
    std::set<const torch::nn::Module*> done;  // a module may be registered under two names
    for (const NamedModule& named : modules_) {
      if (!matches(entry.modules, named.name)) continue;
      matched = true;
      if (!done.insert(named.module).second) continue;
      auto* host = dynamic_cast<nn::HookHost*>(named.module);
      if (!host)
        throw ConfigError(str("parallelize: module '", named.name, "' of plan entry '", entry.modules,
                              "' isn't called through nn::Ref (it doesn't inherit nn::HookHost)"));
      if (host->param_owner)
        throw ConfigError(str("parallelize: module '", named.name,
                              "' is sharded already; call parallelize before fully_shard"));
      name_ = named.name.empty() ? "(root)" : named.name;
      style_ = name_of(entry.style);
      std::visit([&](const auto& style) { this->apply(*host, style); }, entry.style);
    }
    if (!matched && !is_of_another_stage(entry.modules))
      throw ConfigError(str("parallelize: plan entry '", entry.modules,
                            "' matches no module; the modules are ", some_names()));
  }

  void apply(nn::HookHost& host, const Colwise& style) {
    const int64_t whole = split(host, nn::Split::Columns);
    Conversion in = conversion(style.input, ActivationLayout::replicate()),
               out = conversion(ActivationLayout::shard(-1), style.output, whole);
    note_layouts(host, in, out);
    if (style.overlap && !stays_apart(host))
      return overlap(host, nn::Split::Columns, style.input, style.output == ActivationLayout::shard(-1));
    put(host.prepare_input_hook, std::move(in), {0}, "inputs");
    put(host.prepare_output_hook, std::move(out), {0}, "outputs");
    if (auto* head = dynamic_cast<nn::LinearCrossEntropyImpl*>(&host))
      head->set_gather_logits(style.output.kind != ActivationLayout::Kind::Shard);
  }
  void apply(nn::HookHost& host, const Rowwise& style) {
    const int64_t whole = split(host, nn::Split::Rows);
    Conversion in = conversion(style.input, ActivationLayout::shard(-1), whole),
               out = conversion(ActivationLayout::partial(), style.output);
    note_layouts(host, in, out);
    if (style.overlap && !stays_apart(host))
      return overlap(host, nn::Split::Rows, style.output, style.input == ActivationLayout::shard(-1));
    put(host.prepare_input_hook, std::move(in), {0}, "inputs");
    put(host.prepare_output_hook, std::move(out), {0}, "outputs");
  }
  void apply(nn::HookHost& host, const SequenceParallel& /*style*/) {
    std::set<const torch::nn::Module*> done;
    keep_whole(host.as_module(), name_, done);
  }
  void apply(nn::HookHost& host, const PrepareInput& style) {
    check_numbers(style.tensors, name_);
    put(host.prepare_input_hook, conversion(style.from, style.to), style.tensors, "inputs");
  }
  void apply(nn::HookHost& host, const PrepareOutput& style) {
    check_numbers(style.tensors, name_);
    put(host.prepare_output_hook, conversion(style.from, style.to), style.tensors, "outputs");
  }

  // Whether the layer keeps its own collectives: AtOnce supports only an nn::Linear without bias.
  bool stays_apart(nn::HookHost& host) const {
    const auto* linear = dynamic_cast<nn::LinearImpl*>(&host);
    return transport_ == OverlapTransport::AtOnce && (!linear || linear->bias.defined());
  }

  // All modules have the same transport: nn::linears() compares it to decide which layers gather together.
  void overlap(nn::HookHost& host, nn::Split split, ActivationLayout sequence, bool plain_features) {
    auto* linear = dynamic_cast<nn::LinearImpl*>(&host);
    if (!linear || linear->bias.defined() || sequence != ActivationLayout::shard(1) || !plain_features)
      throw ConfigError(
          str("parallelize: module '", name_,
              "' can't overlap its communication: this needs an nn::Linear without bias, Colwise with "
              "input Shard(1) or Rowwise with output Shard(1), and sharded features"));
    if (!make_exchange_)
      make_exchange_ = transport_ == OverlapTransport::AtOnce ? tp::collective_exchange(group_)
                                                              : tp::choose_exchange(axis_, transport_);
    const tp::CountedExchange made = make_exchange_(interned(name_));
    linear->set_exchange(split, made.exchange);
    const bool gathers = split == nn::Split::Columns;
    SplitParams& parts = parts_of(host);
    parts.exchanged = made.traffic;
    parts.exchanged_collectives = gathers ? "all-gather / reduce-scatter" : "reduce-scatter / all-gather";
  }

  // The record that split() made of a module.
  static SplitParams& parts_of(nn::HookHost& host) { return dynamic_cast<SplitParams&>(*host.param_parts); }
  static void note_layouts(nn::HookHost& host, const Conversion& in, const Conversion& out) {
    const bool takes_tokens = dynamic_cast<nn::EmbeddingImpl*>(&host);
    const std::string input = takes_tokens ? "" : str("in ", in.layouts(), "; ");
    parts_of(host).layouts = str(input, "out ", out.layouts());
  }

  static void check_numbers(const std::vector<size_t>& tensors, const std::string& name) {
    const std::set<size_t> numbers(tensors.begin(), tensors.end());
    if (tensors.empty() || numbers.size() != tensors.size())
      throw ConfigError(str("parallelize: `tensors` for module '", name, "' ",
                            tensors.empty() ? "is empty" : "has duplicate numbers"));
  }

  Conversion conversion(ActivationLayout from, ActivationLayout to, int64_t whole = -1) const {
    return Conversion(from, to, group_, interned(name_), whole);
  }

  void put(std::shared_ptr<nn::CallHook>& slot, Conversion conversion, std::vector<size_t> tensors,
           const char* what) const {
    if (conversion.does_nothing()) return;
    if (slot)
      throw ConfigError(
          str("parallelize: another hook prepares the ", what, " of module '", name_, "' already"));
    slot = std::make_shared<ConversionHook>(std::move(conversion), std::move(tensors), style_);
  }

  // Returns the whole size of the weight's cut dimension.
  int64_t split(nn::HookHost& host, nn::Split split) {
    if (host.param_parts)
      throw ConfigError(str("parallelize: module '", name_, "' is cut by two entries of the plan"));
    auto* splittable = dynamic_cast<nn::Splittable*>(&host);
    auto& module = host.as_module();
    auto parts = std::make_shared<SplitParams>(axis_, style_);
    int64_t whole = -1;
    for (const nn::ParamSplit& param :
         splittable ? splittable->param_splits(split) : default_splits(module, split, name_)) {
      const at::Tensor tensor = module.named_parameters(/*recurse=*/false)[param.name];
      parts->parts.push_back(cutter_.cut(host, name_, tensor, param));
      if (whole < 0 && param.dim >= 0)
        whole = parts->parts.back().global_shape[static_cast<size_t>(param.dim)];
    }
    if (splittable)
      splittable->set_split(split,
                            std::make_shared<tp::CountedParts>(group_, parts->traffic, interned(name_)));
    host.param_parts = std::move(parts);
    return whole;
  }

  void keep_whole(torch::nn::Module& module, const std::string& name,
                  std::set<const torch::nn::Module*>& done) {
    if (!done.insert(&module).second) return;
    auto* host = dynamic_cast<nn::HookHost*>(&module);
    const auto own = module.named_parameters(/*recurse=*/false);
    if (host && !own.is_empty()) {
      if (host->param_parts)
        throw ConfigError(str("parallelize: module '", name, "' is cut by two entries of the plan"));
      auto parts = std::make_shared<SplitParams>(axis_, style_);
      for (const auto& named : own)
        parts->parts.push_back(cutter_.cut(*host, name, named.value(), {named.key(), -1, true}));
      host->param_parts = std::move(parts);
    }
    if (!host && !own.is_empty())
      throw ConfigError(
          str("parallelize: module '", name, "' has parameters but doesn't inherit nn::HookHost"));
    for (const auto& child : module.named_children())
      keep_whole(*child.value(), str(name, ".", child.key()), done);
  }

  // A plan is for the whole model, but a pipeline stage has only some of its modules.
  bool is_of_another_stage(const std::string& pattern) const {
    if (!sequence_) return false;
    const auto& dropped = sequence_->dropped_modules();
    return std::any_of(dropped.begin(), dropped.end(),
                       [&](const std::string& name) { return matches(pattern, name); });
  }

  std::string some_names() const {
    std::string text;
    size_t count = 0;
    for (const NamedModule& named : modules_) {
      if (named.name.empty()) continue;
      if (++count > 12) return text + ", ...";
      text += str(text.empty() ? "" : ", ", named.name);
    }
    return text.empty() ? "only the root" : text;
  }

  DeviceMesh axis_;
  OverlapTransport transport_;
  std::shared_ptr<const tp::TpGroup> group_;
  std::vector<NamedModule> modules_;
  const nn::LayerSequence* sequence_;  // null: the root doesn't name its layers
  tp::MakeExchange make_exchange_;     // made for the first module that overlaps
  ParamCutter cutter_;
  std::string name_;        // the current module
  const char* style_ = "";  // the current plan entry's style
};

}  // namespace

std::ostream& operator<<(std::ostream& out, const ActivationLayout& layout) {
  constexpr const char* kNames[] = {"Shard", "Replicate", "Invariant", "Partial"};
  out << kNames[static_cast<size_t>(layout.kind)];
  if (layout.kind == ActivationLayout::Kind::Shard) out << "(" << layout.dim << ")";
  return out;
}

void parallelize(const nn::AnyRef& root, const DeviceMesh& axis, const TensorPlan& plan,
                 OverlapTransport transport) {
  TITAN_CHECK(axis.num_axes() <= 1, "parallelize: expected a mesh of one axis, got ", axis.num_axes());
  if (axis.size() == 1) return;
  nn::name_modules(root.module());
  Parallelizer(root, axis, transport).apply(plan);
}

}  // namespace titan
