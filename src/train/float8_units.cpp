#include "train/float8_units.h"

#include "titan/core/error.h"

namespace titan::train {

float8::Arithmetic choose_arithmetic(const float8::Recipe& recipe, const std::optional<Gpu>& gpu,
                                     bool emulate, const ConverterKeys& keys) {
  if (emulate) return float8::Arithmetic::Emulated;
  const int first = float8::first_capability(recipe);
  if (gpu && gpu->compute_capability >= first) return float8::Arithmetic::Hardware;
  throw ConfigError(str("model.converters: \"", keys.converter, "\" needs a GPU of compute capability ",
                        first / 10, ".", first % 10, " or above, which ", gpu ? gpu->name : "a CPU",
                        " isn't; ", keys.emulate, " = true gives the same numbers, slowly"));
}

}  // namespace titan::train
