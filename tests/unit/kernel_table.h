#pragma once

// Bytes that kernels move and that their threads ask for, as multiples of the least possible, compared with the tables of
// docs/gpu_performance.md.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include <gtest/gtest.h>

namespace titan::testing {

class KernelTable {
 public:
  /// A field of a virtual GPU's counters.
  using Count = uint64_t (*)(const char* field, const char* module, const char* kernel);

  /// `least`: the bytes of the inputs and outputs. Of several calls of a kernel, the table has the largest multiples.
  void add(const std::string& kernel, Count count, double least) {
    const auto counted = [&](const char* field) {
      return static_cast<double>(count(field, nullptr, kernel.c_str()));
    };
    const double once = counted("bytes_read") + counted("bytes_written"),
                 requested = counted("bytes_requested");
    EXPECT_GE(once, least) << kernel;
    EXPECT_LE(once, 1.1 * least) << kernel;
    Row& row = rows_[kernel];
    row.once = std::max(row.once, once / least);
    row.with_repeats = std::max(row.with_repeats, requested / least);
  }

  /// The rows of a table begin with "| `kernel` |"; the third and the fourth cell are the multiples, in hundredths.
  void expect_equals_docs() const {
    std::map<std::string, Row> documented;
    std::ifstream page(TITAN_SOURCE_DIR "/docs/gpu_performance.md");
    for (std::string line; std::getline(page, line);) {
      std::istringstream cells(line);
      std::string nothing, kernel, what, multiple, repeats;
      for (std::string* cell : {&nothing, &kernel, &what, &multiple, &repeats})
        std::getline(cells, *cell, '|');
      if (!kernel.starts_with(" `") || !kernel.ends_with("_kernel` ")) continue;
      Row& row = documented[kernel.substr(2, kernel.size() - 4)];
      row.once = std::atof(multiple.c_str());
      row.with_repeats = std::atof(repeats.c_str());
    }
    for (const auto& [kernel, row] : rows_) {
      const auto found = documented.find(kernel);
      ASSERT_NE(found, documented.end()) << "no row of " << kernel << " in docs/gpu_performance.md";
      EXPECT_NEAR(found->second.once, row.once, 0.005001) << kernel << " in docs/gpu_performance.md";
      EXPECT_NEAR(found->second.with_repeats, row.with_repeats, 0.005001)
          << kernel << " in docs/gpu_performance.md";
    }
  }

 private:
  struct Row {
    double once = 0, with_repeats = 0;
  };
  std::map<std::string, Row> rows_;
};

}  // namespace titan::testing
