// Equality with torch.optim, torch.nn.utils.clip_grad_norm_ and TorchTitan's schedules (tests/data/golden).

#include <nlohmann/json.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "core/file.h"
#include "titan/checkpoint/safetensors.h"
#include "titan/core/error.h"
#include "titan/optim/clip.h"
#include "titan/optim/lr_schedule.h"
#include "titan/optim/optimizer.h"
#include "unit/optim/make_parameters.h"

namespace titan::optim {
namespace {

using testing::make_parameter;
using testing::set_grad;

SafetensorsFile golden(const std::string& name) {
  return SafetensorsFile(std::string(TITAN_SOURCE_DIR "/tests/data/golden/") + name);
}

void expect_close(const at::Tensor& got, const at::Tensor& expected, double tolerance,
                  const std::string& what) {
  double worst = (got.detach().to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>();
  EXPECT_LE(worst, tolerance) << what;
}

struct Precision {
  std::string prefix;
  double tolerance;
};

class Golden : public ::testing::TestWithParam<Precision> {
 protected:
  at::Tensor read(const SafetensorsFile& file, const std::string& key) const {
    return file.tensor(GetParam().prefix + key).clone();
  }
  std::vector<Parameter> parameters(const SafetensorsFile& file, const std::string& prefix) const {
    return {make_parameter("p0", read(file, prefix + "p0")), make_parameter("p1", read(file, prefix + "p1"))};
  }
  double tolerance() const { return GetParam().tolerance; }
};

TEST_P(Golden, Optimizers) {
  SafetensorsFile file = golden("optimizers.safetensors");
  for (const char* name : {"AdamW", "Adam"}) {
    for (const char* implementation : {"fused", "foreach", "for-loop"}) {
      std::vector<Parameter> model = parameters(file, "initial.");
      Optimizer optimizer(model,
                          {.name = name, .lr = 0.02, .implementation = implementation, .param_groups = {}});
      std::string run = titan::str(name == std::string("Adam") ? "adam." : "adamw.", implementation, ".");
      for (int step = 1; step <= 5; ++step) {
        optimizer.set_lr_factor(1 - 0.1 * (step - 1));
        for (const auto& parameter : model)
          set_grad(parameter, read(file, titan::str("grad", step, ".", parameter.name)));
        optimizer.step();
        for (const auto& parameter : model) {
          std::string key = titan::str(run, "step", step, ".", parameter.name);
          expect_close(parameter.data.local, read(file, key), tolerance(), key);
        }
      }
      for (const auto& [parameter, state] : optimizer.state()) {
        expect_close(state.at("exp_avg").local, read(file, run + "exp_avg." + parameter), tolerance(),
                     run + parameter);
        expect_close(state.at("exp_avg_sq").local, read(file, run + "exp_avg_sq." + parameter), tolerance(),
                     run + parameter);
      }
    }
  }
}

TEST_P(Golden, Clipping) {
  SafetensorsFile file = golden("clipping.safetensors");
  for (const std::string limit : {"above.", "below."}) {
    std::vector<Parameter> model = parameters(file, "grad.");
    for (const auto& parameter : model) set_grad(parameter, parameter.data.local.detach().clone());
    GradNorm norm = clip_grad_norm(model, read(file, limit + "max_norm").item<double>());
    EXPECT_NEAR(norm.norm / read(file, limit + "norm").item<double>(), 1, tolerance()) << limit;
    for (const auto& parameter : model) {
      expect_close(parameter.data.local.grad(), read(file, limit + parameter.name), tolerance(),
                   limit + parameter.name);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Precisions, Golden,
                         ::testing::Values(Precision{"f32.", 2e-6}, Precision{"f64.", 1e-14}),
                         [](const auto& info) { return info.param.prefix.substr(0, 3); });

TEST(GoldenSchedules, FactorsAreTorchTitans) {
  auto schedules = nlohmann::json::parse(read_file(TITAN_SOURCE_DIR "/tests/data/golden/lr_schedules.json"));
  ASSERT_FALSE(schedules.empty());
  for (const auto& entry : schedules) {
    LrSchedulerSettings settings{.warmup_steps = entry.at("warmup_steps"),
                                 .total_steps = {},
                                 .decay_ratio = {},
                                 .decay_type = entry.at("decay_type"),
                                 .min_lr_factor = entry.at("min_lr_factor")};
    if (!entry.at("decay_ratio").is_null()) settings.decay_ratio = entry.at("decay_ratio").get<double>();
    LrSchedule schedule(settings, entry.at("steps"));
    int64_t step = 0;
    for (double factor : entry.at("factors"))
      EXPECT_NEAR(schedule.factor(step++), factor, 1e-14) << entry.dump();
  }
}

}  // namespace
}  // namespace titan::optim
