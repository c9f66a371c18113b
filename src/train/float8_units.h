#pragma once

// Which devices have units for the products of Float8 and MXFP8.

#include <optional>
#include <string>

#include "titan/float8/products.h"

namespace titan::train {

struct Gpu {
  std::string name;
  int compute_capability = 0;  ///< 90: 9.0
};

/// A table of the configuration that converts linear layers.
struct ConverterKeys {
  const char* converter = "";  ///< its name in model.converters
  const char* emulate = "";    ///< the key that does without units
};

/// How the products of `recipe` run on `gpu`, or on a CPU (nullopt). Throws ConfigError where it has no units
/// for them, unless they are emulated.
float8::Arithmetic choose_arithmetic(const float8::Recipe& recipe, const std::optional<Gpu>& gpu,
                                     bool emulate, const ConverterKeys& keys);

}  // namespace titan::train
