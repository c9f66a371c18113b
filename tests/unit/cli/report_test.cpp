// Parts of titan report: scales, curves, texts, sections.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cli/report/page.h"
#include "cli/text.h"
#include "unit/cli/logged_run.h"

namespace titan::cli::report {
namespace {

TEST(ReportScale, HasRoundMarksThatCoverTheValues) {
  const Scale scale(0.37, 4.2, false, true);
  EXPECT_EQ(scale.marks(), (std::vector<double>{0, 1, 2, 3, 4, 5}));
  EXPECT_DOUBLE_EQ(scale.place(0), 0);
  EXPECT_DOUBLE_EQ(scale.place(5), 1);
}

TEST(ReportScale, KeepsItsEndsWithoutWidening) {
  const Scale scale(1, 97, false, false);
  EXPECT_DOUBLE_EQ(scale.place(1), 0);
  EXPECT_DOUBLE_EQ(scale.place(97), 1);
  EXPECT_EQ(scale.marks(), (std::vector<double>{20, 40, 60, 80}));
}

TEST(ReportScale, HandlesDecadesAndSingleValues) {
  const Scale decades(0.02, 300, true, true);
  EXPECT_EQ(decades.marks().size(), 6u);
  EXPECT_DOUBLE_EQ(decades.place(0.01), 0);
  EXPECT_NEAR(decades.place(1), 0.4, 1e-12);
  for (double value : {0.0, 5.0, -3.0}) {
    const double place = Scale(value, value, false, true).place(value);
    EXPECT_GT(place, 0);
    EXPECT_LT(place, 1);
  }
}

// With a learning rate of 0, losses differ only by the order of a sum. No marks fit between such values.
TEST(ReportScale, TreatsRoundingDifferencesAsOneValue) {
  for (const bool log : {false, true})
    for (const double value : {2.5, -2.5, 1e-300, 3e8}) {
      double high = value;
      for (int ulps = 0; ulps < 4; ++ulps) {
        high = std::nextafter(high, 1e300);
        const Scale scale(value, high, log, true);
        EXPECT_LE(scale.marks().size(), 20u);
        EXPECT_GT(scale.place(value), 0);
        EXPECT_LT(scale.place(high), 1);
      }
    }
}

TEST(ReportScale, PrintsShortMarks) {
  EXPECT_EQ(mark_text(0.25, 0.05), "0.25");
  EXPECT_EQ(mark_text(3, 1), "3");
  EXPECT_EQ(mark_text(2'500'000, 500'000), "2.5M");
  EXPECT_EQ(mark_text(20'000, 10'000), "20k");
  EXPECT_EQ(mark_text(0, 10'000), "0");
  EXPECT_EQ(mark_text(1e-6, 1e-6), "1e-06");
}

TEST(ReportChart, ThinningKeepsPeaksAndOrder) {
  Curve curve;
  for (int i = 0; i < 10'000; ++i) curve.emplace_back(i, i == 7777 ? 100.0 : i == 3333 ? -100.0 : 1.0);
  const Curve thin = thinned(curve, 100);
  EXPECT_LE(thin.size(), 100u);
  EXPECT_TRUE(std::is_sorted(thin.begin(), thin.end()));
  EXPECT_EQ(std::count(thin.begin(), thin.end(), std::pair(7777.0, 100.0)), 1);
  EXPECT_EQ(std::count(thin.begin(), thin.end(), std::pair(3333.0, -100.0)), 1);
  EXPECT_EQ(thinned(curve, 20'000), curve);
}

TEST(ReportChart, DrawsAPeakAtTheTop) {
  const std::string html = to_html(Chart{.title = "a < b", .series = {{"x", {{1, 0}, {2, 10}, {3, 0}}}}});
  EXPECT_NE(html.find("d=\"M58.0 216.0L298.0 10.0L538.0 216.0\""), std::string::npos) << html;
  EXPECT_NE(html.find("a &lt; b"), std::string::npos);
  EXPECT_EQ(to_html(Chart{.title = "none", .series = {{"x", {}}}}), "");
}

TEST(ReportText, FormatsNumbersAndDurations) {
  EXPECT_EQ(short_number(1234567), "1,234,567");
  EXPECT_EQ(short_number(-1000), "-1,000");
  EXPECT_EQ(short_number(2.718281828), "2.7183");
  EXPECT_EQ(short_number(11821.4), "11,821");
  EXPECT_EQ(duration(0.0012), "1.2 ms");
  EXPECT_EQ(duration(0.045), "45 ms");
  EXPECT_EQ(duration(12.34), "12.3 s");
  EXPECT_EQ(duration(245), "4 min 5 s");
  EXPECT_EQ(duration(12000), "3 h 20 min");
  EXPECT_EQ(duration(200000), "2 d 7 h");
}

PageInput page_input(const LoggedRun& run) {
  PageInput input;
  input.run = read_history(run.folder);
  input.now_us = input.run.processes.empty() ? 0 : input.run.processes.back().last_us();
  return input;
}

// A save after the last step, and the unfinished step of a killed process, do not count.
TEST(ReportTime, PartsAddUpToTheSteps) {
  const LoggedRun run("time_split");
  run.log(0, "20260101-000000-000000", 1,
          {"step 1 step_start", "step 1 fwd_bwd_end 600", "step 1 step_end 1000", "step 1 teardown_start",
           "step 1 checkpoint_save_end 5000", "step 1 teardown_end 5000"});
  const std::string html = time_section(page_input(run));
  EXPECT_NE(html.find("<td>forward and backward</td><td class=\"n\">600 ms</td><td class=\"n\">10.0 %</td>"),
            std::string::npos)
      << html;
  EXPECT_NE(html.find("<td>rest of the steps</td><td class=\"n\">400 ms</td>"), std::string::npos) << html;
  EXPECT_EQ(html.find("<td>saving</td>"), std::string::npos) << html;
}

RunPlan plan_of_two_gib() {
  return {.device = "GPU",
          .world_size = 8,
          .step_s = 0.5,
          .tps = 1000,
          .mfu = 40,
          .reserved_gib = 2,
          .allocated_gib = 1,
          .compute_s = 0.3,
          .optimizer_s = 0.05,
          .exposed_communication_s = 0.1,
          .host_s = 0.05,
          .lasting = {.parameters = 0.1, .gradients = 0.1, .optimizer = 0.2},
          .rest = {{"activations", 0.5}, {"gathered", 0.1}}};
}

std::string row(const char* what, const char* planned, const char* measured, const char* difference) {
  return str("<td>", what, "</td><td class=\"n\">", planned, "</td><td class=\"n\">", measured,
             "</td><td class=\"n\">", difference, "</td>");
}

TEST(ReportPlan, ShowsWhatWasPlannedBesideWhatWasMeasured) {
  const LoggedRun run("planned");
  std::ofstream file(run.folder / "metrics.jsonl");
  for (const int step : {1, 2, 3})
    file << "{\"step\": " << step << ", \"step_s\": " << (step == 1 ? 9 : 0.625)
         << ", \"tps\": 800, \"mfu\": 32, \"memory_gib\": " << (step == 2 ? 2.5 : 2)
         << ", \"allocated_gib\": 1}\n";
  file.close();
  PageInput input = page_input(run);
  EXPECT_EQ(plan_section(input), "") << "without a plan";
  input.plan = plan_of_two_gib();
  input.plan->notes = {"validation isn't planned"};
  const std::string html = plan_section(input);
  EXPECT_NE(html.find("Note: validation isn"), std::string::npos) << html;
  const std::string rows[] = {row("step, ms", "500", "625", "+25.0 %"),
                              row("tokens/s per device", "1,000", "800", "-20.0 %"),
                              row("MFU, %", "40.00", "32.00", "-20.0 %"),
                              row("peak of memory from the device, GiB", "2.00", "2.50", "+25.0 %"),
                              row("peak of memory in tensors, GiB", "1.00", "1.00", "+0.0 %"),
                              row("compute, ms", "300", "not measured", "")};
  for (const std::string& wanted : rows)
    EXPECT_NE(html.find(wanted), std::string::npos) << wanted << "\n" << html;
}

TEST(ReportPlan, ShowsMemoryByCategory) {
  const LoggedRun run("planned_memory");
  std::ofstream(run.folder / "metrics.jsonl")
      << "{\"step\": 1, \"memory_gib\": 2, \"allocated_gib\": 1.25}\n";
  PageInput input = page_input(run);
  input.plan = plan_of_two_gib();
  EXPECT_NE(plan_section(input).find(row("of it, parameters, GiB", "0.10", "not measured", "")),
            std::string::npos);
  input.lasting = LastingMemory{.parameters = 0.1, .gradients = 0.15, .optimizer = 0.2};
  const std::string html = plan_section(input);
  const std::string rows[] = {
      row("of it, parameters, GiB", "0.10", "0.10", "+0.0 %"),
      row("of it, gradients, GiB", "0.10", "0.15", "+50.0 %"),
      row("of it, optimizer, GiB", "0.20", "0.20", "+0.0 %"),
      row("of it, activations and all else that a step takes, GiB", "0.60", "0.80", "+33.3 %"),
      row("of that, activations, GiB", "0.50", "not measured", ""),
      row("of that, gathered, GiB", "0.10", "not measured", "")};
  for (const std::string& wanted : rows)
    EXPECT_NE(html.find(wanted), std::string::npos) << wanted << "\n" << html;
}

TEST(ReportPlan, TakesPartsOfTheStepFromTheRooflineReport) {
  const LoggedRun run("planned_parts");
  EXPECT_FALSE(measured_parts(run.folder));
  std::ofstream(run.folder / "roofline.json")
      << R"({"step": 4, "step_s": 1, "idle_s": 0.1, "operations": [{"kind": "products", "seconds": 0.55},
{"kind": "optimizer", "seconds": 0.1}], "collectives": [{"exposed_s": 0.15}, {"exposed_s": 0.05}]})";
  PageInput input = page_input(run);
  input.plan = plan_of_two_gib();
  input.parts = measured_parts(run.folder);
  ASSERT_TRUE(input.parts);
  const std::string html = plan_section(input);
  const std::string rows[] = {row("compute, ms", "300", "600", "+100.0 %"),
                              row("optimizer, ms", "50", "100", "+100.0 %"),
                              row("exposed communication, ms", "100", "200", "+100.0 %"),
                              row("device waits for the host, ms", "50", "100", "+100.0 %"),
                              row("peak of memory in tensors, GiB", "1.00", "not measured", "")};
  for (const std::string& wanted : rows)
    EXPECT_NE(html.find(wanted), std::string::npos) << wanted << "\n" << html;
  EXPECT_NE(html.find("step 4"), std::string::npos);
  input.plan->bubble_s = 0.1;
  EXPECT_NE(plan_section(input).find(row("exposed communication and bubble, ms", "200", "200", "+0.0 %")),
            std::string::npos);
}

TEST(ReportPlan, SaysThatAFileIsSomethingElse) {
  const LoggedRun run("no_plan");
  PageInput input = page_input(run);
  add_plan(input);
  EXPECT_EQ(plan_section(input), "") << "there is no file";
  std::ofstream(run.folder / kPlanFile)
      << "{\"device\": \"GPU\", \"memory\": {\"by_role\": [{\"rank\": 0}]}, \"time_by_role\": [{}]}";
  std::ofstream(run.folder / "roofline.json") << "[]";
  add_plan(input);
  EXPECT_FALSE(input.plan);
  EXPECT_THAT(plan_section(input), ::testing::AllOf(::testing::HasSubstr("plan.json can't be shown: "),
                                                    ::testing::HasSubstr("world"),
                                                    ::testing::HasSubstr("An earlier version of LibTitan")));
  EXPECT_FALSE(measured_parts(run.folder));
}

TEST(ReportValidation, ShowsEachRowsOwnNumbers) {
  const LoggedRun run("validations");
  std::ofstream(run.folder / "validation.jsonl")
      << "{\"step\": 1, \"loss\": null, \"tps\": 11}\n{\"step\": 2, \"loss\": 2.5, \"tps\": 22}\n";
  const std::string html = validation_section(page_input(run));
  EXPECT_NE(html.find("<td class=\"n\">1</td><td class=\"n\">not finite</td><td class=\"n\">11</td>"),
            std::string::npos)
      << html;
  EXPECT_NE(html.find("<tr class=\"changed\"><td class=\"n\">2</td><td class=\"n\">2.50000</td>"
                      "<td class=\"n\">22</td>"),
            std::string::npos)
      << html;
}

}  // namespace
}  // namespace titan::cli::report
