#include "weight_source.h"

#include <string_view>

#include <ATen/ops/empty.h>

namespace titan::detail {
namespace {

// Of the parameters among a state's tensors.
constexpr std::string_view kModelPrefix = "model.";

SafetensorsEntry entry_of(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsInfo& info = file.info(name);
  return {name, info.dtype, info.shape};
}

at::Tensor read_and_drop(const SafetensorsFile& file, const std::string& name, const Box& box) {
  at::Tensor part = file.read_slice(name, box);
  file.drop_pages();
  return part;
}

}  // namespace

std::optional<SafetensorsEntry> FileWeights::find(const std::string& name) const {
  if (!file_.contains(name)) return std::nullopt;
  return entry_of(file_, name);
}

at::Tensor FileWeights::read(const std::string& name, const Box& box) const {
  return read_and_drop(file_, name, box);
}

std::optional<SafetensorsEntry> FolderWeights::find(const std::string& name) const {
  if (!folder_.contains(name)) return std::nullopt;
  return entry_of(folder_.file_of(name), name);
}

at::Tensor FolderWeights::read(const std::string& name, const Box& box) const {
  return read_and_drop(folder_.file_of(name), name, box);
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

at::Tensor StateWeights::read(const std::string& name, const Box& box) const {
  const std::string full_name = std::string(kModelPrefix) + name;
  at::Tensor part = at::empty(box.length, at::dtype(state_.tensor(full_name).dtype));
  state_.read(full_name, box, part);
  return part;
}

}  // namespace titan::detail
