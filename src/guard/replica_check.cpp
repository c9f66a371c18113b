#include "guard/policies.h"

#include <algorithm>
#include <map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>

#include "titan/dist/collectives.h"
#include "titan/train/trainer.h"

namespace titan::train {

namespace {

constexpr dist::Label kReplicaLabel{"train::check_replicas"};

at::ScalarType integer_of(size_t element_size) {
  switch (element_size) {
    case 1:
      return at::kChar;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    default:
      return at::kLong;
  }
}

bool has_replicas(const DTensor& data) {
  for (size_t axis = 0; axis < data.placements.size(); ++axis)
    if (data.mesh.axes()[axis].size > 1 && data.is_replicated_on(axis)) return true;
  return false;
}

struct MeshParameters {
  DeviceMesh mesh;
  std::vector<const Parameter*> parameters;
};

// In the order of their first parameter, which is the same on all ranks of a mesh.
std::vector<MeshParameters> replicated_by_mesh(const std::vector<Parameter>& parameters) {
  std::vector<MeshParameters> result;
  for (const Parameter& parameter : parameters) {
    if (!has_replicas(parameter.data)) continue;
    auto found = std::find_if(result.begin(), result.end(),
                              [&](const MeshParameters& known) { return known.mesh == parameter.data.mesh; });
    if (found == result.end()) found = result.insert(found, {parameter.data.mesh, {}});
    found->parameters.push_back(&parameter);
  }
  return result;
}

// A row of sums for each rank of the mesh.
std::vector<int64_t> sums_of_ranks(const MeshParameters& group) {
  std::vector<at::Tensor> sums;
  for (const Parameter* parameter : group.parameters) sums.push_back(bit_sum(parameter->data.local));
  const at::Tensor mine = at::stack(sums).cpu();
  const at::Tensor all = at::empty({group.mesh.size() * mine.numel()}, mine.options());
  group.mesh.group()->all_gather(all, mine, kReplicaLabel).wait();
  return {all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + all.numel()};
}

// The part of the tensor that the rank at a row-major position of the mesh has, by its coordinates on the
// axes that shard it. Ranks with the same part are replicas.
std::map<int64_t, std::vector<size_t>> replicas_by_part(const DTensor& data) {
  std::map<int64_t, std::vector<size_t>> parts;
  const auto& axes = data.mesh.axes();
  for (int position = 0; position < data.mesh.size(); ++position) {
    int64_t part = 0, stride = 1;
    int rest = position;
    for (size_t axis = axes.size(); axis-- > 0; rest /= axes[axis].size) {
      if (data.is_replicated_on(axis)) continue;
      part += stride * (rest % axes[axis].size);
      stride *= axes[axis].size;
    }
    parts[part].push_back(static_cast<size_t>(position));
  }
  return parts;
}

std::string joined_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += str(text.empty() ? "" : ", ", rank);
  return text;
}

// "rank 3 differs from the other 3 that have a copy"; ranks of the world.
std::string describe_difference(const std::vector<int>& ranks, const std::vector<size_t>& odd) {
  std::vector<int> named;
  for (const size_t at : odd) named.push_back(ranks[at]);
  if (named.size() == ranks.size()) return str("ranks ", joined_ranks(named), " differ from each other");
  return str(named.size() == 1 ? "rank " : "ranks ", joined_ranks(named),
             named.size() == 1 ? " differs" : " differ", " from the other ", ranks.size() - named.size(),
             " that have a copy");
}

// "" if none differs.
std::string first_difference(const MeshParameters& group) {
  const std::vector<int64_t> sums = sums_of_ranks(group);
  for (size_t i = 0; i < group.parameters.size(); ++i) {
    for (const auto& [part, positions] : replicas_by_part(group.parameters[i]->data)) {
      std::vector<int64_t> compared;
      std::vector<int> ranks;
      for (const size_t position : positions) {
        compared.push_back(sums[position * group.parameters.size() + i]);
        ranks.push_back(group.mesh.ranks()[position]);
      }
      const std::vector<size_t> odd = differing(compared);
      if (!odd.empty()) return str(describe_difference(ranks, odd), " of ", group.parameters[i]->name);
    }
  }
  return "";
}

}  // namespace

at::Tensor bit_sum(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::Tensor bits = tensor.detach().contiguous().view(-1).view(integer_of(tensor.element_size()));
  return at::sum(bits, at::kLong);
}

std::vector<size_t> differing(const std::vector<int64_t>& sums) {
  std::map<int64_t, size_t> counts;
  for (const int64_t sum : sums) ++counts[sum];
  if (counts.size() == 1) return {};
  const auto most = std::max_element(counts.begin(), counts.end(),
                                     [](const auto& a, const auto& b) { return a.second < b.second; });
  const bool is_majority = 2 * most->second > sums.size();
  std::vector<size_t> odd;
  for (size_t i = 0; i < sums.size(); ++i)
    if (!is_majority || sums[i] != most->first) odd.push_back(i);
  return odd;
}

// The ranks of a parameter's mesh see a difference, and tell all others.
void check_replicas(const dist::World& world, const std::vector<Parameter>& parameters, int64_t step) {
  std::string found;
  for (const MeshParameters& group : replicated_by_mesh(parameters)) {
    const std::string difference = first_difference(group);
    if (!difference.empty()) found += str(found.empty() ? "" : "; ", difference);
  }
  if (world.everyone()->max(found.empty() ? 0 : 1, kReplicaLabel) == 0) return;
  std::vector<std::string> texts = world.everyone()->all_gather_text(found, kReplicaLabel);
  std::sort(texts.begin(), texts.end());
  texts.erase(std::unique(texts.begin(), texts.end()), texts.end());
  std::erase(texts, "");
  std::string all;
  for (const std::string& text : texts) all += str(all.empty() ? "" : "; ", text);
  throw UnsoundRun(str(
      "after step ", step, " replicas of parameters aren't equal: ", all,
      ". A processor or memory there returns wrong results: leave that host out, and resume from an earlier "
      "checkpoint"));
}

bool ReplicaCheck::end_step(Trainer& trainer) {
  if (trainer.step() % freq_ == 0) compare(trainer);
  return false;
}

// Only one of the copies is saved, and every rank would load it: afterwards they would agree.
void ReplicaCheck::before_save(Trainer& trainer) { compare(trainer); }

void ReplicaCheck::compare(Trainer& trainer) {
  if (std::exchange(compared_step_, trainer.step()) == trainer.step()) return;
  const PhaseScope check = trainer.phase(Phase::CheckReplicas);
  check_replicas(trainer.parts().world, trainer.parts().parameters, trainer.step());
}

}  // namespace titan::train
