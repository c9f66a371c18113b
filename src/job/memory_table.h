#pragma once

// Bytes in words and tables.

#include <string>
#include <vector>

#include "job/memory_report.h"

namespace titan::train {

constexpr double kGib = 1024.0 * 1024.0 * 1024.0;

struct NamedBytes {
  std::string name;
  double bytes = 0;
};

/// "1.50" for 1.5 x 1024^3.
std::string gib(double bytes);

/// "layers.0 to layers.31 0.30 each, output 0.61", in GiB: neighbours of about one size share an entry.
std::string list_of(const std::vector<NamedBytes>& list);

/// Owners with their bytes, and what would be saved, a line each.
std::string table_of(const MemoryReport& report);

}  // namespace titan::train
