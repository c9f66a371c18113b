#pragma once

// Every named schedule at every allowed count, up to a size.

#include <string>
#include <vector>

#include "titan/parallel/pipeline_schedule.h"

namespace titan::testing {

struct PipelineCase {
  std::string name;
  int num_ranks = 1, num_stages = 1, num_micro_batches = 1;

  pipeline::Schedule make() const {
    return pipeline::make_schedule(name, num_ranks, num_stages, num_micro_batches);
  }
  std::string text() const {
    return name + " " + std::to_string(num_ranks) + "x" + std::to_string(num_stages) + "x" +
           std::to_string(num_micro_batches);
  }
};

inline std::vector<PipelineCase> pipeline_cases(int most_ranks = 6, int most_micro_batches = 14) {
  std::vector<PipelineCase> cases;
  for (const pipeline::ScheduleTraits& traits : pipeline::all_schedule_traits())
    for (int ranks = 1; ranks <= most_ranks; ++ranks)
      for (int stages = ranks; stages <= 4 * ranks; stages += ranks)
        for (int micro_batches = 1; micro_batches <= most_micro_batches; ++micro_batches)
          if (!pipeline::counts_problem(traits, ranks, stages, micro_batches))
            cases.push_back({std::string(traits.name), ranks, stages, micro_batches});
  return cases;
}

}  // namespace titan::testing
