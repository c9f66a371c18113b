#include "titan/parallel/parallelism.h"

#include "titan/parallel/context_parallel.h"

namespace titan {

namespace {

using Specs = Registry<std::shared_ptr<const ParallelismSpec>>;

// Everything that this library registers; a static library would drop an object file that registers itself.
std::unique_ptr<Specs> make_registry() {
  auto specs = std::make_unique<Specs>("parallelism");
  specs->add("context", context_parallelism_spec());
  return specs;
}

}  // namespace

Specs& parallelisms() {
  static const std::unique_ptr<Specs> registry = make_registry();
  return *registry;
}

std::vector<Parallelism> default_parallelisms() {
  std::vector<Parallelism> all;
  for (const std::string& name : parallelisms().names()) {
    const ParallelismSpec& spec = *parallelisms().get(name);
    all.push_back(spec.choose(spec.make_settings().get()));
  }
  return all;
}

void apply_parallelisms(const nn::AnyRef& root, const std::vector<Parallelism>& chosen, const DeviceMesh& mesh) {
  for (const Parallelism& parallelism : chosen) {
    const std::string& name = parallelism.axis.name;
    if (mesh.has(name) && mesh.size(name) > 1) parallelism.apply(root, mesh[name]);
  }
}

}  // namespace titan
