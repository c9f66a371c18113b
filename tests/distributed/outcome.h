#pragma once

// The results of a step, on one rank or spread over ranks, and their comparison.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "distributed/llama_case.h"
#include "titan/optim/clip.h"

namespace titan::testing {

inline constexpr uint64_t kSeed = 3;

struct Precision {
  const char* name;
  at::ScalarType dtype;    // dtype of the weights
  at::ScalarType compute;  // dtype of the products
};
inline constexpr Precision kFloat64{"float64", at::kDouble, at::kDouble};
inline constexpr Precision kFloat32{"float32", at::kFloat, at::kFloat};
inline constexpr Precision kBfloat16{"bfloat16", at::kFloat, at::kBFloat16};

// The results of one forward and backward.
struct Outcome {
  double loss = 0;
  double norm = 0;
  std::map<std::string, at::Tensor> gradients;  // whole
};

inline FsdpOptions fsdp_options(const Precision& precision) {
  return {.mesh = {}, .param_dtype = precision.compute, .reduce_dtype = precision.dtype};
}

inline Outcome outcome_of(train::TrainableModel& model, double loss) {
  const auto list = parameters(model.root());
  Outcome outcome{loss, optim::clip_grad_norm(list, 1e30).norm, {}};
  for (const Parameter& parameter : list)
    outcome.gradients[parameter.name] = full_gradient(parameter).clone();
  return outcome;
}

inline Outcome run_on_one_rank(const LlamaCase& llama, const Batch& batch, const Precision& precision) {
  auto model = build_llama(llama, precision.dtype);
  fully_shard(model->root(), fsdp_options(precision));
  materialize(model->root(), kSeed);
  return outcome_of(*model, forward_backward(*model, batch, 0, 1, 1));
}

// A test's largest deviations, for the log.
struct Worst {
  size_t layouts = 0;
  double loss = 0;
  double norm = 0;
  double gradient = 0;
  std::string parameter;

  void print(const char* test, const std::string& model, const Precision& precision) const {
    if (world().rank() != 0) return;
    std::printf(
        "{\"%s\": \"%s\", \"precision\": \"%s\", \"ranks\": %d, \"layouts\": %zu, \"loss\": %.3g, "
        "\"norm\": %.3g, \"gradient\": %.3g, \"parameter\": \"%s\"}\n",
        test, model.c_str(), precision.name, world().size(), layouts, loss, norm, gradient,
        parameter.c_str());
  }
};

// Compares only the gradients in `got`, because a pipeline rank has only those of its stages.
inline void expect_close(const Outcome& got, const Outcome& expected, double tolerance,
                         const std::string& what, Worst& worst) {
  EXPECT_NEAR(got.loss, expected.loss, tolerance * std::max(1.0, std::abs(expected.loss))) << what;
  EXPECT_NEAR(got.norm, expected.norm, tolerance * expected.norm) << what;
  ++worst.layouts;
  worst.loss = std::max(worst.loss, std::abs(got.loss - expected.loss));
  worst.norm =
      std::max(worst.norm, std::abs(got.norm - expected.norm) / (expected.norm == 0 ? 1 : expected.norm));
  for (const auto& [name, gradient] : got.gradients) {
    const double error = relative_error(gradient, expected.gradients.at(name));
    EXPECT_LE(error, tolerance) << what << " " << name;
    if (error <= worst.gradient) continue;
    worst.gradient = error;
    worst.parameter = name;
  }
}

inline void expect_equal(const Outcome& got, const Outcome& expected, double tolerance,
                         const std::string& what, Worst& worst) {
  ASSERT_EQ(got.gradients.size(), expected.gradients.size()) << what;
  expect_close(got, expected, tolerance, what, worst);
}

// Selects variants that have a new pair of settings.
class PairwiseCover {
 public:
  bool add(const std::vector<int>& settings) {
    bool is_new = false;
    for (size_t a = 0; a < settings.size(); ++a)
      for (size_t b = a + 1; b < settings.size(); ++b)
        is_new = met_.insert({a, b, settings[a], settings[b]}).second || is_new;
    return is_new;
  }

 private:
  std::set<std::tuple<size_t, size_t, int, int>> met_;
};

}  // namespace titan::testing
