#include "core/process.h"

#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "core/memory_limits.h"
#include "core/units.h"
#include "titan/core/error.h"

namespace titan {

namespace {

constexpr double kKibPerGib = 1024.0 * 1024.0;
constexpr const char* kLaunchSeconds = "TITAN_LAUNCH_SECONDS";

// Field 22 of /proc/self/stat. The command name before it (in parentheses) may contain anything, so count
// from its end.
double start_time_s() {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  std::istringstream fields(line.substr(line.rfind(')') + 1));
  std::string field;
  for (int index = 3; index <= 22; ++index) fields >> field;
  TITAN_CHECK(!field.empty(), "/proc/self/stat has no start time");
  return std::stod(field) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

}  // namespace

std::string errno_text(int error) {
  const char* name = strerrorname_np(error);
  return str(std::strerror(error), " (", name != nullptr ? name : "unknown errno", ")");
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "?";
}

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

std::string host_identity() {
  char network[64] = "";
  static_cast<void>(!::readlink("/proc/self/ns/net", network, sizeof network - 1));
  return host_name() + "/" + boot_id() + "/" + network;
}

std::string status_field(const std::string& process, const std::string& field) {
  std::ifstream file("/proc/" + process + "/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(field + ":")) {
      const size_t value = line.find_first_not_of(" \t", field.size() + 1);
      return value == std::string::npos ? "" : line.substr(value);
    }
  return "";
}

double seconds_since_process_start() {
  // Like the start time, CLOCK_BOOTTIME counts from boot and includes sleep.
  timespec now{};
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9 - start_time_s();
}

double seconds_since_launch() {
  const char* text = ::getenv(kLaunchSeconds);
  const double before = text == nullptr ? 0 : std::strtod(text, nullptr);
  return seconds_since_process_start() + (std::isfinite(before) ? std::max(before, 0.0) : 0);
}

void pass_on_launch_time() {
  ::setenv(kLaunchSeconds, std::to_string(seconds_since_process_start()).c_str(), /*overwrite=*/1);
}

pid_t start_program(const std::vector<std::string>& words, int output, int errors) {
  std::vector<std::string> texts = words;
  std::vector<char*> arguments;
  for (std::string& text : texts) arguments.push_back(text.data());
  arguments.push_back(nullptr);
  // This process's threads may leave its signals to one of them, and block them.
  posix_spawnattr_t plain;
  sigset_t none, all;
  ::sigemptyset(&none);
  ::sigfillset(&all);
  ::posix_spawnattr_init(&plain);
  ::posix_spawnattr_setsigmask(&plain, &none);
  ::posix_spawnattr_setsigdefault(&plain, &all);
  ::posix_spawnattr_setflags(&plain, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  // A connection that stayed open in the child would hide from its other end that this process has ended.
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  if (output >= 0) ::posix_spawn_file_actions_adddup2(&files, output, STDOUT_FILENO);
  if (errors >= 0) ::posix_spawn_file_actions_adddup2(&files, errors, STDERR_FILENO);
  ::posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
  pid_t child = -1;
  const int error = ::posix_spawnp(&child, arguments[0], &files, &plain, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&files);
  ::posix_spawnattr_destroy(&plain);
  TITAN_CHECK(error == 0, words[0], " can't be started: ", errno_text(error));
  return child;
}

double peak_resident_gib() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / kKibPerGib;
}

double machine_memory_gib() {
  static const double gib = static_cast<double>(usable_memory_bytes()) / kGiB;
  return gib;
}

}  // namespace titan
