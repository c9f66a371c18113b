#pragma once

// A run that a test watches and disturbs while it continues.

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "e2e/command.h"

namespace titan::testing {

inline std::vector<int> children_of(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/task/" + std::to_string(pid) + "/children");
  std::vector<int> children;
  for (int child; file >> child;) children.push_back(child);
  return children;
}

/// The processes of its ranks.
inline std::vector<int> ranks_of(const Command& job) { return children_of(job.pid()); }

/// True until it has ended, even if others have yet to notice its end.
inline bool is_running(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');
  return name_end != std::string::npos && line.compare(name_end, 3, ") Z") != 0;
}

/// The job's ranks, once there are `count` of them and `holds(ranks)` is true; none if that takes too long.
template <class Condition>
std::vector<int> ranks_once(const Command& job, size_t count, const Condition& holds) {
  std::vector<int> ranks;
  const bool come = wait_until([&] {
    ranks = ranks_of(job);
    return ranks.size() == count && holds(ranks);
  });
  return come ? ranks : std::vector<int>();
}

/// Waits until the launcher has replaced the ranks `before` by `count` others (0: any number).
inline bool are_replaced(const Command& job, const std::vector<int>& before, size_t count = 0) {
  return wait_until([&] {
    const std::vector<int> now = ranks_of(job);
    return (count == 0 ? !now.empty() : now.size() == count) &&
           std::find_first_of(now.begin(), now.end(), before.begin(), before.end()) == now.end();
  });
}

/// Kills all of them with SIGKILL before the launcher can see one end and end the others for it. True: they
/// are gone, and the launcher has noticed.
inline bool kill_all_ranks(const Command& job) {
  const std::vector<int> ranks = ranks_of(job);
  job.signal(SIGSTOP);
  for (const int rank : ranks) ::kill(rank, SIGKILL);
  const bool are_gone = wait_until([&] { return std::none_of(ranks.begin(), ranks.end(), is_running); });
  job.signal(SIGCONT);
  return are_gone && wait_until([&] { return ranks_of(job).empty(); });
}

inline int64_t last_logged_step(const std::filesystem::path& run) {
  std::ifstream file(run / "metrics.jsonl");
  int64_t step = 0;
  for (std::string line; std::getline(file, line) && !file.eof();)
    step = nlohmann::json::parse(line).at("step").get<int64_t>();
  return step;
}

/// Seeded differently each time; a failure prints the seed, and TITAN_TEST_SEED repeats it.
inline std::mt19937 random_generator() {
  const char* given = std::getenv("TITAN_TEST_SEED");
  const auto seed = given ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10)) : std::random_device()();
  std::printf("TITAN_TEST_SEED=%u\n", seed);
  return std::mt19937(seed);
}

/// The number after the last `mark` in a text; -1 if there is none.
inline int64_t number_after(const std::string& text, const std::string& mark) {
  const size_t at = text.rfind(mark);
  return at == std::string::npos ? -1 : std::strtoll(text.c_str() + at + mark.size(), nullptr, 10);
}

}  // namespace titan::testing
