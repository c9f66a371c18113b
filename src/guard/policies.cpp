#include "guard/policies.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <iomanip>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <nlohmann/json.hpp>

#include "core/json.h"
#include "tensor/memory.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/dist/collectives.h"
#include "titan/guard/nan_search.h"
#include "titan/train/trainer.h"
#include "train/step_runner.h"

namespace titan::train {

// ---- loss spikes

double LossSpikes::mean() const {
  return std::accumulate(window_.begin(), window_.end(), 0.0) / static_cast<double>(window_.size());
}

// Summed anew each time, so that it is the same after a resume. That is cheap compared with a step.
double LossSpikes::deviation() const {
  const double center = mean();
  double squares = 0;
  for (const double loss : window_) squares += (loss - center) * (loss - center);
  return std::sqrt(squares / static_cast<double>(window_.size()));
}

bool LossSpikes::add(double loss) {
  const auto size = static_cast<size_t>(settings_.spike_window);
  last_ = loss;
  if (window_.size() >= size && loss > mean() + settings_.spike_sigma * deviation()) return true;
  window_.push_back(loss);
  while (window_.size() > size) window_.pop_front();
  return false;
}

void LossSpikes::check_rewinds_left(const std::string& spike) const {
  if (num_rewinds_ >= settings_.max_rewinds)
    throw UnsoundRun(
        str(spike, ", and the run has gone back ", num_rewinds_,
            " times already, as often as fault_tolerance.max_rewinds allows. A lower learning rate or "
            "other data may help"));
}

int64_t LossSpikes::rewind_distance(int64_t step) const {
  const bool comes_again = num_rewinds_ > 0 && step <= last_spike_ + settings_.spike_window;
  return comes_again ? 2 * last_distance_ : settings_.spike_rewind_steps;
}

void LossSpikes::count_rewind(int64_t step) {
  last_distance_ = rewind_distance(step);
  last_spike_ = step;
  ++num_rewinds_;
}

std::string LossSpikes::state() const {
  return nlohmann::json{{"window", std::vector<double>(window_.begin(), window_.end())},
                        {"num_rewinds", num_rewinds_},
                        {"last_spike", last_spike_},
                        {"last_distance", last_distance_}}
      .dump();
}

void LossSpikes::load(const std::string& state) {
  const auto tree = parse_json(state);
  const auto num_rewinds = json_count(tree, "num_rewinds");
  const auto is_loss = [](const nlohmann::json& value) { return value.is_number(); };
  TITAN_CHECK(num_rewinds && tree.contains("window") && tree["window"].is_array() &&
                  std::ranges::all_of(tree["window"], is_loss),
              "the state of loss spikes has no 'window' of numbers, or no count 'num_rewinds'");
  const std::vector<double> window = tree["window"];
  window_.assign(window.begin(), window.end());
  if (*num_rewinds <= num_rewinds_) return;
  num_rewinds_ = *num_rewinds;
  last_spike_ = json_count(tree, "last_spike").value_or(0);
  last_distance_ = json_count(tree, "last_distance").value_or(settings_.spike_rewind_steps);
}

void RewindOnSpike::judge(Trainer& trainer, const StepValues& values) {
  spiked_ = spikes_.add(trainer.loss_of_all(values));
}

bool RewindOnSpike::end_step(Trainer& trainer) {
  trainer.settle();
  return std::exchange(spiked_, false) && rewind(trainer);
}

// Checkpoints at the wanted distance may not exist yet, so shorter distances are tried.
bool RewindOnSpike::rewind(Trainer& trainer) {
  const int64_t spike = trainer.step();
  const std::string what = str("step ", spike, ": the loss of ", spikes_.last(), " is a spike above ",
                               spikes_.mean(), " +- ", spikes_.deviation());
  spikes_.check_rewinds_left(what);
  const PhaseScope load = trainer.phase(Phase::Load);
  for (int64_t distance = spikes_.rewind_distance(spike); distance > 0; distance /= 2) {
    if (spike <= distance || !trainer.load_before(spike - distance + 1)) continue;
    spikes_.count_rewind(spike);
    log::warning_rank0(str(what, ". Rewinding to step ", trainer.step(),
                           " and skipping the data through step ", spike, ": rewind ", spikes_.num_rewinds(),
                           " of ", settings_.max_rewinds));
    return true;
  }
  log::warning_rank0(what + "; there is no complete checkpoint to go back to, so the run continues");
  return false;
}

// ---- non-finite steps

// [Note: which rank made the number]
// A non-finite number spreads from rank to rank: in the forward to later stages, in the backward to earlier
// ones. A layer that sums parts over tensor-parallel ranks, or over ranks that share rows, spreads it to all
// of them. The rank that made it sees it first: in a forward before a backward; in a forward at the first
// stage, in a backward at the last; and among ranks that call the same modules, after the fewest calls. Among
// ranks that see it in the same call, a rank that received it is a better witness than one that saw it only
// in the result of a sum.

namespace {

constexpr dist::Label kReplayLabel{"train::replay_step"};
constexpr int64_t kStages = 1'000'000;  // more than any pipeline has

// A sort key: keys compare in the order of [Note: which rank made the number].
std::string place_in_order(const NanFinding& finding, int64_t stage) {
  std::ostringstream key;
  key << finding.in_backward << std::setfill('0') << std::setw(7)
      << (finding.in_backward ? kStages - stage : stage) << std::setw(19) << finding.num_checked
      << finding.made_by_module;
  return key.str();
}

// Names the ranks that share such sums: a probe sees the result of a sum, not this rank's part of it.
std::string ranks_that_share_sums(const Meshes& meshes) {
  std::string text;
  const auto add = [&](const std::string& kind, const DeviceMesh& mesh) {
    if (mesh.size() > 1)
      text += str("\n  ", kind, "-parallel ranks ", list_str(mesh.ranks()),
                  " exchange parts of such numbers: any of them may have made it");
  };
  add("tensor", meshes.tp);
  for (const RowMesh& axis : meshes.row_axes) add(axis.kind, axis.mesh);
  return text;
}

/// The finding with the lowest key, and the ranks that reported it.
struct FirstFinding {
  std::string text;
  std::vector<int> ranks;
};

/// `text`: this rank's finding; "": none. `key`: sorts the findings; it has the same length on all ranks.
FirstFinding gather_first(const dist::World& world, const std::string& key, const std::string& text) {
  const auto all = world.everyone()->all_gather_text(text.empty() ? "" : key + text, kReplayLabel);
  FirstFinding found;
  std::string first;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) continue;
    const std::string its_key = all[rank].substr(0, key.size());
    if (!found.ranks.empty() && its_key > first) continue;
    if (found.ranks.empty() || its_key < first) found = {all[rank].substr(key.size()), {}};
    first = its_key;
    found.ranks.push_back(static_cast<int>(rank));
  }
  return found;
}

}  // namespace

