#pragma once

// Weights that are converted, wherever they lie.

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/checkpoint/hf_folder.h"
#include "titan/checkpoint/safetensors.h"
#include "titan/checkpoint/saved_state.h"

namespace titan::detail {

class WeightSource {
 public:
  virtual ~WeightSource() = default;
  /// For messages.
  virtual std::string path() const = 0;
  virtual std::vector<std::string> names() const = 0;
  /// Dtype and shape; nullopt: it has no such tensor.
  virtual std::optional<SafetensorsEntry> find(const std::string& name) const = 0;
  /// Fills `target`, contiguous and of the source's dtype, with the elements in `box`; keeps no memory.
  virtual void read(const std::string& name, const Box& box, const at::Tensor& target) const = 0;
};

/// One file.
class FileWeights : public WeightSource {
 public:
  explicit FileWeights(const std::filesystem::path& file) : file_(file) {}
  std::string path() const override { return file_.path().string(); }
  std::vector<std::string> names() const override { return file_.names(); }
  std::optional<SafetensorsEntry> find(const std::string& name) const override;
  void read(const std::string& name, const Box& box, const at::Tensor& target) const override;

 private:
  SafetensorsFile file_;
};

/// The shards of a Hugging Face folder, under its names. The folder has to live as long.
class FolderWeights : public WeightSource {
 public:
  explicit FolderWeights(const HfFolder& folder) : folder_(folder) {}
  std::string path() const override { return folder_.path().string(); }
  std::vector<std::string> names() const override { return folder_.names(); }
  std::optional<SafetensorsEntry> find(const std::string& name) const override;
  void read(const std::string& name, const Box& box, const at::Tensor& target) const override;

 private:
  const HfFolder& folder_;
};

/// A saved state's tensors "model.NAME", as NAME.
class StateWeights : public WeightSource {
 public:
  explicit StateWeights(checkpoint::SavedState state) : state_(std::move(state)) {}
  std::string path() const override { return state_.folder().string(); }
  std::vector<std::string> names() const override;
  std::optional<SafetensorsEntry> find(const std::string& name) const override;
  void read(const std::string& name, const Box& box, const at::Tensor& target) const override;

 private:
  checkpoint::SavedState state_;
};

}  // namespace titan::detail
