#pragma once

// The answer of `titan plan --json` for a job, from a process of its own, which a planned GPU needs.

#include <cstdio>
#include <memory>
#include <string>

#include <nlohmann/json.hpp>

#include "titan/core/error.h"
#include "unit/job/words.h"

namespace titan::testing {

/// The plan of configs/<preset>.toml. Throws Error if the command fails.
inline nlohmann::json plan_of(const std::string& preset, int world_size, const train::Words& words) {
  std::string command = str("env -u LD_PRELOAD ", TITAN_BINARY_DIR, "/bin/titan plan ", TITAN_SOURCE_DIR,
                            "/configs/", preset, ".toml --world ", world_size, " --json");
  for (const std::string& word : words) command += " '" + word + "'";
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(::popen(command.c_str(), "r"), ::pclose);
  std::string text;
  char buffer[65536];
  while (const size_t count = std::fread(buffer, 1, sizeof buffer, pipe.get())) text.append(buffer, count);
  if (const int status = ::pclose(pipe.release()); status != 0) throw Error(str(command, " failed"));
  return nlohmann::json::parse(text);
}

/// The memory of this rank, or of the rank before it whose role it shares.
inline const nlohmann::json& planned_memory(const nlohmann::json& plan, int rank) {
  const nlohmann::json& roles = plan.at("memory").at("by_role");
  const nlohmann::json* found = nullptr;
  for (const nlohmann::json& role : roles)
    if (role.at("rank") <= rank && (!found || role.at("rank") > found->at("rank"))) found = &role;
  return *found;
}

}  // namespace titan::testing