// Logs the known facts first, in case the replay does not finish.
std::string NanReplay::explain(Trainer& trainer, const NonFiniteStep& step) {
  log::warning_rank0(step.problem + ". The step is run again to find the module and rank that caused it");
  const at::AutoGradMode with_gradients(true);  // they are off if numbers are read late
  try {
    return replay(trainer, step);
  } catch (const std::exception& error) {
    return "The replay that looks for the source failed: " + reason_of(error);
  }
}

std::string NanReplay::replay(Trainer& trainer, const NonFiniteStep& step) {
  const TrainerParts& parts = trainer.parts();
  const dist::World& world = parts.world;
  const std::vector<ModelPart>& models = parts.runner->models();
  std::vector<nn::AnyRef> roots;
  for (const ModelPart& part : models) roots.push_back(part.model->root());
  NanSearch search(roots, {.rank = world.rank(), .on_finding = NanSearch::OnFinding::Note});
  search.set_step(step.values.step);
  trainer.parts().optimizer.zero_grad();
  const bool loss_is_finite = is_finite(trainer.forward_backward(step.input));
  const NanFinding mine = search.first().value_or(NanFinding{});
  FirstFinding found = gather_first(world, place_in_order(mine, models.at(mine.model).index),
                                    mine.text.empty() ? "" : mine.text + ranks_that_share_sums(parts.meshes));
  if (!found.ranks.empty())
    return str("The replay found the source. ", found.text,
               found.ranks.size() == 1
                   ? ""
                   : str("\n  ranks ", list_str(found.ranks), " have non-finite values at the same place"));
  const Parameter* nonfinite = first_nonfinite_gradient(parts.parameters);
  found = gather_first(world, "", nonfinite ? nonfinite->name : "");
  if (!found.ranks.empty())
    return str(
        "In the replay no module on any rank produced a non-finite output or gradient, but the gradient of "
        "parameter '",
        found.text, "' isn't finite: it arose in the parameter's own gradient or in its sum over ranks");
  found = gather_first(world, "", loss_is_finite ? "" : "not finite");
  if (!found.ranks.empty())
    return str("In the replay only the loss wasn't finite, on ranks ", list_str(found.ranks),
               ": every module's output and every gradient is finite");
  return "In the replay all numbers were finite, with the same batch and weights. Suspect an operation that "
         "isn't deterministic, random numbers that differ (dropout), or a host's processor or memory";
}

