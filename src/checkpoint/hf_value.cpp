#include <nlohmann/json.hpp>

#include "titan/checkpoint/hugging_face.h"

namespace titan {

std::string to_text(const HfValue& value) {
  const auto text = [](const auto& held) {
    if constexpr (std::is_same_v<decltype(held), const std::monostate&>) {
      return std::string("null");
    } else {
      return nlohmann::json(held).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    }
  };
  return std::visit(text, value);
}

}  // namespace titan
