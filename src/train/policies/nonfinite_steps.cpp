#include "titan/train/nonfinite_steps.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "core/json_tree.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/train/run_end.h"

namespace titan::train {

void NonFiniteSteps::add(const std::string& problem, const std::function<std::string()>& explain) {
  const auto explanation = [&] { return explain ? "\n" + explain() : ""; };
  if (!skips()) throw UnsoundRun(problem + ". The optimizer step was not taken." + explanation());
  ++total_;
  ++in_a_row_;
  const auto check = [&](int64_t count, int64_t most, const char* key, const char* what) {
    if (count > most)
      throw UnsoundRun(str(problem, ". The optimizer step was not taken, and as it is number ", count, " ",
                           what, ", the run stops: fault_tolerance.", key, " = ", most, explanation()));
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
  const auto tree = parse_json(state);
  const auto total = json_count(tree, "total"), in_a_row = json_count(tree, "in_a_row");
  TITAN_CHECK(total && in_a_row, "its steps that weren't finite aren't counted by 'total' and 'in_a_row'");
  total_ = std::max(total_, *total);
  in_a_row_ = *in_a_row;
}

}  // namespace titan::train