// ---- replicas

namespace {

constexpr dist::Label kReplicaLabel{"train::check_replicas"};

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
    auto found = std::ranges::find(result, parameter.data.mesh, &MeshParameters::mesh);
    if (found == result.end()) found = result.insert(found, {parameter.data.mesh, {}});
    found->parameters.push_back(&parameter);
  }
  return result;
}

// One row of sums per rank of the mesh.
std::vector<int64_t> sums_of_ranks(const MeshParameters& group) {
  std::vector<at::Tensor> sums;
  for (const Parameter* parameter : group.parameters) sums.push_back(bit_sum(parameter->data.local));
  const at::Tensor mine = at::stack(sums).cpu();
  const at::Tensor all = at::empty({group.mesh.size() * mine.numel()}, mine.options());
  group.mesh.group()->all_gather(all, mine, kReplicaLabel).wait();
  return {all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + all.numel()};
}

// Groups the mesh's row-major positions by the part of the tensor that the rank there has, which its
// coordinates on the sharded axes determine. Ranks with the same part are replicas.
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

// "rank 3 differs from the other 3 that have a copy", with ranks of the world.
std::string describe_difference(const std::vector<int>& ranks, const std::vector<size_t>& odd) {
  const std::string named = list_str(odd, ", ", [&](size_t at) { return ranks[at]; });
  if (odd.size() == ranks.size()) return str("ranks ", named, " differ from each other");
  return str(odd.size() == 1 ? "rank " : "ranks ", named, odd.size() == 1 ? " differs" : " differ",
             " from the other ", ranks.size() - odd.size(), " that have a copy");
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
      if (!odd.empty()) return str(group.parameters[i]->name, ": ", describe_difference(ranks, odd));
    }
  }
  return "";
}

}  // namespace

at::Tensor bit_sum(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  constexpr int64_t longest_part = int64_t{1} << 22;  // bounds the temporaries, of 8 bytes per element
  const at::Tensor bits = bits_of(tensor.detach().contiguous()).flatten();
  const at::TensorOptions longs = bits.options().dtype(at::kLong);
  const at::Tensor factors = at::arange(1, 2 * std::min(bits.numel(), longest_part) + 1, 2, longs);
  at::Tensor sum = at::zeros({}, longs);
  for (int64_t start = 0; start < bits.numel(); start += longest_part) {
    const at::Tensor part = bits.narrow(0, start, std::min(longest_part, bits.numel() - start));
    sum.add_((factors.narrow(0, 0, part.numel()) + 2 * start).mul_(part).sum());
  }
  return sum;
}

std::vector<size_t> differing(const std::vector<int64_t>& sums) {
  std::map<int64_t, size_t> counts;
  for (const int64_t sum : sums) ++counts[sum];
  if (counts.size() == 1) return {};
  const auto [most, count] = *std::ranges::max_element(counts, {}, [](const auto& of) { return of.second; });
  std::vector<size_t> odd;
  for (size_t i = 0; i < sums.size(); ++i)
    if (2 * count <= sums.size() || sums[i] != most) odd.push_back(i);
  return odd;
}

// Only ranks of a parameter's mesh see a difference; they report it to all ranks.
void check_replicas(const dist::World& world, const std::vector<Parameter>& parameters, int64_t step) {
  std::vector<std::string> found;
  for (const MeshParameters& group : replicated_by_mesh(parameters))
    if (std::string difference = first_difference(group); !difference.empty())
      found.push_back(std::move(difference));
  const auto everyone = world.everyone();
  if (everyone->max(found.empty() ? 0 : 1, kReplicaLabel) == 0) return;
  const auto texts = everyone->all_gather_text(list_str(found, "; "), kReplicaLabel);
  std::set<std::string> each(texts.begin(), texts.end());
  each.erase("");
  throw UnsoundRun(str(
      "after step ", step, " replicas of parameters differ: ", list_str(each, "; "),
      ". A processor or memory there returns wrong results: leave that host out, and resume from an earlier "
      "checkpoint"));
}

bool ReplicaCheck::end_step(Trainer& trainer) {
  if (trainer.step() % freq_ == 0) compare(trainer);
  return false;
}

// Only one copy is saved, and every rank would load it: afterwards the copies would agree.
void ReplicaCheck::before_save(Trainer& trainer) { compare(trainer); }

void ReplicaCheck::compare(Trainer& trainer) {
  if (std::exchange(compared_step_, trainer.step()) == trainer.step()) return;
  const PhaseScope check = trainer.phase(Phase::CheckReplicas);
  check_replicas(trainer.parts().world, trainer.parts().parameters, trainer.step());
}

}  // namespace titan::train
