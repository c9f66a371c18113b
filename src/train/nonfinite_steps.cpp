#include "titan/train/nonfinite_steps.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "titan/core/log.h"
#include "titan/train/unsound_run.h"

namespace titan::train {

void NonFiniteSteps::add(const std::string& problem) {
  if (!skips()) throw UnsoundRun(problem + ". The optimizer step was not taken.");
  ++total_;
  ++in_a_row_;
  const auto check = [&](int64_t count, int64_t most, const char* key, const char* what) {
    if (count > most)
      throw UnsoundRun(str(problem, ". The optimizer step was not taken, and as it is number ", count, " ",
                           what, ", the run stops: fault_tolerance.", key, " = ", most));
  };
  check(in_a_row_, settings_.max_nonfinite_in_a_row, "max_nonfinite_in_a_row", "in a row");
  check(total_, settings_.max_nonfinite_steps, "max_nonfinite_steps", "of this run");
  log::warning_rank0(str(problem, ". The optimizer step is skipped, the ", in_a_row_, ". in a row, the ",
                         total_, ". of this run"));
}

std::string NonFiniteSteps::state() const {
  return nlohmann::json{{"total", total_}, {"in_a_row", in_a_row_}}.dump();
}

void NonFiniteSteps::load(const std::string& state) {
  const auto tree = nlohmann::json::parse(state);
  total_ = std::max<int64_t>(total_, tree.at("total"));
  in_a_row_ = tree.at("in_a_row");
}

}  // namespace titan::train
