#pragma once

// Bytes that kernels move, as multiples of the least possible, compared with the tables of docs/gpu_performance.md.

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include <gtest/gtest.h>

namespace titan::testing {

class KernelTable {
 public:
  /// `least`: the bytes of the inputs and outputs. Of several calls of a kernel, the table has the largest multiple.
  void add(const std::string& kernel, double got, double least) {
    EXPECT_GE(got, least) << kernel;
    EXPECT_LE(got, 1.1 * least) << kernel;
    multiples_[kernel] = std::max(multiples_[kernel], got / least);
  }

  /// The rows of a table begin with "| `kernel` |"; the third cell is the multiple, in hundredths.
  void expect_equals_docs() const {
    std::map<std::string, double> documented;
    std::ifstream page(TITAN_SOURCE_DIR "/docs/gpu_performance.md");
    for (std::string line; std::getline(page, line);) {
      std::istringstream cells(line);
      std::string nothing, kernel, what, multiple;
      for (std::string* cell : {&nothing, &kernel, &what, &multiple}) std::getline(cells, *cell, '|');
      if (kernel.starts_with(" `") && kernel.ends_with("_kernel` "))
        documented[kernel.substr(2, kernel.size() - 4)] = std::atof(multiple.c_str());
    }
    for (const auto& [kernel, multiple] : multiples_) {
      const auto row = documented.find(kernel);
      ASSERT_NE(row, documented.end()) << "no row of " << kernel << " in docs/gpu_performance.md";
      EXPECT_NEAR(row->second, multiple, 0.005001) << kernel << " in docs/gpu_performance.md";
    }
  }

 private:
  std::map<std::string, double> multiples_;
};

}  // namespace titan::testing
