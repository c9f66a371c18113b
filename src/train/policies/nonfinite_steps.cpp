#include "train/policies/nonfinite_steps.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "core/json.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/train/metrics.h"

namespace titan::train {

bool NonFiniteSteps::skip(const std::string& problem, const std::function<std::string()>& explain) {
  if (settings_.on_nonfinite != "skip") return false;
  ++total_;
  ++in_a_row_;
  const auto check = [&](int64_t count, int64_t most, const char* key, const char* what) {
    if (count > most)
      throw UnsoundRun(str(problem, ". The optimizer step was not taken, and as it is number ", count, " ",
                           what, ", the run stops: fault_tolerance.", key, " = ", most, explain()));
  };
  check(in_a_row_, settings_.max_nonfinite_in_a_row, "max_nonfinite_in_a_row", "in a row");
  check(total_, settings_.max_nonfinite_steps, "max_nonfinite_steps", "of this run");
  log::warning_rank0(str(problem, ". The optimizer step is skipped: number ", in_a_row_, " in a row, number ",
                         total_, " of this run"));
  return true;
}

void NonFiniteSteps::judge(Trainer& /*trainer*/, const StepValues& /*values*/) { in_a_row_ = 0; }

std::string NonFiniteSteps::why_not_save() const {
  return in_a_row_ == 0
             ? ""
             : str("it is number ", in_a_row_,
                   " in a row whose numbers aren't finite; the next step whose numbers are is saved");
}

void NonFiniteSteps::add_metrics(StepMetrics& metrics) const {
  if (settings_.on_nonfinite == "skip") metrics.skipped_steps = total_;
}

std::string NonFiniteSteps::state() const {
  return nlohmann::json{{"total", total_}, {"in_a_row", in_a_row_}}.dump();
}

void NonFiniteSteps::load(const std::string& state) {
  const auto tree = parse_json(state);
  const auto total = json_count(tree, "total"), in_a_row = json_count(tree, "in_a_row");
  TITAN_CHECK(total && in_a_row,
              "the counts 'total' and 'in_a_row' of steps that weren't finite are missing");
  total_ = std::max(total_, *total);
  in_a_row_ = *in_a_row;
}

}  // namespace titan::train
