#pragma once

// Checkpoints for tests, saved by one process in place of all ranks.

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "checkpoint/format/rank_file.h"
#include "core/file.h"
#include "titan/checkpoint/manifest.h"
#include "titan/checkpoint/step_folder.h"

namespace titan::testing {

struct WholeTensor {
  std::string name;
  at::Tensor data;
  checkpoint::TensorLayout layout = {};  ///< whole on every rank
};

struct CheckpointToSave {
  std::string run_id = "0123456789abcdef0123456789abcdef";
  int64_t step = 1;
  int64_t world_size = 1;
  std::vector<WholeTensor> tensors;
  std::string config = {};
  std::map<std::string, std::string> texts = {};
};

inline checkpoint::LayoutAxis cut(const std::string& name, int64_t size, int64_t stride, int64_t dim) {
  return {.name = name, .size = size, .stride = stride, .dim = dim};
}

inline checkpoint::LayoutAxis only_on(const std::string& name, int64_t size, int64_t stride,
                                      int64_t position) {
  return {.name = name, .size = size, .stride = stride, .only = position};
}

inline at::Tensor part_of(at::Tensor whole, const Box& box) {
  for (size_t dim = 0; dim < box.offset.size(); ++dim)
    whole = whole.narrow(static_cast<int64_t>(dim), box.offset[dim], box.length[dim]);
  return whole.contiguous();
}

inline checkpoint::StateTable table_of(const CheckpointToSave& save) {
  std::vector<checkpoint::StateTensor> tensors;
  for (const WholeTensor& tensor : save.tensors)
    tensors.push_back({tensor.name, tensor.data.scalar_type(), tensor.data.sizes().vec(),
                       std::make_shared<const checkpoint::TensorLayout>(tensor.layout)});
  return checkpoint::StateTable(std::move(tensors), save.world_size);
}

inline const at::Tensor& data_of(const CheckpointToSave& save, const std::string& name) {
  return std::find_if(save.tensors.begin(), save.tensors.end(), [&](const auto& t) { return t.name == name; })
      ->data;
}

/// All files of a checkpoint, into a folder of any name.
inline checkpoint::Manifest write_checkpoint_files(const std::filesystem::path& folder,
                                                   const CheckpointToSave& save) {
  std::filesystem::create_directories(folder);
  checkpoint::Manifest manifest{.run_id = save.run_id,
                                .step = save.step,
                                .library = "titan test, torch test",
                                .num_threads = 1,
                                .finite = true,
                                .config = save.config,
                                .texts = save.texts,
                                .table = table_of(save),
                                .files = {}};
  for (int64_t rank = 0; rank < save.world_size; ++rank) {
    std::vector<checkpoint::PieceToWrite> pieces;
    for (const checkpoint::Piece& piece : manifest.table.pieces_of(rank)) {
      const std::string& name = manifest.table.tensors()[piece.tensor].name;
      pieces.push_back({name, piece.box, part_of(data_of(save, name), piece.box)});
    }
    const checkpoint::WrittenFile file = checkpoint::write_rank_file(
        folder / checkpoint::file_name(rank), {save.run_id, save.step, rank, save.world_size}, pieces);
    manifest.finite = manifest.finite && file.finite;
    manifest.files.push_back(file.record);
  }
  write_file_atomic(folder / checkpoint::kManifestName, checkpoint::to_text(manifest));
  return manifest;
}

/// As a run does; returns the step's folder.
inline std::filesystem::path save_checkpoint(const std::filesystem::path& steps,
                                             const CheckpointToSave& save) {
  write_checkpoint_files(checkpoint::pending_path(steps, save.step, save.run_id), save);
  checkpoint::commit_step(steps, save.step, save.run_id);
  return checkpoint::step_path(steps, save.step);
}

/// A small model and its moments on dp 2 x tp 2, at the given step: float32, bfloat16, a scalar, an integer,
/// an empty tensor, one split unevenly, and one of more than a block.
inline CheckpointToSave small_checkpoint(int64_t step = 1) {
  const auto dp = [](int64_t dim) { return cut("dp_shard", 2, 2, dim); };
  const auto tp = [](int64_t dim) { return cut("tp", 2, 1, dim); };
  at::manual_seed(static_cast<uint64_t>(step));
  CheckpointToSave save{.step = step, .world_size = 4, .tensors = {}};
  save.tensors = {
      {"model.embedding", at::randn({300, 1000}), {{dp(0), tp(1)}}},
      {"model.norm", at::randn({7}), {{dp(0)}}},
      {"model.output", at::randn({5, 6}).to(at::kBFloat16), {{tp(0), dp(0)}}},
      {"model.scale", at::randn({}), {}},
      {"model.unused", at::empty({0, 3}), {}},
      {"optimizer.step", at::full({}, step, at::kLong), {}},
  };
  save.config = "[training]\nsteps = 20\n\n[job]\ndump_folder = \"outputs\"\n";
  save.texts = {{"train_state",
                 "{\"step\": " + std::to_string(step) + ", \"tokens\": " + std::to_string(4096 * step) + "}"},
                {"dataloader", "{\"lanes\": [" + std::to_string(step) + ", 0]}"}};
  return save;
}

}  // namespace titan::testing
