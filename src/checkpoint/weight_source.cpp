#include "weight_source.h"

#include <string_view>

namespace titan::detail {
namespace {

// Of the parameters among a state's tensors.
constexpr std::string_view kModelPrefix = "model.";

SafetensorsEntry entry_of(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsInfo& info = file.info(name);
  return {name, info.dtype, info.shape};
}

void read_and_drop(const SafetensorsFile& file, const std::string& name, const Box& box,
                   const at::Tensor& target) {
  file.read_slice(name, box, target);
  file.drop_pages();
}

}  // namespace

std::optional<SafetensorsEntry> FileWeights::find(const std::string& name) const {
  if (!file_.contains(name)) return std::nullopt;
  return entry_of(file_, name);
}

void FileWeights::read(const std::string& name, const Box& box, const at::Tensor& target) const {
  read_and_drop(file_, name, box, target);
}

std::optional<SafetensorsEntry> FolderWeights::find(const std::string& name) const {
  if (!folder_.contains(name)) return std::nullopt;
  return entry_of(folder_.file_of(name), name);
}

void FolderWeights::read(const std::string& name, const Box& box, const at::Tensor& target) const {
  read_and_drop(folder_.file_of(name), name, box, target);
}

std::vector<std::string> StateWeights::names() const {
  std::vector<std::string> names;
  for (const checkpoint::StateTensor& tensor : state_.table().tensors())
    if (tensor.name.starts_with(kModelPrefix)) names.push_back(tensor.name.substr(kModelPrefix.size()));
  return names;
}

std::optional<SafetensorsEntry> StateWeights::find(const std::string& name) const {
  const auto position = state_.table().find(std::string(kModelPrefix) + name);
  if (!position) return std::nullopt;
  const checkpoint::StateTensor& tensor = state_.table().tensors()[*position];
  return SafetensorsEntry{name, tensor.dtype, tensor.shape};
}

void StateWeights::read(const std::string& name, const Box& box, const at::Tensor& target) const {
  state_.read(std::string(kModelPrefix) + name, box, target);
}

}  // namespace titan::detail
