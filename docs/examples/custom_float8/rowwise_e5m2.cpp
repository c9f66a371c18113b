// Your own Float8 recipe: like "rowwise", but with gradients in e5m2, which has a wider range. The program
// loads it from a shared object:
//
//   titan train config.toml --experimental.custom_import ./librowwise_e5m2.so
//     --model.converters quantize.linear.float8 --quantize.linear.float8.recipe_name rowwise_e5m2

#include "titan/float8/recipe.h"

namespace {

using titan::float8::Cast;
using titan::float8::Granularity;
using titan::float8::ProductCasts;

constexpr Cast kRows{.dtype = at::kFloat8_e4m3fn, .granularity = Granularity::Vector};
constexpr Cast kWideRows{.dtype = at::kFloat8_e5m2, .granularity = Granularity::Vector};

}  // namespace

extern "C" void titan_register() {
  titan::float8::recipes().add("rowwise_e5m2", {.output = ProductCasts{kRows, kRows},
                                                .grad_input = ProductCasts{kWideRows, kRows},
                                                .grad_weight = ProductCasts{kWideRows, kRows},
                                                .power_of_two_scales = true});
}
