#include "job/memory_table.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>

#include "titan/core/error.h"

namespace titan::train {

namespace {

std::string padded(const std::string& text, size_t width) {
  return text + std::string(width - std::min(width, text.size()), ' ');
}

std::string right(const std::string& text, size_t width) {
  return std::string(width - std::min(width, text.size()), ' ') + text;
}

}  // namespace

// Small ones with the digits that tell them apart.
std::string gib(double bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(bytes < 0.1 * kGib ? 4 : 2) << bytes / kGib;
  return text.str();
}

std::string list_of(const std::vector<NamedBytes>& list) {
  std::string text;
  for (size_t begin = 0; begin < list.size();) {
    size_t end = begin + 1;
    while (end < list.size() && gib(list[end].bytes) == gib(list[begin].bytes)) ++end;
    text += str(text.empty() ? "" : ", ", list[begin].name);
    if (end - begin > 1) text += " to " + list[end - 1].name;
    text += str(" ", gib(list[begin].bytes), end - begin > 1 ? " each" : "");
    begin = end;
  }
  return text;
}

std::string table_of(const MemoryReport& report) {
  size_t width = 0;
  for (const MemoryOwner& owner : report.owners) width = std::max(width, owner.name.size());
  std::string text;
  for (const MemoryOwner& owner : report.owners)
    text += "  " + padded(owner.name, width) + right(gib(owner.bytes), 10) + " GiB  " + owner.details + "\n";
  text += "  " + padded("all", width) + right(gib(report.total_bytes()), 10) + " GiB\n";
  if (report.savings.empty()) return text;
  width = 0;
  for (const MemorySaving& saving : report.savings) width = std::max(width, saving.setting.size());
  text += "What would take less, each by itself:\n";
  for (const MemorySaving& saving : report.savings)
    text += "  " + padded(saving.setting, width) + right(gib(saving.bytes), 10) + " GiB less\n";
  return text;
}

}  // namespace titan::train
