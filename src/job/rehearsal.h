#pragma once

// Steps of one rank without data: to count on a planned or virtual GPU what they take.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dist/stream.h"
#include "job/build.h"
#include "plan/gpu/planned_gpu.h"
#include "plan/outside_memory.h"
#include "titan/optim/clip.h"
#include "titan/optim/optimizer.h"

namespace titan::train {

/// The parts of a trainer that a step's work comes from: model, wrappers, schedule, optimizer, and batches of zeros.
class Rehearsal {
 public:
  /// The config outlives it. Collective over the world.
  Rehearsal(const JobConfig& config, const dist::World& world);

  ~Rehearsal();
  /// Forward, backward, clipping and update, as a run does on a GPU: with the fused optimizer the numbers are read late. With compile.enable, steps
  /// from number num_usual_steps() on launch a recording, which the first of them makes.
  void step();
  /// Without compile.enable, no step is recorded.
  static int num_usual_steps();
  /// All ranks' tokens in a step.
  int64_t tokens() const;

  const BuiltModels& built() const { return built_; }
  const optim::Optimizer& optimizer() const { return *optimizer_; }

 private:
  struct Recorded;

  optim::LaunchedGradNorm launch_grad_norm();
  std::unique_ptr<Recorded> record();
  void launch();

  const JobConfig& config_;
  dist::World world_;
  std::optional<dist::StreamGuard> on_stream_;  // as titan train has it
  Meshes meshes_;
  std::vector<data::Batch> batches_;
  BuiltModels built_;
  std::optional<optim::Optimizer> optimizer_;
  int num_steps_ = 0;
  std::unique_ptr<Recorded> recorded_;
};

/// A rank and the ranks that do the same.
struct Role {
  std::string name;      ///< "every rank", "pipeline rank 3"
  int rank = 0;          ///< one of them
  bool is_last = false;  ///< the job's last rank, of the same pipeline rank as the role before
};

/// Ranks that may differ in what they hold: the first of each pipeline rank, and the job's last. Those with most to do, one of
/// each pipeline rank, come first.
std::vector<Role> roles_of(const JobConfig& config, int world_size);

/// One rank of a job, after its start and two steps, or three if the third is recorded.
struct PlannedRank {
  Role role;
  int64_t peak_allocated_bytes = 0;  ///< in tensors
  int64_t peak_reserved_bytes = 0;   ///< taken from the device
  int64_t shard_gradient_bytes =
      0;  ///< the gradients that live on after a step, without buffers of reductions
  plan::SymmetricOwners symmetric_owners = {};
  double tokens_of_step = 0;  ///< all ranks'
  std::shared_ptr<const plan::Trace> trace;
  std::vector<std::pair<int64_t, std::string>> streams;  ///< those with names
};

/// The config has passed check_job and check_plannable for that size. The device's memory is empty, and empty again at the end.
PlannedRank rehearse(const JobConfig& config, int world_size, const Role& role, plan::PlannedGpu& device);

/// Throws ConfigError for settings whose cost a plan doesn't know.
void check_plannable(const JobConfig& config, const config::Origins& origins);

}  // namespace titan::train
