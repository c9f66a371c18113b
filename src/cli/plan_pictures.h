#pragma once

// Pictures of a planned step over time.

#include <string>

#include "job/job_plan.h"

namespace titan::cli {

/// A trace in Chrome's format, for https://ui.perfetto.dev: each simulated rank is a process, each of its streams a thread; counters show its memory
/// by category. The plan has spans.
std::string timeline_json(const train::JobPlan& plan);

/// An image: each simulated rank's streams, and the memory of the one that takes most. The plan has spans.
std::string step_svg(const train::JobPlan& plan, const std::string& title);

}  // namespace titan::cli
