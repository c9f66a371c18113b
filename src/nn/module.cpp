#include "titan/nn/module.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>

#include <c10/util/StringUtil.h>

#include "nn/constructed_modules.h"
#include "tensor/memory.h"
#include "titan/core/error.h"
#include "titan/nn/containers.h"

namespace titan::nn {

// ---- modules

void HookHost::check_entered_through_ref() const {
  TITAN_CHECK(
      depth_ > 0 || !is_wrapped(), "module '", fqn_,
      "' is wrapped (fully_shard, parallelize, ...) but was called without titan::nn::Ref: call it through "
      "its holder, not by impl->forward() or torch::nn::Sequential");
}

void HookHost::refuse_if_wrapped(const char* operation) const {
  TITAN_CHECK(
      !is_wrapped() && !param_owner, operation, "() on module '", fqn_,
      "' after it was wrapped would replace parameters that the wrapper holds; call it before wrapping");
}

void name_modules(torch::nn::Module& root) {
  for (const auto& named : root.named_modules(/*name_prefix=*/"", /*include_self=*/false))
    if (auto* host = dynamic_cast<HookHost*>(named.value().get())) host->set_fqn(named.key());
}

std::vector<HookHost*> hook_hosts(torch::nn::Module& root) {
  std::vector<HookHost*> hosts;
  const auto add = [&](torch::nn::Module& module) {
    if (auto* host = dynamic_cast<HookHost*>(&module)) hosts.push_back(host);
  };
  add(root);  // separately, because a shared pointer may not own it
  for (const auto& module : root.modules(/*include_self=*/false)) add(*module);
  return hosts;
}

// Parameters without memory can't be copied, and a parameter can't change its device and stay the same
// object.
void Module::check_movable() const {
  refuse_if_wrapped("to");
  for (const at::Tensor& parameter : parameters(/*recurse=*/false))
    TITAN_CHECK(!is_deferred(parameter), "to() on module '", fqn(),
                "', whose parameters have no memory yet: construct it with its final device and dtype, or "
                "materialize() it first");
}

at::Tensor Module::register_init_parameter(const std::string& name, at::IntArrayRef sizes, const Init& init,
                                           const Construct& construct) {
  at::Tensor parameter =
      deferred_tensor(sizes, at::TensorOptions().dtype(construct.dtype).device(construct.device));
  if (!construct.deferred) {
    param_storage::allocate(parameter);
    const Box whole{std::vector<int64_t>(sizes.size(), 0), sizes.vec()};
    if (!parameter.is_meta()) fill(parameter, init, {.seed = 0, .name = name}, sizes, whole);
  }
  param_inits_.push_back({name, init});
  return register_parameter(name, parameter);
}

// ---- modules that weren't registered

namespace {

thread_local ConstructedModules* noting = nullptr;

// "weight [16, 8], bias [16]": those that are trained, or would have to get memory, and aren't in `known`.
std::string parameters_besides(const std::set<const at::TensorImpl*>& known,
                               const torch::nn::Module& module) {
  std::vector<std::string> texts;
  for (const auto& named : module.named_parameters(/*recurse=*/true)) {
    const at::Tensor& parameter = named.value();
    const bool counts = parameter.requires_grad() || is_deferred(parameter);
    if (counts && !known.contains(parameter.unsafeGetTensorImpl()))
      texts.push_back(titan::str(named.key(), " ", parameter.sizes()));
  }
  return c10::Join(", ", texts);
}

}  // namespace

HookHost::HookHost() {
  if (noting) noting->hosts_.push_back(this);
}

HookHost::~HookHost() {
  if (noting) std::erase(noting->hosts_, this);
}

ConstructedModules::ConstructedModules() : outer_(noting) { noting = this; }
ConstructedModules::~ConstructedModules() { noting = outer_; }

std::vector<std::string> ConstructedModules::unregistered(torch::nn::Module& root) const {
  std::map<const torch::nn::Module*, std::string> names = {{&root, "the root module"}};
  for (const auto& named : root.named_modules(/*name_prefix=*/"", /*include_self=*/false))
    names.emplace(named.value().get(), str("'", named.key(), "'"));
  std::set<const at::TensorImpl*> known;
  for (const at::Tensor& parameter : root.parameters()) known.insert(parameter.unsafeGetTensorImpl());
  std::set<const torch::nn::Module*> below;  // below another one that isn't registered
  for (HookHost* host : hosts_)
    if (!names.contains(&host->as_module()))
      for (const auto& module : host->as_module().modules(/*include_self=*/false)) below.insert(module.get());
  std::vector<std::string> lines;
  std::string before;
  for (HookHost* host : hosts_) {
    const torch::nn::Module& module = host->as_module();
    if (const auto found = names.find(&module); found != names.end()) {
      before = ", constructed after " + found->second;
    } else if (!below.contains(&module)) {
      const std::string lost = parameters_besides(known, module);
      if (!lost.empty()) lines.push_back(str(module.name(), " with ", lost, before));
    }
  }
  return lines;
}

// ---- containers

ptrdiff_t LayerList::note_erased(const std::string& name) {
  const auto found = std::find(names_.begin(), names_.end(), name);
  TITAN_CHECK(found != names_.end(), "no element '", name, "' to erase");
  const ptrdiff_t position = found - names_.begin();
  if (position == 0) ++first_number_;
  names_.erase(found);
  return position;
}

void SequentialImpl::erase(const std::string& name) {
  calls_.erase(calls_.begin() + note_erased(name));
  unregister_module(name);
}

at::Tensor SequentialImpl::forward(const at::Tensor& x) {
  check_entered_through_ref();
  at::Tensor y = x;
  for (const auto& call : calls_) y = call(y);
  return y;
}

namespace {

void append(std::vector<std::string>& to, const std::vector<std::string>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

// The names in the model of a list's elements.
std::vector<std::string> element_names(const std::string& list, const LayerList& elements) {
  std::vector<std::string> names;
  for (const std::string& name : elements.names()) names.push_back(str(list, ".", name));
  return names;
}

void add_names_below(const torch::nn::Module& module, const std::string& name,
                     std::vector<std::string>& names) {
  names.push_back(name);
  for (const auto& child : module.named_children())
    add_names_below(*child.value(), str(name, ".", child.key()), names);
}

// Where `wanted` begins in `all`. Throws ConfigError unless `all` contains it without gaps.
size_t position_of_run(const std::vector<std::string>& wanted, const std::vector<std::string>& all) {
  std::vector<std::string> problems;
  for (const std::string& name : wanted) {
    if (std::find(all.begin(), all.end(), name) != all.end()) continue;
    problems.push_back(
        str("the model calls no module '", name, "' in its sequence", did_you_mean(name, all)));
  }
  if (wanted.empty()) problems.push_back("a stage must have a module");
  if (!problems.empty()) throw ConfigError(std::move(problems));
  const auto found = std::search(all.begin(), all.end(), wanted.begin(), wanted.end());
  if (found == all.end())
    throw ConfigError(
        str("the modules from '", wanted.front(), "' to '", wanted.back(),
            "' aren't consecutive in the model, which calls them in another order or others in between"));
  return static_cast<size_t>(found - all.begin());
}

// A parameter's use below a module.
struct Use {
  at::Tensor parameter;
  std::string name;  // dotted, from the root
  const HookHost* host;
  std::string local_name;
};

void add_uses(const torch::nn::Module& module, const std::string& prefix, std::vector<Use>& uses) {
  const auto* host = dynamic_cast<const HookHost*>(&module);
  for (const auto& named : module.named_parameters(/*recurse=*/false))
    uses.push_back({named.value(), prefix + named.key(), host, named.key()});
  for (const auto& child : module.named_children())
    add_uses(*child.value(), prefix + child.key() + ".", uses);
}

// The name in `modules` of the module that has `parameter` below it, or "".
std::string module_of(const std::string& parameter, const std::set<std::string>& modules) {
  for (size_t dot = parameter.find('.'); dot != std::string::npos; dot = parameter.find('.', dot + 1))
    if (const std::string name = parameter.substr(0, dot); modules.contains(name)) return name;
  return "";
}

void note_init(ParamInit& init, const Use& use) {
  if (!use.host) return;
  for (const ParamInit& declared : use.host->param_inits())
    if (declared.name == use.local_name) init = declared;
}

}  // namespace

std::vector<std::string> LayerSequence::Names::all() const {
  std::vector<std::string> names = before;
  append(names, layers);
  append(names, after);
  return names;
}

LayerSequence::Names LayerSequence::layer_names() const {
  const auto is_list = [](const Part& part) { return part.list != nullptr; };
  const auto first = std::find_if(parts_.begin(), parts_.end(), is_list);
  const auto last = std::find_if(parts_.rbegin(), parts_.rend(), is_list).base();  // one past it
  Names names;
  for (auto part = parts_.begin(); part != parts_.end(); ++part) {
    if (part->list) {
      append(names.layers, element_names(part->name, *part->list));
    } else if (first != parts_.end() && part < first) {
      names.before.push_back(part->name);
    } else {
      (first != parts_.end() && part >= last ? names.after : names.layers).push_back(part->name);
    }
  }
  return names;
}

torch::nn::Module& LayerSequence::module() const {
  auto* module = dynamic_cast<torch::nn::Module*>(const_cast<LayerSequence*>(this));
  TITAN_CHECK(module, "a LayerSequence must be a torch::nn::Module too");
  return *module;
}

void LayerSequence::keep_layers(const std::vector<std::string>& names) {
  if (auto* host = dynamic_cast<HookHost*>(this)) host->refuse_if_wrapped("keep_layers");
  TITAN_CHECK(is_whole(), "keep_layers: layers of this model were dropped already");
  const std::vector<std::string> all = layer_names().all();
  const size_t begin = position_of_run(names, all), end = begin + names.size();
  const std::set<std::string> kept(names.begin(), names.end());
  if (kept.size() == all.size()) return;

  for (SharedParameter& shared : find_shared()) {
    const auto is_kept = [&](const std::string& name) { return kept.contains(name); };
    const auto num_kept = std::count_if(shared.modules.begin(), shared.modules.end(), is_kept);
    if (num_kept > 0 && num_kept < std::ssize(shared.modules)) shared_.push_back(std::move(shared));
  }
  for (const Part& part : parts_) {
    const auto elements = part.list ? element_names(part.name, *part.list) : std::vector{part.name};
    for (const std::string& name : elements)
      if (!kept.contains(name)) drop(part, name);
  }
  std::erase_if(parts_, [&](const Part& part) { return !part.list && !kept.contains(part.name); });
  first_ = first_ && begin == 0;
  last_ = last_ && end == all.size();
  layers_dropped();
}

void LayerSequence::drop(const Part& part, const std::string& name) {
  const auto child = module().named_children()[part.name];
  if (part.list) {
    const std::string element = name.substr(part.name.size() + 1);
    add_names_below(*child->named_children()[element], name, dropped_);
    part.list->erase(element);
  } else {
    add_names_below(*child, name, dropped_);
    module().unregister_module(part.name);
    part.forget();
  }
}

std::vector<SharedParameter> LayerSequence::find_shared() const {
  const std::vector<std::string> all = layer_names().all();
  const std::set<std::string> modules(all.begin(), all.end());
  std::vector<Use> uses;
  add_uses(module(), "", uses);
  std::vector<SharedParameter> found;
  std::map<const at::TensorImpl*, size_t> known;
  for (const Use& use : uses) {
    const auto [at, is_new] = known.try_emplace(use.parameter.unsafeGetTensorImpl(), found.size());
    if (is_new) found.push_back({use.name, {}, {}, use.parameter});
    SharedParameter& shared = found[at->second];
    note_init(shared.init, use);
    const std::string user = module_of(use.name, modules);
    const bool listed = std::find(shared.modules.begin(), shared.modules.end(), user) != shared.modules.end();
    if (!user.empty() && !listed) shared.modules.push_back(user);
  }
  std::erase_if(found, [](const SharedParameter& each) { return each.modules.size() < 2; });
  for (SharedParameter& shared : found)
    std::sort(shared.modules.begin(), shared.modules.end(), [&](const auto& a, const auto& b) {
      return std::find(all.begin(), all.end(), a) < std::find(all.begin(), all.end(), b);
    });
  return found;
}

std::vector<SharedParameter> LayerSequence::shared_parameters() const {
  return is_whole() ? find_shared() : shared_;
}

LayerSequence* layer_sequence(const AnyRef& model) { return dynamic_cast<LayerSequence*>(&model.module()); }

}  // namespace titan::nn
