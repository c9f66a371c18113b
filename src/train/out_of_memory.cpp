#include <algorithm>
#include <array>
#include <cctype>
#include <new>

#include <c10/util/Exception.h>

#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/dist/device_backend.h"
#include "titan/train/memory_report.h"
#include "titan/train/process_stats.h"
#include "train/memory_table.h"

namespace titan::train {

namespace {

std::string in_use(c10::Device device) {
  auto* backend = dist::device_backend();
  if (device.is_cpu() || !backend)
    return str(gib(peak_resident_gib() * kGib), " GiB were resident at most so far, of the machine's ",
               gib(machine_memory_gib() * kGib), " GiB");
  const dist::DeviceMemory memory = backend->memory(device.index());
  return str(gib(static_cast<double>(memory.peak_allocated_bytes)),
             " GiB were in tensors at most since the last logged step, ",
             gib(static_cast<double>(memory.peak_reserved_bytes)),
             " GiB taken from the driver, of the device's ", gib(static_cast<double>(memory.total_bytes)),
             " GiB");
}

}  // namespace

// A pipeline's errors have lost their type. What they tell of the rank that failed first isn't this one's.
bool is_out_of_memory(const std::exception& error) {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) || dynamic_cast<const std::bad_alloc*>(&error))
    return true;
  std::string text = error.what();
  text.resize(std::min(text.size(), text.find("first to fail")));
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  constexpr std::array kWords = {"out of memory", "can't allocate memory", "std::bad_alloc"};
  return std::any_of(kWords.begin(), kWords.end(),
                     [&](const char* words) { return text.find(words) != std::string::npos; });
}

std::string explain_out_of_memory(const JobConfig& config, const dist::World& world) {
  try {
    const MemoryReport report = memory_report(config, world.size(), world.rank(), world.device());
    return str("out of memory on ", world.device().str(), ". ", in_use(world.device()), ". What rank ",
               world.rank(), " keeps at the fullest moment of a step, computed from sizes:\n",
               table_of(report));
  } catch (const std::exception& error) {
    log::warning(str("what has the memory can't be told: ", error.what()));
    return "";
  }
}

}  // namespace titan::train
