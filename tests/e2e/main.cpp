#include <gtest/gtest.h>

#include "filters.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) titan::testing::choose_file(argv[i]);
  return RUN_ALL_TESTS();
}
