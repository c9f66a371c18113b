#pragma once

// Runs `titan train` from a test and reads its results.

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "e2e/command.h"
#include "titan/core/error.h"

namespace titan::testing {

using Words = std::vector<std::string>;

inline Words operator+(Words a, const Words& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// A line of metrics.jsonl.
struct Logged {
  int64_t step = 0;
  double loss = 0;
  double grad_norm = 0;
  double lr = 0;
};

/// Throws if the file is missing or a line lacks such members.
std::vector<Logged> read_metrics(const std::filesystem::path& dump_folder);

std::vector<double> losses(const std::vector<Logged>& steps);

/// The program under test.
std::string titan_program();
/// build/bin/<name>.
std::string built(const std::string& name);
std::string source_file(const std::string& name);

/// A new empty folder below the test's temporary one, named after the running test.
std::filesystem::path fresh_folder(const std::string& name);

/// Tests train on the CPU on every machine. With TITAN_TEST_DEVICE=cuda they use the GPU, which all ranks
/// share (gloo allows that), or one GPU each with TITAN_TEST_BACKEND=nccl.
bool tests_on_gpu();
Words device_words();

/// `titan train words...` on that device.
Words train_words(const Words& words);

/// Runs it with one thread a rank, so that sums don't depend on the machine, or with `threads`. The limit is five times as long on GPUs.
CommandResult try_train(const Words& words, double limit_s = 60, int threads = 1);

/// The same with `--job.dump_folder folder`; it has to succeed.
std::vector<Logged> train(const std::filesystem::path& folder, const Words& words, double limit_s = 100,
                          int threads = 1);

}  // namespace titan::testing
