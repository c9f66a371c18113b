// Which GPUs multiply in Float8 and in MXFP8, and the errors on the others.

#include <gtest/gtest.h>

#include "job/build.h"
#include "titan/core/error.h"

namespace titan::train {
namespace {

constexpr ConverterKeys kSomeKeys{"the.converter", "the.emulate"};
constexpr int kCapabilities[] = {80, 86, 89, 90, 100};

struct UnitsCase {
  const char* recipe;
  int first;
  const char* written;
};
constexpr UnitsCase kUnitsCases[] = {{"tensorwise", 89, "8.9"},
                                     {"rowwise", 89, "8.9"},
                                     {"rowwise_with_gw_hp", 89, "8.9"},
                                     {"mxfp8_cublas", 100, "10.0"},
                                     {"mxfp8_cublas_rceil", 100, "10.0"}};

std::string refusal(const char* recipe, const std::optional<Gpu>& gpu) {
  try {
    choose_arithmetic(float8::recipes().get(recipe), gpu, /*emulate=*/false, kSomeKeys);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Float8Units, FollowTheComputeCapability) {
  for (const UnitsCase& c : kUnitsCases)
    for (const int capability : kCapabilities) {
      SCOPED_TRACE(str(c.recipe, " on ", capability));
      const Gpu gpu{"the GPU", capability};
      EXPECT_EQ(refusal(c.recipe, gpu).empty(), capability >= c.first);
      if (capability >= c.first) {
        EXPECT_EQ(choose_arithmetic(float8::recipes().get(c.recipe), gpu, /*emulate=*/false, kSomeKeys),
                  float8::Arithmetic::Hardware);
      }
    }
}

TEST(Float8Units, RefusalNamesUnitsDeviceAndRemedy) {
  for (const UnitsCase& c : kUnitsCases)
    for (const bool on_gpu : {true, false}) {
      const std::string text =
          refusal(c.recipe, on_gpu ? std::optional(Gpu{"the old GPU", 80}) : std::nullopt);
      for (const char* word : {"the.converter", c.written, "the.emulate", on_gpu ? "the old GPU" : "a CPU"})
        EXPECT_NE(text.find(word), std::string::npos) << c.recipe << ": " << text;
    }
}

TEST(Float8Units, EmulationNeedsNone) {
  for (const UnitsCase& c : kUnitsCases) {
    const float8::Recipe recipe = float8::recipes().get(c.recipe);
    EXPECT_EQ(choose_arithmetic(recipe, std::nullopt, /*emulate=*/true, kSomeKeys),
              float8::Arithmetic::Emulated);
    for (const int capability : kCapabilities)
      EXPECT_EQ(choose_arithmetic(recipe, Gpu{"the GPU", capability}, /*emulate=*/true, kSomeKeys),
                float8::Arithmetic::Emulated);
  }
}

}  // namespace
}  // namespace titan::train
