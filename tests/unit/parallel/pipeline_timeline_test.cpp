#include "titan/parallel/pipeline_timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>

#include "titan/parallel/pipeline_csv.h"
#include "titan/parallel/pipeline_generators.h"

namespace titan::pipeline {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

int count(const std::string& text, const std::string& part) {
  int number = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++number;
  return number;
}

Simulation one_f_one_b() { return simulate(make_schedule("1F1B", 2, 2, 2)); }

TEST(PipelineTimeline, ATableByHand) {
  EXPECT_EQ(to_table(one_f_one_b()),
            "time    0                   5\n"
            "rank 0  0F0 0F1 .   .   0B0 --- .   0B1 ---\n"
            "rank 1  .   1F0 1B0 --- 1F1 1B1 --- .   .\n");
}

TEST(PipelineTimeline, LongTablesGoOnBelow) {
  EXPECT_EQ(to_table(one_f_one_b(), {.width = 30}),
            "time    0\n"
            "rank 0  0F0 0F1 .   .   0B0\n"
            "rank 1  .   1F0 1B0 --- 1F1\n"
            "\n"
            "time    5\n"
            "rank 0  --- .   0B1 ---\n"
            "rank 1  1B1 --- .   .\n");
}

TEST(PipelineTimeline, ColoursOnlyWhereAsked) {
  EXPECT_THAT(to_table(one_f_one_b()), Not(HasSubstr("\033")));
  EXPECT_EQ(count(to_table(one_f_one_b(), {.colours = true}), "\033[0m"), 4 + 8);
}

TEST(PipelineTimeline, UnevenCosts) {
  const Simulation simulation =
      simulate(make_schedule("GPipe", 1, 1, 1), {.forward = {0.5}, .input = {1}, .weight = {0}});
  EXPECT_EQ(to_table(simulation), "time    0\nrank 0  0F0 0B0 ---\n");
  const Simulation extreme = simulate(make_schedule("GPipe", 1, 1, 1), {.forward = {1e-6}, .input = {1e6}});
  EXPECT_LT(to_table(extreme, {.width = 1 << 20}).size(), 5000u);
  const Simulation nothing =
      simulate(make_schedule("GPipe", 1, 1, 1), {.forward = {0}, .input = {0}, .weight = {0}});
  EXPECT_EQ(to_table(nothing), "");
}

TEST(PipelineTimeline, DrawingsHaveABoxForEveryAction) {
  const Schedule schedule = make_schedule("ZBVZeroBubble", 4, 8, 8);
  const std::string svg = to_svg(schedule, simulate(schedule), "A <title> & more");
  EXPECT_EQ(count(svg, "<g><title>"), 3 * 8 * 8);
  EXPECT_EQ(count(svg, "</g>"), 3 * 8 * 8);
  EXPECT_THAT(svg, HasSubstr("A &lt;title&gt; &amp; more"));
  for (const char* part :
       {"rank 0", "rank 3", "F forward", "I input gradients", "W weight gradients", "<title>7I7 "})
    EXPECT_THAT(svg, HasSubstr(part));
  EXPECT_THAT(svg, Not(HasSubstr("B backward")));
  EXPECT_THAT(svg, Not(HasSubstr("href")));
  EXPECT_TRUE(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
}

// Nothing overlaps on a rank, and all lies within the picture.
TEST(PipelineTimeline, BoxesStandSideBySide) {
  const Schedule schedule = make_schedule("DualPipeV", 2, 4, 6);
  const std::string svg =
      to_svg(schedule, simulate(schedule, {.forward = {1, 2, 1, 3}, .communication = 0.3}), "t");
  const double width = std::stod(svg.substr(svg.find(" width=\"") + 8));
  const std::regex box("</title><rect x=\"([0-9.]+)\" y=\"([0-9.]+)\" width=\"([0-9.]+)\"");
  std::map<std::string, double> ends;
  int boxes = 0;
  for (std::sregex_iterator at(svg.begin(), svg.end(), box), end; at != end; ++at, ++boxes) {
    const double x = std::stod((*at)[1]);
    EXPECT_GE(x, ends[(*at)[2]] - 0.02);
    ends[(*at)[2]] = x + std::stod((*at)[3]);
    EXPECT_LE(ends[(*at)[2]], width);
  }
  EXPECT_EQ(ends.size(), 2u);
  EXPECT_GE(boxes, 2 * 4 * 6);
}

TEST(PipelineTimeline, DrawingsOfNothing) {
  const Schedule schedule = make_schedule("GPipe", 1, 1, 1);
  const std::string svg =
      to_svg(schedule, simulate(schedule, {.forward = {0}, .input = {0}, .weight = {0}}), "t");
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf")));
}

}  // namespace
}  // namespace titan::pipeline
