#include "dist/device_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace titan::dist {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(DeviceChoice, AGpuWithoutThePluginIsTold) {
  const std::string here = "/proc/self/exe", nowhere = "/nowhere/libtitan_cuda.so";
  EXPECT_THAT(missing_plugin_warning({"auto", true, nowhere}),
              AllOf(HasSubstr(nowhere), HasSubstr("nvcc"), HasSubstr("training.device = \"cpu\"")));
  EXPECT_EQ(missing_plugin_warning({"auto", true, here}), "");
  EXPECT_EQ(missing_plugin_warning({"auto", false, nowhere}), "");
  EXPECT_EQ(missing_plugin_warning({"cpu", true, nowhere}), "");
}

}  // namespace
}  // namespace titan::dist
