// Equality with TorchTitan's own numbers for given weights (tests/data/parity) and with float64 gradients
// (tests/data/golden).

#include <fstream>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "titan/checkpoint/safetensors.h"
#include "titan/models/llama3.h"
#include "titan/parallel/parameters.h"
#include "unit/golden.h"

namespace titan::models {
namespace {

const std::filesystem::path kData = std::filesystem::path(TITAN_SOURCE_DIR) / "tests/data";

// The first `count` int32 elements of an .npy file.
at::Tensor first_of_npy(const std::filesystem::path& path, int64_t count) {
  std::ifstream file(path, std::ios::binary);
  std::string preamble(10, '\0');
  file.read(preamble.data(), 10);
  file.ignore(static_cast<unsigned char>(preamble[8]) + 256 * static_cast<unsigned char>(preamble[9]));
  at::Tensor values = at::empty({count}, at::kInt);
  file.read(static_cast<char*>(values.data_ptr()), count * 4);
  return values.to(at::kLong);
}

class Parity : public ::testing::TestWithParam<std::string> {
 protected:
  std::filesystem::path folder = kData / "parity" / GetParam();
  nlohmann::json fixture = nlohmann::json::parse(std::ifstream(folder / "fixture.json"));

  Llama3 model(at::ScalarType dtype) {
    const auto& sizes = fixture["model"];
    const Llama3 model(Llama3Args{.dim = sizes["dim"],
                                  .n_layers = sizes["n_layers"],
                                  .n_heads = sizes["n_heads"],
                                  .n_kv_heads = sizes["n_kv_heads"].get<int64_t>(),
                                  .vocab_size = sizes["vocab_size"],
                                  .multiple_of = sizes["multiple_of"],
                                  .rope_theta = sizes["rope_theta"],
                                  .max_seq_len = sizes["max_seq_len"]},
                       deferred(at::kCPU, dtype));
    materialize(model, 0);
    const SafetensorsFile weights(folder / "titan.safetensors");
    for (const Parameter& parameter : parameters(model))
      parameter.compute.variable_data().copy_(weights.tensor(parameter.name));
    return model;
  }
  at::Tensor first(const std::string& name) {
    const int64_t rows = fixture["training"]["global_batch"], length = fixture["training"]["seq_len"];
    return first_of_npy(folder / name, rows * length).view({rows, length});
  }
  int64_t valid_tokens() { return fixture["valid_tokens"][0]; }
};

TEST_P(Parity, FirstLogitsAreTorchTitans) {
  at::NoGradGuard no_grad;
  const at::Tensor logits = model(at::kFloat)(first("input.npy"));
  const auto expected = [this](const char* key) {
    return fixture["first_logits"][key].get<std::vector<double>>();
  };
  const auto front = expected("row0_position0"), back = expected("last_row_last_position");
  for (size_t i = 0; i < front.size(); ++i)
    EXPECT_NEAR(logits[0][0][static_cast<int64_t>(i)].item<double>(), front[i], 1e-5);
  for (size_t i = 0; i < back.size(); ++i)
    EXPECT_NEAR(logits[-1][-1][static_cast<int64_t>(i)].item<double>(), back[i], 1e-5);
}

TEST_P(Parity, FirstLossAndGradientNormsAreTorchTitans) {
  const Llama3 llama = model(at::kFloat);
  const at::Tensor loss = llama(first("input.npy"), first("labels.npy"), valid_tokens());
  loss.backward();
  EXPECT_NEAR(loss.item<double>(), fixture["steps"][0]["loss"].get<double>(), 1e-5);
  for (const Parameter& parameter : parameters(llama)) {
    const double norm = parameter.compute.grad().to(at::kDouble).norm().item<double>();
    EXPECT_NEAR(norm / fixture["first_grad_norms"][parameter.name].get<double>(), 1, 1e-5) << parameter.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, Parity, ::testing::Values("mini", "mini8"));

class Exact : public Parity {};

TEST_P(Exact, Float64GradientsArePyTorchs) {
  const SafetensorsFile golden(kData / "golden/mini_grads.safetensors");
  const Llama3 llama = model(at::kDouble);
  const at::Tensor loss = llama(first("input.npy"), first("labels.npy"), valid_tokens());
  loss.backward();
  EXPECT_NEAR(loss.item<double>(), golden.tensor("loss").item<double>(), 1e-12);
  for (const Parameter& parameter : parameters(llama))
    EXPECT_CLOSE(parameter.compute.grad(), golden.tensor(parameter.name), 1e-10) << parameter.name;
}

TEST_P(Exact, Fp32GradientsAreWithinRounding) {
  const SafetensorsFile golden(kData / "golden/mini_grads.safetensors");
  const Llama3 llama = model(at::kFloat);
  llama(first("input.npy"), first("labels.npy"), valid_tokens()).backward();
  for (const Parameter& parameter : parameters(llama))
    EXPECT_CLOSE(parameter.compute.grad(), golden.tensor(parameter.name), 1e-5) << parameter.name;
}

INSTANTIATE_TEST_SUITE_P(Mini, Exact, ::testing::Values("mini"));

}  // namespace
}  // namespace titan::models
