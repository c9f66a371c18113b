#pragma once

// Runs that stop and resume: the small model with its state saved.

#include <map>

#include "e2e/small_run.h"

namespace titan::testing {

// Layouts of two and four ranks.
inline const Words kTensor2 = {"--training.local_batch_size", "4", "--parallelism.tensor_parallel_degree",
                               "2"};
inline const Words kContext2 = {"--training.local_batch_size", "4", "--parallelism.context_parallel_degree",
                                "2"};
inline const Words kPipeline2 = {"--training.local_batch_size", "4", "--parallelism.pipeline_parallel_degree",
                                 "2"};
inline const Words kReplicate2 = {"--parallelism.data_parallel_replicate_degree", "2",
                                  "--parallelism.data_parallel_shard_degree", "2"};

/// Writes the run's own text, because a run resumes only with the data that it began with.
inline std::string write_text(const std::filesystem::path& folder) {
  const std::vector<std::string> words = {"a",   "run",  "that", "goes", "on",  "is",
                                          "the", "same", "step", "by",   "step"};
  std::ofstream file(folder / "text.txt");
  uint32_t state = 1;
  for (int i = 1; i <= 20'000; ++i) {
    state = state * 1664525 + 1013904223;
    file << words[(state >> 16) % words.size()] << (i % 12 == 0 ? ".\n" : " ");
  }
  return (folder / "text.txt").string();
}

/// A scontrol that records its arguments, found before the real one.
inline std::filesystem::path fake_scontrol(const std::filesystem::path& folder, int code) {
  const std::filesystem::path program = folder / "scontrol";
  std::ofstream(program) << "#!/bin/sh\necho \"$@\" >> " << (folder / "arguments").string() << "\nexit "
                         << code << "\n";
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  return folder / "arguments";
}

/// 20 steps of the small run, whatever the number of ranks: each step has four rows, which the ranks share.
/// Saves in folder/checkpoint.
inline Words resumable(const std::filesystem::path& config_folder) {
  return small_run(config_folder) + Words{"--training.dataset_path",
                                          write_text(config_folder),
                                          "--validation.no_enable",
                                          "--checkpoint.enable",
                                          "--checkpoint.interval",
                                          "5",
                                          "--training.steps",
                                          "20",
                                          "--training.local_batch_size",
                                          "1",
                                          "--lr_scheduler.total_steps",
                                          "20"};
}

/// The same up to `steps`, where the whole state is saved.
inline Words part_of_run(const Words& words, int steps) {
  return words + Words{"--training.steps", std::to_string(steps), "--checkpoint.no_last_save_model_only"};
}

inline Words ranks(int number, const Words& layout = {}) {
  return Words{"--nproc", std::to_string(number)} + layout;
}

inline std::filesystem::path step_folder(const std::filesystem::path& run, int step) {
  return run / "checkpoint" / ("step-" + std::to_string(step));
}

inline std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

inline std::string bytes_of(const std::filesystem::path& path) {
  std::ostringstream bytes;
  bytes << std::ifstream(path, std::ios::binary).rdbuf();
  return bytes.str();
}

/// The numbers of the logged steps that can be compared exactly, by step. Leaves out a last row that a kill
/// cut short.
using Curve = std::map<int64_t, std::vector<double>>;
inline Curve curve_of(const std::filesystem::path& run) {
  std::ifstream file(run / "metrics.jsonl");
  Curve curve;
  for (std::string line; std::getline(file, line) && !file.eof();) {
    const auto row = nlohmann::json::parse(line);
    const bool is_new =
        curve
            .emplace(row.at("step"), std::vector<double>{row.at("loss"), row.at("grad_norm"), row.at("lr"),
                                                         row.at("n_tokens_seen")})
            .second;
    EXPECT_TRUE(is_new) << "step " << row.at("step") << " is logged twice in " << run;
  }
  return curve;
}

/// Expects the same run on other ranks, within rounding: sums have another order there.
inline void expect_near(const Curve& found, const Curve& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [step, numbers] : expected) {
    EXPECT_NEAR(found.at(step)[0], numbers[0], 1e-5) << "loss of step " << step;
    EXPECT_NEAR(found.at(step)[1], numbers[1], 1e-4) << "gradient norm of step " << step;
    EXPECT_EQ(found.at(step)[2], numbers[2]) << "learning rate of step " << step;
    EXPECT_EQ(found.at(step)[3], numbers[3]) << "tokens seen after step " << step;
  }
}

/// Runs `train` and returns its log.
inline std::string train_log(const std::filesystem::path& run, const Words& words, int expected_status = 0) {
  const CommandResult result = try_train(words + Words{"--job.dump_folder", run.string()}, 100);
  EXPECT_EQ(result.status, expected_status) << result.err << result.out;
  return result.err + result.out;
}

}  // namespace titan::testing
