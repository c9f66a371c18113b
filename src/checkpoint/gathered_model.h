#pragma once

// A model that is spread over ranks, tensor by tensor on the rank that writes it.

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "titan/checkpoint/safetensors.h"
#include "titan/dist/device_mesh.h"
#include "titan/parallel/parameters.h"

namespace titan::detail {

/// The names of the parameters of all ranks of the pipeline together (collective over it); of a pipeline of
/// one, none.
std::set<std::string> names_of_pipeline(const std::vector<Parameter>& parameters, const DeviceMesh& pipeline);

/// The tensors of the file in its order (sort_for_file), each gathered from all ranks of its stage when it is
/// asked for, and brought to the pipeline's first rank. A name on several stages is taken from the first.
class GatheredModel {
 public:
  /// Collective over the pipeline.
  GatheredModel(const std::vector<Parameter>& parameters, std::optional<at::ScalarType> export_dtype,
                const DeviceMesh& pipeline);

  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  /// Collective; in order. Undefined on ranks that neither own nor write it.
  at::Tensor gather(size_t index);
  /// The gathers that are left: the other ranks wait in them.
  void finish();

 private:
  void collect_entries(const std::vector<SafetensorsEntry>& own);

  const DeviceMesh& pipeline_;
  std::map<std::string, const Parameter*> parameters_;
  std::map<std::string, int> owners_;  // position in the pipeline
  std::vector<SafetensorsEntry> entries_;
  size_t next_ = 0;
};

/// Calls `write` on rank 0 of the largest mesh (in a pipeline, of the world); the other ranks take part in
/// what it gathers. When it throws, every rank throws Error.
void write_gathered(const std::vector<Parameter>& parameters, const std::filesystem::path& path,
                    std::optional<at::ScalarType> export_dtype, const DeviceMesh& pipeline,
                    const std::function<void(GatheredModel&)>& write);

}  // namespace titan::detail
