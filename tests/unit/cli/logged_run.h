#pragma once

// A run's folder with logs of its ranks, written by a test.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "cli/run_folder.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace fs = std::filesystem;

/// A run's folder with logs of its ranks.
struct LoggedRun {
  explicit LoggedRun(const char* name) : folder(fs::path(::testing::TempDir()) / name) {
    fs::remove_all(folder);
    fs::create_directories(folder / "structured_logs");
    std::ofstream(folder / "config.toml") << "[training]\nsteps = 100\n";
  }
  /// `time` as in names of logs; lines as "step 5 fwd_bwd_error", "step 5 own_s 0.25".
  void log(int rank, const std::string& time, int world_size, const std::vector<std::string>& lines,
           const char* part = "") const {
    std::ofstream file(folder / "structured_logs" /
                       str("train.global_rank_", rank, ".", time, "-aaaaaa", part, ".jsonl"));
    const ProcessFiles files{.rank = rank, .stem = str("train.global_rank_", rank, ".", time, "-aaaaaa")};
    int64_t at = start_us(files);
    file << "{\"time_us\": " << at
         << ", \"log_type_name\": \"process\", \"environment\": {\"world_size\": " << world_size << "}}\n";
    for (const std::string& line : lines) {
      std::istringstream words(line);
      std::string word, name, value;
      int64_t step = 0;
      words >> word >> step >> name >> value;
      at = std::max(at, start_us(files) + step * 1'000'000);
      const bool is_event = name.ends_with("_start") || name.ends_with("_end") || name.ends_with("_error");
      file << str("{\"time_us\": ", at += 1000, ", \"log_type\": \"", is_event ? "event" : "instant",
                  "\", \"log_type_name\": \"", name, "\", \"value\": ", value.empty() ? "null" : value,
                  ", \"step\": ", step, ", \"relative_step\": ", step, ", \"rank\": ", rank,
                  ", \"host_name\": \"node", rank, "\", \"pid\": 7}\n");
    }
  }
  fs::path folder;
};

}  // namespace titan::cli
