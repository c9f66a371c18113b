#include "taken_signals.h"

#include <signal.h>
#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

namespace titan::cli {
namespace {

namespace fs = std::filesystem;

/// What stands behind "NAME:" in a process's status.
std::optional<std::string> status_field(pid_t pid, const std::string& name) {
  std::ifstream file(fs::path("/proc") / std::to_string(pid) / "status");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(name + ":")) continue;
    const size_t start = line.find_first_not_of(" \t", name.size() + 1);
    return start == std::string::npos ? std::string() : line.substr(start);
  }
  return std::nullopt;
}

/// In a mask of 16 digits to the base of 16.
bool has_signal(const std::optional<std::string>& mask, int signal) {
  if (!mask) return false;
  uint64_t signals = 0;
  const auto [end, error] = std::from_chars(mask->data(), mask->data() + mask->size(), signals, 16);
  return error == std::errc() && ((signals >> (signal - 1)) & 1) != 0;
}

std::optional<pid_t> number_of(const std::string& name) {
  pid_t pid = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), pid);
  if (error != std::errc() || end != name.data() + name.size()) return std::nullopt;
  return pid;
}

}  // namespace

bool takes(pid_t pid, int signal) {
  return has_signal(status_field(pid, "SigCgt"), signal) || has_signal(status_field(pid, "SigBlk"), signal);
}

// Also of those whose parent has ended: so all processes are looked through, and not the group's tree.
int signal_takers(pid_t group, int signal) {
  int num_sent = 0;
  std::error_code error;
  const auto skip = fs::directory_options::skip_permission_denied;
  for (fs::directory_iterator at("/proc", skip, error), end; !error && at != end; at.increment(error)) {
    const auto pid = number_of(at->path().filename().string());
    if (pid && getpgid(*pid) == group && takes(*pid, signal) && kill(*pid, signal) == 0) ++num_sent;
  }
  return num_sent;
}

}  // namespace titan::cli
