#pragma once

// One rank of a job without running it: the model at its real size on meta tensors, its peers played by the
// `fake` backend. Memory and time don't grow with the sizes of the model. It is the source of the plan's
// table and the memory report.

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "dist/device_backend.h"
#include "job/pipeline_stages.h"
#include "titan/dist/world.h"
#include "titan/train/model_spec.h"
#include "titan/train/parallel_dims.h"

namespace titan::train {

class Trainer;

class DryRun {
 public:
  /// Builds what rank `rank` of `world_size` builds. The config has passed check_job for that size.
  DryRun(const JobConfig& config, int world_size, int rank = 0);

  const Meshes& meshes() const { return meshes_; }
  const StagePlan& plan() const { return plan_; }
  /// The plan's stages on this rank; without a pipeline stage 0, the whole model.
  const std::vector<int>& stages() const { return stages_; }
  /// The models of these stages.
  const std::vector<std::unique_ptr<TrainableModel>>& models() const { return models_; }
  /// Micro-batches of an optimizer step, on this rank.
  int64_t num_micro_batches() const;
  int64_t micro_batch_rows() const;
  /// Forward and backward of one micro-batch through each of the stages.
  void run_micro_batch();

 private:
  void run_stage(size_t i, const at::Tensor& input);

  const JobConfig& config_;
  dist::World world_;
  Meshes meshes_;
  StagePlan plan_;
  std::vector<int> stages_;
  std::vector<std::unique_ptr<TrainableModel>> models_;
  std::vector<TensorType> boundaries_;  // the input of each stage
};

/// Builds the models of a rank of each pipeline stage. Throws ConfigError if a plan leaves a part of a layer that
/// can't be computed.
void build_each_stage(const JobConfig& config, int world_size);

/// The product of the degrees; data_parallel_shard_degree = -1 counts as 1.
int smallest_world(const ParallelismSettings& settings);

/// The stages of a pipeline (ranks, modules and parameters), and a table of tensor parallelism in each module
/// of rank 0 in one optimizer step: style, placement of the weights, layouts of the activations, collectives,
/// and the bytes that rank 0 receives in them ("?" if the model uses an operation that LibTorch can't run on
/// meta tensors). Layers with equal rows share one.
std::string plan_table(const JobConfig& config, int world_size);

// ---- a report on a rank's memory, and on settings that would use less: for a run that is out of memory

struct MemoryOwner {
  std::string name;
  double bytes = 0;
  std::string details;  ///< how the number is computed
};

struct NamedBytes {
  std::string name;
  double bytes = 0;
};

/// "layers.0 to layers.31 0.30 each, output 0.61", in GiB: neighbors of about the same size share an entry.
std::string list_of(const std::vector<NamedBytes>& list);

/// One rank's memory at the peak of a step: the end of the last forward before a backward.
struct MemoryReport {
  std::vector<MemoryOwner> owners;  ///< largest first
  std::vector<NamedBytes> savings;  ///< "training.local_batch_size = 4"; largest first, each on its own
  /// Blocks of the device's allocator, by the names of their owners; empty if unknown.
  std::vector<NamedBytes> live = {};
  double total_bytes() const;
};

/// Finds out who has a GPU's memory at the moment when a request fails: when the error is caught, the model is
/// gone.
class MemoryWitness {
 public:
  explicit MemoryWitness(c10::Device device);
  ~MemoryWitness();
  MemoryWitness(const MemoryWitness&) = delete;
  MemoryWitness& operator=(const MemoryWitness&) = delete;

  /// The trainer whose parameters, gradients, optimizer state and buffers are looked for. It is asked only
  /// while it trains.
  void know(Trainer& trainer) { trainer_ = &trainer; }
  /// As MemoryReport::live, from the last request that failed.
  const std::vector<NamedBytes>& live() const { return live_; }

 private:
  void see(const dist::OutOfMemory& failure);

  c10::Device device_;
  Trainer* trainer_ = nullptr;
  std::vector<NamedBytes> live_;
};

/// Computed from sizes by a DryRun: it needs no device memory and no peers.
/// Not included: temporary memory of operations, buffers of the communication library, and fragmentation of
/// the allocator. The config must have passed check_job() for that world size.
MemoryReport memory_report(const JobConfig& config, int world_size, int rank, c10::Device device);

/// A line for each owner and each saving.
std::string table_of(const MemoryReport& report);

/// Whether a host or device ran out of memory: by the exception's type, or by its text.
bool is_out_of_memory(const std::exception& error);

/// For the log of the rank that ran out: the report as a table, and the memory in use. "" without a report,
/// as for models that don't name their layers.
std::string explain_out_of_memory(const JobConfig& config, const dist::World& world,
                                  const MemoryWitness& witness);

}  // namespace titan::train
