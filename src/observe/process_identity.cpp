#include "observe/process_identity.h"

#include <sys/utsname.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <thread>

#include <ATen/Parallel.h>
#include <torch/version.h>
#include <nlohmann/json.hpp>

#include "core/process_stats.h"
#include "dist/device_backend.h"
#include "titan/core/version.h"
#include "titan/dist/world.h"

namespace titan::train {

namespace {

// "model name : AMD EPYC 7B13"; other processors than x86 say less.
std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

std::string command_line() {
  std::ifstream file("/proc/self/cmdline");
  std::string words((std::istreambuf_iterator<char>(file)), {});
  if (!words.empty() && words.back() == '\0') words.pop_back();
  std::replace(words.begin(), words.end(), '\0', ' ');
  return words;
}

std::string device_text(at::Device device) {
  auto* backend = dist::device_backend();
  if (!backend || device.type() != backend->device_type()) return device.str();
  return device.str() + " " + backend->device_name(device.index());
}

std::string kernel_text() {
  utsname name = {};
  ::uname(&name);
  return std::string(name.sysname) + " " + name.release + " " + name.machine;
}

}  // namespace

std::string host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

std::string process_environment_json(const dist::World& world, at::Device device) {
  const nlohmann::ordered_json object = {{"titan", kVersion},
                                         {"libtorch", TORCH_VERSION},
                                         {"compiler", __VERSION__},
                                         {"host", host_name()},
                                         {"kernel", kernel_text()},
                                         {"cpu", cpu_name()},
                                         {"cores", std::thread::hardware_concurrency()},
                                         {"machine_memory_gib", machine_memory_gib()},
                                         {"device", device_text(device)},
                                         {"world_size", world.size()},
                                         {"local_size", world.local_size()},
                                         {"backend", world.backend()},
                                         {"launched_by", world.launched_by()},
                                         {"threads", at::get_num_threads()},
                                         {"command", command_line()}};
  // A command line may hold bytes that aren't UTF-8.
  return object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace titan::train
