// Section "Plan" of the page: what titan plan predicted for rank 0, beside what the run measured.

#include <algorithm>
#include <cmath>
#include <optional>

#include <nlohmann/json.hpp>

#include "cli/report/page.h"
#include "cli/text.h"
#include "core/file.h"

namespace titan::cli::report {

namespace {

using nlohmann::json;

// The parts of the measured step, which together are the whole step, as the plan's are.
StepParts parts_of(const json& roofline) {
  StepParts parts{.step = roofline.at("step"), .host_s = roofline.at("idle_s")};
  for (const json& row : roofline.at("operations"))
    if (row.at("kind") == "optimizer") parts.optimizer_s += row.at("seconds").get<double>();
  for (const json& row : roofline.at("collectives")) parts.waits_s += row.at("exposed_s").get<double>();
  const double others = parts.host_s + parts.optimizer_s + parts.waits_s;
  parts.compute_s = std::max(0.0, roofline.at("step_s").get<double>() - others);
  return parts;
}

std::optional<double> largest_of(const Curve& curve) {
  if (curve.empty()) return std::nullopt;
  return std::ranges::max(curve, {}, [](const auto& point) { return point.second; }).second;
}

std::string two_decimals(double value) { return number("%.2f", value); }
std::string whole(double value) { return short_number(std::round(value)); }

/// Rows of a figure: planned, measured, difference.
class Comparison {
 public:
  using Format = std::string (*)(double);
  void add(const std::string& what, Format format, double planned, const std::optional<double>& measured) {
    table_.rows.push_back(
        {what, format(planned), measured ? format(*measured) : "not measured",
         measured && planned > 0 ? number("%+.1f %%", 100 * (*measured / planned - 1)) : ""});
  }
  std::string html() const { return to_html(table_); }

 private:
  HtmlTable table_{.heads = {"", "planned", "measured", "difference"}, .numbers = {false, true, true, true}};
};

}  // namespace

void add_plan(PageInput& input) try {
  const std::filesystem::path file = input.run.folder / kPlanFile;
  std::error_code unreadable;  // read_file says why
  if (std::filesystem::exists(file, unreadable) || unreadable) input.plan = read_plan(read_file(file));
} catch (const Error& error) {
  input.no_plan = error.what();
}

std::optional<StepParts> measured_parts(const std::filesystem::path& run) try {
  return parts_of(json::parse(read_file(run / "roofline.json")));
} catch (const Error&) {
  return std::nullopt;
} catch (const json::exception&) {
  return std::nullopt;
}

std::string plan_section(const PageInput& input) {
  if (!input.plan && input.no_plan.empty()) return "";
  if (!input.plan)
    return paragraph(
        str(kPlanFile, " can't be shown: ", input.no_plan,
            ". An earlier version of LibTitan may have written it; the run's next start plans anew."));
  const RunPlan& plan = *input.plan;
  const MetricRows& steps = input.run.steps;
  const auto measured_ms = [&](double StepParts::*part) {
    return input.parts && plan.has_parts_of_rank_0 ? std::optional(1e3 * (*input.parts).*part) : std::nullopt;
  };
  Comparison table;
  const auto step_s = median_after_first(steps.curve("step_s"));
  table.add("step, ms", short_number, 1e3 * plan.step_s,
            step_s ? std::optional(1e3 * *step_s) : std::nullopt);
  table.add("tokens/s per device", whole, plan.tps, median_after_first(steps.curve("tps")));
  table.add("MFU, %", two_decimals, plan.mfu, median_after_first(steps.curve("mfu")));
  // On a CPU the logged memory is the process's, which a plan knows nothing of.
  const auto allocated = largest_of(steps.curve("allocated_gib"));
  table.add("peak of memory from the device, GiB", two_decimals, plan.reserved_gib,
            allocated ? largest_of(steps.curve("memory_gib")) : std::nullopt);
  table.add("peak of memory in tensors, GiB", two_decimals, plan.allocated_gib, allocated);
  const auto add_lasting = [&](const std::string& what, double LastingMemory::*part) {
    table.add(str("of it, ", what, ", GiB"), two_decimals, plan.lasting.*part,
              input.lasting ? std::optional((*input.lasting).*part) : std::nullopt);
  };
  add_lasting("parameters", &LastingMemory::parameters);
  add_lasting("gradients", &LastingMemory::gradients);
  add_lasting("optimizer", &LastingMemory::optimizer);
  table.add("of it, activations and all else that a step takes, GiB", two_decimals,
            plan.allocated_gib - plan.lasting.sum(),
            input.lasting && allocated ? std::optional(*allocated - input.lasting->sum()) : std::nullopt);
  for (const auto& [category, gib] : plan.rest)
    table.add(str("of that, ", category, ", GiB"), two_decimals, gib, std::nullopt);
  table.add("compute, ms", short_number, 1e3 * plan.compute_s, measured_ms(&StepParts::compute_s));
  table.add("optimizer, ms", short_number, 1e3 * plan.optimizer_s, measured_ms(&StepParts::optimizer_s));
  table.add(plan.bubble_s > 0 ? "exposed communication and bubble, ms" : "exposed communication, ms",
            short_number, 1e3 * (plan.exposed_communication_s + plan.bubble_s),
            measured_ms(&StepParts::waits_s));
  table.add("device waits for the host, ms", short_number, 1e3 * plan.host_s,
            measured_ms(&StepParts::host_s));
  const std::string parts =
      input.parts ? str(" Parts of the step are those of step ", input.parts->step, " in roofline.json.")
                  : std::string(" Parts of the step are measured with metrics.report_roofline.");
  std::string notes;
  for (const std::string& note : plan.notes) notes += str(" Note: ", note, ".");
  return paragraph(
             str("Planned for ", plan.world_size, " x ", plan.device,
                 ", measured on rank 0: medians of the logged steps after the first, and peaks of memory.",
                 parts, notes)) +
         table.html();
}

}  // namespace titan::cli::report
