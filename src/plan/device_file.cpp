#include "plan/device_file.h"

#include <algorithm>
#include <filesystem>
#include <vector>

#include <c10/util/StringUtil.h>

#include "titan/config/load.h"
#include "titan/core/error.h"

namespace titan::plan {

namespace {

namespace fs = std::filesystem;

struct DeviceFile {
  DeviceSpec device;
};

// The source tree's, from its root or from its build folder; and the installed ones.
std::vector<fs::path> folders() {
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored).parent_path();
  return {fs::path("configs/devices"), program / "../../configs/devices", program / "../share/titan/devices"};
}

std::vector<std::string> known_names() {
  for (const fs::path& folder : folders()) {
    std::vector<std::string> names;
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder, error))
      if (entry.path().extension() == ".toml") names.push_back(entry.path().stem());
    std::ranges::sort(names);
    if (!names.empty()) return names;
  }
  return {};
}

fs::path file_of(const std::string& name) {
  std::error_code ignored;
  if (name.ends_with(".toml")) {
    if (fs::exists(name, ignored)) return name;
    throw ConfigError(str("--device ", name, ": there is no such file"));
  }
  for (const fs::path& folder : folders())
    if (const fs::path file = folder / (name + ".toml"); fs::exists(file, ignored)) return file;
  const std::vector<std::string> known = known_names();
  throw ConfigError(str("--device ", name, ": unknown device; known: ", c10::Join(", ", known),
                        ", or a .toml file", did_you_mean(name, known)));
}

}  // namespace

void describe(config::Table<DeviceSpec>& table) {
  table.field("name", &DeviceSpec::name, "as the driver reports it");
  table.field("memory_gib", &DeviceSpec::memory_gib, "all of it, as the driver reports it",
              config::at_least(0));
  table.field("compute_capability", &DeviceSpec::compute_capability,
              "ten times the major version and the minor one: 90 for 9.0", config::at_least(0));
  table.field("multiprocessors", &DeviceSpec::multiprocessors, "their number", config::at_least(0));
}

DeviceSpec load_device(const std::string& name) {
  const fs::path file = file_of(name);
  auto schema = config::Schema::of<DeviceFile>();
  schema.add("device", &DeviceFile::device, "the device");
  DeviceFile loaded;
  const config::Origins origins = config::load(schema, {.file = file, .overrides = {}}, loaded);
  std::vector<std::string> problems;
  const auto require = [&](bool holds, const char* key, const char* what) {
    if (!holds)
      problems.push_back(origins.problem(key, str("is missing in ", file.string(), ", or isn't ", what)));
  };
  const auto is_within = [](auto value, auto lowest, auto highest) {
    return value >= lowest && value <= highest;
  };
  const DeviceSpec& device = loaded.device;
  require(!device.name.empty(), "device.name", "a name");
  require(is_within(device.memory_gib, 1.0, 4096.0), "device.memory_gib", "from 1 to 4096");
  require(is_within(device.compute_capability, 70, 999), "device.compute_capability", "from 70 to 999");
  require(is_within(device.multiprocessors, 1, 1024), "device.multiprocessors", "from 1 to 1024");
  if (!problems.empty()) throw ConfigError(std::move(problems));
  return loaded.device;
}

}  // namespace titan::plan
