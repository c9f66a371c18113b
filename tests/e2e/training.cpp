#include "e2e/training.h"

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>

namespace titan::testing {

std::vector<Logged> read_metrics(const std::filesystem::path& dump_folder) {
  std::ifstream file(dump_folder / "metrics.jsonl");
  std::vector<Logged> steps;
  for (std::string line; std::getline(file, line);) {
    auto object = nlohmann::json::parse(line);
    steps.push_back({object.at("step"), object.at("loss"), object.at("grad_norm"), object.at("lr")});
  }
  return steps;
}

std::vector<double> losses(const std::vector<Logged>& steps) {
  std::vector<double> values;
  for (const Logged& step : steps) values.push_back(step.loss);
  return values;
}

std::string built(const std::string& name) { return std::string(TITAN_BINARY_DIR) + "/bin/" + name; }
std::string titan_program() { return built("titan"); }
std::string source_file(const std::string& name) { return std::string(TITAN_SOURCE_DIR) + "/" + name; }

std::filesystem::path fresh_folder(const std::string& name) {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  // Named after this tree and device: others may be tested at the same time.
  std::string who = TITAN_BINARY_DIR;
  for (const char* variable : {"TITAN_TEST_DEVICE", "TITAN_TEST_BACKEND"})
    if (const char* value = std::getenv(variable)) who += std::string(" ") + value;
  auto folder = std::filesystem::path(::testing::TempDir()) /
                ("titan_e2e_" + std::to_string(std::hash<std::string>{}(who) % 1000000)) /
                test->test_suite_name() / test->name() / name;
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  return folder;
}

bool tests_on_gpu() {
  const char* device = std::getenv("TITAN_TEST_DEVICE");
  return device && std::string_view(device) == "cuda";
}

Words device_words() {
  const char* backend = std::getenv("TITAN_TEST_BACKEND");
  if (tests_on_gpu()) return {"--training.device", "cuda", "--comm.backend", backend ? backend : "gloo"};
  return {"--training.device", "cpu"};
}

Words train_words(const Words& words) { return Words{titan_program(), "train"} + words + device_words(); }

CommandResult try_train(const Words& words, double limit_s, int threads) {
  // Virtual GPUs compute on the CPU, and check each access for races.
  if (tests_on_gpu()) limit_s *= 5;
  return run(train_words(words), {{"OMP_NUM_THREADS", std::to_string(threads)}}, limit_s);
}

std::vector<Logged> train(const std::filesystem::path& folder, const Words& words, double limit_s,
                          int threads) {
  CommandResult result = try_train(words + Words{"--job.dump_folder", folder.string()}, limit_s, threads);
  EXPECT_EQ(result.status, 0) << result.err << result.out;
  return read_metrics(folder);
}

}  // namespace titan::testing
