#pragma once

// A small Llama that trains and validates in a second, on any layout, and its logs.

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "e2e/training.h"

namespace titan::testing {

using Lines = std::vector<nlohmann::json>;

inline Lines read_lines(const std::filesystem::path& file) {
  std::ifstream stream(file);
  Lines lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

/// The complete rows of metrics.jsonl, of a run that may still be going.
inline Lines whole_rows(const std::filesystem::path& run) {
  std::ifstream stream(run / "metrics.jsonl");
  Lines lines;
  for (std::string line; std::getline(stream, line) && !stream.eof();)
    if (auto row = nlohmann::json::parse(line, nullptr, false); row.is_object())
      lines.push_back(std::move(row));
  return lines;
}

// A small Llama over the bytes of text, validated over shorter sequences than it trains on. The validation
// text fills three of four rows, the last in part.
inline constexpr const char* kSmallRun = R"(
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "bytes"
[model.args]
dim = 64
n_layers = 2
n_heads = 4
n_kv_heads = 2
vocab_size = 258
multiple_of = 32
[training]
dataset = "text"
global_batch_size = 4
seq_len = 48
steps = 4
mixed_precision_param = "float32"
[lr_scheduler]
warmup_steps = 2
[metrics]
log_freq = 1
[validation]
enable = true
dataset = "text"
seq_len = 24
freq = 2
steps = -1
)";

inline Words small_run(const std::filesystem::path& folder) {
  std::ofstream(folder / "config.toml") << kSmallRun;
  std::ofstream(folder / "short.txt")
      << "Seventy bytes of text, of which the model knows nothing when it reads.";
  return {(folder / "config.toml").string(), "--training.dataset_path", source_file("docs/*.md"),
          "--validation.dataset_path", (folder / "short.txt").string()};
}

/// Compares two such runs after the steps 1, 2 and 4.
inline void expect_same_validation(const std::filesystem::path& folder, const std::filesystem::path& plain) {
  const Lines validated = read_lines(folder / "validation.jsonl"),
              wanted = read_lines(plain / "validation.jsonl");
  ASSERT_EQ(validated.size(), 3u);  // after the steps 1, 2 and 4
  ASSERT_EQ(wanted.size(), 3u);
  for (size_t i = 0; i < validated.size(); ++i)
    EXPECT_NEAR(validated[i].at("loss"), wanted[i].at("loss"), 5e-6) << i;
}

/// Compares the logged steps of two such runs.
inline void expect_same_metrics(const std::filesystem::path& folder, const std::filesystem::path& plain) {
  const Lines steps = read_lines(folder / "metrics.jsonl"), expected = read_lines(plain / "metrics.jsonl");
  ASSERT_EQ(steps.size(), 4u);
  ASSERT_EQ(expected.size(), 4u);
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_NEAR(steps[i].at("loss"), expected[i].at("loss"), 5e-6) << i;
    EXPECT_NEAR(steps[i].at("max_loss"), expected[i].at("max_loss"), 5e-6) << i;
    EXPECT_NEAR(steps[i].at("grad_norm"), expected[i].at("grad_norm"), 1e-5) << i;
    EXPECT_EQ(steps[i].at("n_tokens_seen"), expected[i].at("n_tokens_seen")) << i;
  }
}

}  // namespace titan::testing
