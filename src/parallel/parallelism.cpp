#include "titan/parallel/parallelism.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "titan/parallel/context_parallel.h"

namespace titan {

namespace {

using Specs = Registry<std::shared_ptr<const ParallelismSpec>>;

// This library's own parallelisms. They are listed here because a linker drops object files of a static
// library that only register themselves.
std::unique_ptr<Specs> make_registry() {
  auto specs = std::make_unique<Specs>("parallelism");
  specs->add("context", context_parallelism_spec());
  return specs;
}

// Axes and sub-meshes of train::Meshes.
constexpr std::array<std::string_view, 9> kMeshNames = {"pp",   "dp_replicate", "dp_shard", "tp",  "stage",
                                                        "fsdp", "batch",        "loss",     "rows"};

}  // namespace

Specs& parallelisms() {
  static const std::unique_ptr<Specs> registry = make_registry();
  return *registry;
}

std::vector<Parallelism> default_parallelisms() {
  std::vector<Parallelism> all;
  for (const std::string& name : parallelisms().names())
    all.push_back(parallelisms().get(name)->choose(nullptr));
  return all;
}

std::vector<RowAxis> row_axes(const std::vector<Parallelism>& chosen) {
  std::vector<RowAxis> axes;
  for (const Parallelism& parallelism : chosen)
    if (parallelism.axis.degree > 1 || parallelism.axis.always_in_mesh) axes.push_back(parallelism.axis);
  return axes;
}

void apply_parallelisms(const nn::AnyRef& root, const std::vector<Parallelism>& chosen,
                        const DeviceMesh& mesh) {
  for (const Parallelism& parallelism : chosen) {
    const std::string& name = parallelism.axis.name;
    if (mesh.has(name) && mesh.size(name) > 1) parallelism.apply(root, mesh[name]);
  }
}

void detail::check_parallelism(const std::string& name, const std::string& axis, bool is_complete) {
  TITAN_CHECK(!axis.empty() && is_complete, "parallelism '", name,
              "': expected axis, apply and is_applied to be set");
  TITAN_CHECK(std::find(kMeshNames.begin(), kMeshNames.end(), axis) == kMeshNames.end(), "parallelism '",
              name, "': the mesh uses the name '", axis, "' for another axis; choose another one");
}

}  // namespace titan
