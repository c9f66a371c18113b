#include "checkpoint/state_table_text.h"

#include <map>

#include "checkpoint/safetensors_dtype.h"
#include "titan/core/error.h"

namespace titan::checkpoint::detail {
namespace {

constexpr int64_t kMaxTensors = 10'000'000;
constexpr int64_t kMaxLayouts = 100'000;
constexpr int64_t kMaxAxes = 64;
constexpr size_t kMaxDims = 64;

std::string joined(const std::vector<int64_t>& numbers) {
  std::string text;
  for (int64_t number : numbers) (text.empty() ? text : text += ",") += std::to_string(number);
  return text;
}

std::string text_of(const LayoutAxis& axis) {
  return str(R"({"axis":)", quoted(axis.name), R"(,"size":)", axis.size, R"(,"stride":)", axis.stride,
             R"(,"dim":)", axis.dim, R"(,"only":)", axis.only, "}");
}

std::string text_of(const TensorLayout& layout) {
  std::string text;
  for (const LayoutAxis& axis : layout.axes) text += (text.empty() ? "" : ",") + text_of(axis);
  return "[" + text + "]";
}

std::string text_of(const StateTensor& tensor, size_t layout) {
  return str("[", quoted(tensor.name), ",\"", titan::detail::safetensors_name_of(tensor.dtype), "\",[",
             joined(tensor.shape), "],", layout, "]");
}

}  // namespace

std::string table_fields(const std::vector<StateTensor>& tensors) {
  std::map<TensorLayout, size_t> positions;
  std::string layouts, rows;
  for (const StateTensor& tensor : tensors) {
    TITAN_CHECK(tensor.layout, "tensor '", tensor.name, "' has no layout");
    const auto [place, is_new] = positions.try_emplace(*tensor.layout, positions.size());
    // A line each, for people and their tools.
    if (is_new) layouts += (layouts.empty() ? "\n" : ",\n") + text_of(*tensor.layout);
    rows += (rows.empty() ? "\n" : ",\n") + text_of(tensor, place->second);
  }
  return str("\"layouts\":[", layouts, "],\n\"tensors\":[", rows, "]");
}

TableReader::TableReader()
    : axis_scope_(JsonRecord::Form::Object,
                  {{"axis", &axis_.name},
                   {"size", &axis_.size},
                   {"stride", &axis_.stride},
                   {"dim", &axis_.dim},
                   {"only", &axis_.only}},
                  [this] { return layout_.axes.push_back(axis_), std::string(); }),
      layout_scope_(axis_scope_, kMaxAxes, [this] { return add_layout(); }),
      layouts_scope_(layout_scope_, kMaxLayouts),
      shape_scope_(shape_, kMaxDims),
      tensor_scope_(
          JsonRecord::Form::Array,
          {{"name", &name_}, {"dtype", &dtype_}, {"shape", &shape_scope_}, {"layout", &layout_position_}},
          [this] { return add_tensor(); }),
      tensors_scope_(tensor_scope_, kMaxTensors) {}

std::string TableReader::add_layout() {
  layouts_.push_back(std::make_shared<const TensorLayout>(std::move(layout_)));
  layout_ = {};
  return "";
}

std::string TableReader::add_tensor() {
  const auto dtype = titan::detail::dtype_of_safetensors_name(dtype_);
  if (!dtype) return str("unknown dtype '", dtype_.substr(0, 20), "'");
  tensors_.push_back({.name = std::move(name_), .dtype = *dtype, .shape = shape_, .layout = nullptr});
  layout_positions_.push_back(layout_position_);
  return "";
}

std::vector<StateTensor> TableReader::take() {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const int64_t position = layout_positions_[i];
    TITAN_CHECK(position >= 0 && position < static_cast<int64_t>(layouts_.size()), "tensors[", i,
                "]: layout ", position, " of ", layouts_.size());
    tensors_[i].layout = layouts_[static_cast<size_t>(position)];
  }
  return std::move(tensors_);
}

}  // namespace titan::checkpoint::detail
