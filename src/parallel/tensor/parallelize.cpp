#include "titan/parallel/tensor_parallel.h"

#include <fnmatch.h>

#include <algorithm>
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
#include "titan/nn/loss.h"

namespace titan {

namespace {

using tp::Conversion;
using tp::ConversionHook;
using tp::NamedModule;

std::vector<std::string> components(const std::string& name) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (begin <= name.size() && !name.empty()) {
    const size_t end = std::min(name.find('.', begin), name.size());
    parts.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

bool matches(const std::string& pattern, const std::string& name) {
  const auto wanted = components(pattern), given = components(name);
  return std::equal(
      wanted.begin(), wanted.end(), given.begin(), given.end(),
      [](const std::string& p, const std::string& n) { return ::fnmatch(p.c_str(), n.c_str(), 0) == 0; });
}

const char* name_of(const ParallelStyle& style) {
  constexpr const char* kNames[] = {"Colwise", "Rowwise", "SequenceParallel", "PrepareInput",
                                    "PrepareOutput"};
  static_assert(std::size(kNames) == std::variant_size_v<ParallelStyle>);
  return kNames[style.index()];
}

std::vector<NamedModule> modules_of(const nn::AnyRef& root) {
  std::vector<NamedModule> modules{{"", &root.module()}};
  for (const auto& named : root.module().named_modules(/*name_prefix=*/"", /*include_self=*/false))
    modules.push_back({named.key(), named.value().get()});
  return modules;
}

// How torch.nn.Linear is cut.
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
                                   "; the module has to say so (nn::Splittable)"));
    splits.push_back({param.key(), is_weight && split == nn::Split::Rows ? 1 : 0});
  }
  return splits;
}

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
    std::set<const torch::nn::Module*> done;  // one may be registered under two names
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
      throw ConfigError(
          str("parallelize: plan entry '", entry.modules, "' matches no module; there are ", some_names()));
  }

  void apply(nn::HookHost& host, const Colwise& style) {
    const int64_t whole = split(host, nn::Split::Columns);
    Conversion in = conversion(style.input, ActivationLayout::replicate()),
               out = conversion(ActivationLayout::shard(-1), style.output, whole);
    note_layouts(host, in, out);
    if (style.overlap && !stays_apart(host))
      return overlap(host, nn::Split::Columns, style.input, style.output == ActivationLayout::shard(-1));
    prepare_input(host, std::move(in), {0});
    prepare_output(host, std::move(out), {0});
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
    prepare_input(host, std::move(in), {0});
    prepare_output(host, std::move(out), {0});
  }
  void apply(nn::HookHost& host, const SequenceParallel& /*style*/) {
    std::set<const torch::nn::Module*> done;
    keep_whole(host.as_module(), name_, done);
  }
  void apply(nn::HookHost& host, const PrepareInput& style) {
    check_numbers(style.tensors, name_);
    prepare_input(host, conversion(style.from, style.to), style.tensors);
  }
  void apply(nn::HookHost& host, const PrepareOutput& style) {
    check_numbers(style.tensors, name_);
    prepare_output(host, conversion(style.from, style.to), style.tensors);
  }

  // This layer has no `overlap`, and overlapped products take no bias.
  bool stays_apart(nn::HookHost& host) const {
    const auto* linear = dynamic_cast<nn::LinearImpl*>(&host);
    return transport_ == OverlapTransport::AtOnce && (!linear || linear->bias.defined());
  }

  // One transport for all: nn::linears() compares it to decide which layers gather together.
  void overlap(nn::HookHost& host, nn::Split split, ActivationLayout sequence, bool plain_features) {
    auto* linear = dynamic_cast<nn::LinearImpl*>(&host);
    if (!linear || linear->bias.defined() || sequence != ActivationLayout::shard(1) || !plain_features)
      throw ConfigError(
          str("parallelize: module '", name_,
              "' can't overlap its communication: that takes an nn::Linear without bias, columns with "
              "input Shard(1) or rows with output Shard(1), and features in parts"));
    if (!make_exchange_)
      make_exchange_ = transport_ == OverlapTransport::AtOnce ? tp::collective_exchange(group_)
                                                              : tp::choose_exchange(axis_, transport_);
    const tp::CountedExchange made = make_exchange_(interned(name_));
    linear->set_exchange(split, made.exchange);
    const bool gathers = split == nn::Split::Columns;
    parts_of(host).set_exchanged(made.traffic,
                                 gathers ? "all-gather / reduce-scatter" : "reduce-scatter / all-gather");
  }

  // The record that split() made of a module.
  static tp::SplitParams& parts_of(nn::HookHost& host) {
    return dynamic_cast<tp::SplitParams&>(*host.param_parts);
  }
  static void note_layouts(nn::HookHost& host, const Conversion& in, const Conversion& out) {
    const bool takes_tokens = dynamic_cast<nn::EmbeddingImpl*>(&host);
    const std::string input = takes_tokens ? "" : str("in ", in.layouts(), "; ");
    parts_of(host).set_layouts(str(input, "out ", out.layouts()));
  }

  static void check_numbers(const std::vector<size_t>& tensors, const std::string& name) {
    const std::set<size_t> numbers(tensors.begin(), tensors.end());
    if (tensors.empty() || numbers.size() != tensors.size())
      throw ConfigError(str("parallelize: the numbers of the tensors to convert at module '", name, "' are ",
                            tensors.empty() ? "missing" : "not all different"));
  }

  Conversion conversion(ActivationLayout from, ActivationLayout to, int64_t whole = -1) const {
    return Conversion(from, to, group_, interned(name_), whole);
  }

  void prepare_input(nn::HookHost& host, Conversion conversion, std::vector<size_t> tensors) {
    if (!conversion.does_nothing())
      put(host.prepare_input_hook, std::move(conversion), std::move(tensors), "inputs");
  }
  void prepare_output(nn::HookHost& host, Conversion conversion, std::vector<size_t> tensors) {
    if (!conversion.does_nothing())
      put(host.prepare_output_hook, std::move(conversion), std::move(tensors), "outputs");
  }
  void put(std::shared_ptr<nn::CallHook>& slot, Conversion conversion, std::vector<size_t> tensors,
           const char* what) const {
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
    auto parts = std::make_shared<tp::SplitParams>(axis_, style_);
    int64_t whole = -1;
    for (const nn::ParamSplit& param :
         splittable ? splittable->param_splits(split) : default_splits(module, split, name_)) {
      const at::Tensor tensor = module.named_parameters(/*recurse=*/false)[param.name];
      parts->add(cutter_.cut(host, name_, tensor, param));
      if (whole < 0 && param.dim >= 0)
        whole = parts->parts().back().global_shape[static_cast<size_t>(param.dim)];
    }
    if (splittable)
      splittable->set_split(split,
                            std::make_shared<tp::CountedParts>(group_, parts->traffic(), interned(name_)));
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
      auto parts = std::make_shared<tp::SplitParams>(axis_, style_);
      for (const auto& named : own)
        parts->add(cutter_.cut(*host, name, named.value(), {named.key(), -1, true}));
      host->param_parts = std::move(parts);
    }
    if (!host && !own.is_empty())
      throw ConfigError(
          str("parallelize: module '", name, "' has parameters but doesn't inherit nn::HookHost"));
    for (const auto& child : module.named_children())
      keep_whole(*child.value(), str(name, ".", child.key()), done);
  }

  // A plan is for the whole model, and a pipeline stage has a part of its modules.
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
    return text.empty() ? "none below the root" : text;
  }

  DeviceMesh axis_;
  OverlapTransport transport_;
  std::shared_ptr<const tp::TpGroup> group_;
  std::vector<NamedModule> modules_;
  const nn::LayerSequence* sequence_;  // null: the root doesn't name its layers
  tp::MakeExchange make_exchange_;     // from the first module that overlaps
  tp::ParamCutter cutter_;
  std::string name_;        // of the module in hand
  const char* style_ = "";  // and of what is done to it
};

}  // namespace

std::ostream& operator<<(std::ostream& out, const ActivationLayout& layout) {
  switch (layout.kind) {
    case ActivationLayout::Kind::Shard:
      return out << "Shard(" << layout.dim << ")";
    case ActivationLayout::Kind::Replicate:
      return out << "Replicate";
    case ActivationLayout::Kind::Invariant:
      return out << "Invariant";
    case ActivationLayout::Kind::Partial:
      return out << "Partial";
  }
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
