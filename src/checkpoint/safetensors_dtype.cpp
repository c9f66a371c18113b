#include "safetensors_dtype.h"

#include <array>
#include <utility>

#include "titan/core/error.h"

namespace titan::detail {
namespace {

using Row = std::pair<std::string_view, c10::ScalarType>;
constexpr std::array<Row, 12> kDtypes = {{
    {"F64", c10::ScalarType::Double},
    {"F32", c10::ScalarType::Float},
    {"F16", c10::ScalarType::Half},
    {"BF16", c10::ScalarType::BFloat16},
    {"F8_E4M3", c10::ScalarType::Float8_e4m3fn},
    {"F8_E5M2", c10::ScalarType::Float8_e5m2},
    {"I64", c10::ScalarType::Long},
    {"I32", c10::ScalarType::Int},
    {"I16", c10::ScalarType::Short},
    {"I8", c10::ScalarType::Char},
    {"U8", c10::ScalarType::Byte},
    {"BOOL", c10::ScalarType::Bool},
}};

}  // namespace

std::optional<c10::ScalarType> dtype_of_safetensors_name(std::string_view name) {
  for (const auto& [row_name, dtype] : kDtypes) {
    if (row_name == name) return dtype;
  }
  return std::nullopt;
}

std::string_view safetensors_name_of(c10::ScalarType dtype) {
  for (const auto& [name, row_dtype] : kDtypes) {
    if (row_dtype == dtype) return name;
  }
  TITAN_CHECK(false, "safetensors can't hold tensors of dtype ", c10::toString(dtype));
}

}  // namespace titan::detail
