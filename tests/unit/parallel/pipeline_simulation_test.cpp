#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <regex>

#include "titan/core/error.h"
#include "titan/parallel/pipeline_schedule.h"
#include "unit/parallel/pipeline_cases.h"

namespace titan::pipeline {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using titan::testing::pipeline_cases;
using Kind = Action::Kind;

constexpr double kRounding = 1e-12;

int most(const Simulation& simulation, int RankFigures::*figure) {
  int value = 0;
  for (const RankFigures& rank : simulation.ranks) value = std::max(value, rank.*figure);
  return value;
}

Costs random_costs(std::mt19937& random, int num_stages) {
  std::uniform_real_distribution<double> cost(0.1, 2);
  Costs costs{.communication = cost(random), .loss = cost(random)};
  for (auto* list : {&costs.forward, &costs.input, &costs.weight}) {
    list->clear();
    for (int stage = 0; stage < num_stages; ++stage) list->push_back(cost(random));
  }
  return costs;
}

// (p-1) / (m+p-1) for any cost of F and B (Huang et al. 2019, section 2; Narayanan et al. 2021, section 2.2).
TEST(PipelineSimulation, BubbleOfGPipeAnd1F1B) {
  for (const char* name : {"GPipe", "1F1B"})
    for (int p = 1; p <= 8; ++p)
      for (int m : {p, 2 * p, 3 * p + 1})
        for (const Costs& costs : {Costs{}, Costs{.forward = {0.7}, .input = {1.9}, .weight = {0.2}}}) {
          const Simulation simulation = simulate(make_schedule(name, p, p, m), costs);
          EXPECT_NEAR(simulation.bubble_fraction, (p - 1.0) / (m + p - 1), kRounding)
              << name << " " << p << " " << m;
        }
}

// The idle time of 1F1B divided by v (Narayanan et al. 2021, section 2.3): a stage is 1/v of a rank's layers.
TEST(PipelineSimulation, BubbleOfInterleaved1F1BIsDividedByStagesPerRank) {
  for (int p = 1; p <= 6; ++p)
    for (int v : {2, 3, 4})
      for (int m : {p, 2 * p, 4 * p}) {
        const Costs costs{.forward = {1.0 / v}, .input = {1.0 / v}, .weight = {1.0 / v}};
        const Simulation simulation = simulate(make_schedule("Interleaved1F1B", p, p * v, m), costs);
        const double single = simulate(make_schedule("1F1B", p, p, m)).makespan - 3.0 * m;
        EXPECT_NEAR(simulation.makespan - 3.0 * m, single / v, 1e-9) << p << " " << v << " " << m;
      }
}

// With F = I = W no rank waits between its first and its last action. The remaining bubble is because rank r
// starts r later (Qi et al. 2024, section 6). Live activations are at most those of 1F1B: p micro-batches of
// two stages.
TEST(PipelineSimulation, ZbvHasNoBubbleWithinARank) {
  for (int p = 1; p <= 8; ++p)
    for (int m : {2 * p, 2 * p + 1, 4 * p}) {
      const Simulation simulation = simulate(make_schedule("ZBVZeroBubble", p, 2 * p, m));
      for (const RankFigures& rank : simulation.ranks) {
        EXPECT_NEAR(rank.last_end - rank.first_start, rank.busy, kRounding) << p << " " << m;
        EXPECT_LE(rank.peak_live, 2 * p);
      }
      EXPECT_NEAR(simulation.bubble_fraction, (p - 1.0) / (6 * m + p - 1), kRounding) << p << " " << m;
    }
}

// Splitting the backward fills the gap, so ranks are idle for less time (Qi et al. 2024, table 2).
TEST(PipelineSimulation, ZeroBubbleWaitsLessThanInterleaved) {
  for (int p : {2, 4, 8})
    for (int m : {p, 2 * p, 4 * p}) {
      const double split = simulate(make_schedule("InterleavedZeroBubble", p, 2 * p, m)).bubble_fraction;
      const double whole = simulate(make_schedule("Interleaved1F1B", p, 2 * p, m)).bubble_fraction;
      EXPECT_LT(split, 0.75 * whole) << p << " " << m;
    }
}

TEST(PipelineSimulation, LiveActivationsMatchThePapers) {
  for (int p : {1, 2, 4, 5})
    for (int m : {p, 3 * p}) {
      const Simulation gpipe = simulate(make_schedule("GPipe", p, p, m)),
                       one = simulate(make_schedule("1F1B", p, p, m));
      for (int rank = 0; rank < p; ++rank) {
        EXPECT_EQ(gpipe.ranks[rank].peak_live, m);
        EXPECT_EQ(one.ranks[rank].peak_live, p - rank);
      }
      EXPECT_EQ(most(simulate(make_schedule("LoopedBFS", p, 2 * p, m)), &RankFigures::peak_live), 2 * m);
      // Narayanan et al. 2021: p (1 + (p-1)/(pv)) micro-batches of all v stages of a rank.
      EXPECT_EQ(simulate(make_schedule("Interleaved1F1B", p, 2 * p, 3 * p)).ranks[0].peak_live,
                p * 2 + p - 1);
    }
}

TEST(PipelineSimulation, CountsActivationsKeptBySplitBackwards) {
  const Simulation simulation = simulate(parse_schedule_csv("0F0,0F1,0I0,0I1,0F2,0W0,0W1,0I2,0W2", "a.csv"));
  EXPECT_EQ(simulation.ranks[0].peak_live, 3);
  EXPECT_EQ(simulation.ranks[0].peak_before_input, 2);
  EXPECT_EQ(simulation.ranks[0].peak_owed_weight, 2);
  const Simulation whole = simulate(parse_schedule_csv("0F0,0F1,0B0,0B1,0F2,0B2", "a.csv"));
  EXPECT_EQ(whole.ranks[0].peak_live, 2);
  EXPECT_EQ(whole.ranks[0].peak_owed_weight, 0);
}

// The costs are F 2, I 3, W 4, a message 1, the loss 5.
TEST(PipelineSimulation, MatchesTwoRanksByHand) {
  const Costs costs{.forward = {2}, .input = {3}, .weight = {4}, .communication = 1, .loss = 5};
  const Simulation simulation = simulate(parse_schedule_csv("0F0,0B0\n1F0,1I0,1W0", "a.csv"), costs);
  const auto times = [&](int rank, int index) {
    const Interval& interval = simulation.timeline[rank][index];
    return std::pair(interval.start, interval.end);
  };
  EXPECT_EQ(times(0, 0), std::pair(0.0, 2.0));
  EXPECT_EQ(times(1, 0), std::pair(3.0, 10.0));
  EXPECT_EQ(times(1, 1), std::pair(10.0, 13.0));
  EXPECT_EQ(times(1, 2), std::pair(13.0, 17.0));
  EXPECT_EQ(times(0, 1), std::pair(14.0, 21.0));
  EXPECT_EQ(simulation.makespan, 21);
  EXPECT_NEAR(simulation.bubble_fraction, 1 - (9.0 + 14.0) / 42, kRounding);
  EXPECT_THAT(simulation.critical_path,
              ElementsAre(PathEntry{0, 0}, PathEntry{1, 0}, PathEntry{1, 1}, PathEntry{0, 1}));
}

// A message starts when its receive is posted, which is after 0F1 here, not at the end of 1I0.
TEST(PipelineSimulation, LateReceivesCostTime) {
  const std::string rank_1 = "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1";
  const Costs costs{.forward = {10, 1}, .input = {1}, .weight = {1}, .communication = 4};
  const auto time_of = [&](const std::string& rank_0) {
    return simulate(parse_schedule_csv(rank_0 + "\n" + rank_1, "a.csv"), costs).timeline[0][2].start;
  };
  // 1F0 starts at 14 and 1B0 ends at 17, so the message is sent at 17; its receive is posted at 10 or at 20.
  EXPECT_EQ(time_of("0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0RECV_B1,0B0,0B1"), 21);
  EXPECT_EQ(time_of("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1"), 24);
}

/// The start of every action, found by visiting all actions until nothing changes.
std::map<std::pair<int, std::string>, double> relaxed_starts(const Schedule& schedule, const Costs& costs) {
  std::map<std::pair<int, std::string>, double> starts, ends;
  const auto cost = [&](const Action& action) {
    const double i = costs.input[action.stage], w = costs.weight[action.stage];
    if (action.kind == Kind::Backward) return i + w;
    if (action.kind == Kind::BackwardInput) return i;
    if (action.kind == Kind::BackwardWeight) return w;
    return costs.forward[action.stage] + (action.stage + 1 == schedule.num_stages ? costs.loss : 0);
  };
  const auto end_of = [&](Kind kind, int stage, int micro_batch, int rank) {
    if (stage < 0 || stage >= schedule.num_stages) return 0.0;
    const int owner = schedule.rank_of_stage[stage];
    const auto found = ends.find({owner, to_string(Action{kind, stage, micro_batch})});
    return found == ends.end() ? 0.0 : found->second + (owner == rank ? 0 : costs.communication);
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
      double free = 0;
      for (const Action& action : schedule.ranks[rank]) {
        const auto [kind, stage, micro_batch] = action;
        double start = free;
        if (kind == Kind::Forward)
          start = std::max(start, end_of(Kind::Forward, stage - 1, micro_batch, rank));
        if (kind == Kind::Backward || kind == Kind::BackwardInput)
          for (Kind source : {Kind::Backward, Kind::BackwardInput})
            start = std::max(start, end_of(source, stage + 1, micro_batch, rank));
        const std::pair key(rank, to_string(action));
        free = start + cost(action);
        changed |= !ends.count(key) || ends[key] != free;
        starts[key] = start;
        ends[key] = free;
      }
    }
  }
  return starts;
}

TEST(PipelineSimulation, EqualsARelaxationOfAllStarts) {
  std::mt19937 random(3);
  for (const auto& one : pipeline_cases(3, 5)) {
    const Schedule schedule = one.make();
    const Costs costs = random_costs(random, one.num_stages);
    const Simulation simulation = simulate(schedule, costs);
    const auto starts = relaxed_starts(schedule, costs);
    for (int rank = 0; rank < schedule.num_ranks(); ++rank)
      for (const Interval& interval : simulation.timeline[rank])
        EXPECT_NEAR(interval.start, starts.at({rank, to_string(interval.action)}), 1e-9) << one.text();
  }
}

TEST(PipelineSimulation, TheCriticalPathIsTheMakespan) {
  std::mt19937 random(4);
  for (const auto& one : pipeline_cases(4, 8))
    for (const Schedule& schedule : {one.make(), with_communication(one.make())}) {
      const Costs costs = random_costs(random, one.num_stages);
      const Simulation simulation = simulate(schedule, costs);
      double time = 0;
      const PathEntry* previous = nullptr;
      for (const PathEntry& entry : simulation.critical_path) {
        const Interval& interval = simulation.timeline[entry.rank][entry.index];
        // An entry starts when the rank's previous action ends or, one message later, the action that made
        // its input.
        const bool follows = previous && previous->rank == entry.rank && previous->index + 1 == entry.index;
        if (previous && interval.start - time > 1e-9) time += costs.communication;
        EXPECT_NEAR(interval.start, time, 1e-9) << one.text();
        EXPECT_TRUE(!previous || follows || interval.action.kind != Kind::BackwardWeight) << one.text();
        time = interval.end;
        previous = &entry;
      }
      EXPECT_NEAR(time, simulation.makespan, 1e-9) << one.text();
    }
}

// Without latency, receives posted one action ahead never delay an action.
TEST(PipelineSimulation, CommunicationCostsOnlyItsLatency) {
  for (const auto& one : pipeline_cases(4, 8)) {
    const double plain = simulate(one.make()).makespan;
    EXPECT_NEAR(simulate(with_parameter_actions(with_communication(one.make()))).makespan, plain, 1e-9)
        << one.text();
    EXPECT_GE(simulate(with_communication(one.make()), {.communication = 0.5}).makespan, plain - 1e-9)
        << one.text();
  }
}

TEST(PipelineSimulation, SimulatesForwardOnlySchedules) {
  const Simulation simulation = simulate(make_forward_only_schedule(loop_stage_map(4, 8), 8));
  EXPECT_EQ(simulation.makespan, 2 * 8 + 3);  // ranks wait only at the ends
}

TEST(PipelineSimulation, RefusesWrongCosts) {
  const Schedule schedule = make_schedule("1F1B", 2, 2, 2);
  const auto problem = [&](const Costs& costs) -> std::string {
    try {
      simulate(schedule, costs);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no problem";
  };
  EXPECT_THAT(problem({.forward = {1, 2, 3}}),
              HasSubstr("'forward' has 3 values; expected 1, or 1 for each of the 2 stages"));
  EXPECT_THAT(problem({.input = {}}), HasSubstr("'input' has 0 values"));
  EXPECT_THAT(problem({.weight = {-1}}), HasSubstr("'weight' of 0 or more, got -1"));
  EXPECT_THAT(problem({.communication = std::nan("")}), HasSubstr("'communication'"));
  EXPECT_THAT(problem({.loss = std::numeric_limits<double>::infinity()}), HasSubstr("'loss'"));
  EXPECT_EQ(problem({.forward = {0}, .input = {0}, .weight = {0}}), "no problem");
  EXPECT_THROW(simulate(Schedule{}), ConfigError);
}

using ::testing::HasSubstr;
using ::testing::Not;

int count(const std::string& text, const std::string& part) {
  int number = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++number;
  return number;
}

Simulation one_f_one_b() { return simulate(make_schedule("1F1B", 2, 2, 2)); }

TEST(PipelineTimeline, MatchesATableByHand) {
  EXPECT_EQ(to_table(one_f_one_b()),
            "time    0                   5\n"
            "rank 0  0F0 0F1 .   .   0B0 --- .   0B1 ---\n"
            "rank 1  .   1F0 1B0 --- 1F1 1B1 --- .   .\n");
}

TEST(PipelineTimeline, LongTablesContinueBelow) {
  EXPECT_EQ(to_table(one_f_one_b(), {.width = 30}),
            "time    0\n"
            "rank 0  0F0 0F1 .   .   0B0\n"
            "rank 1  .   1F0 1B0 --- 1F1\n"
            "\n"
            "time    5\n"
            "rank 0  --- .   0B1 ---\n"
            "rank 1  1B1 --- .   .\n");
}

TEST(PipelineTimeline, ColorsOnlyOnRequest) {
  EXPECT_THAT(to_table(one_f_one_b()), Not(HasSubstr("\033")));
  EXPECT_EQ(count(to_table(one_f_one_b(), {.colors = true}), "\033[0m"), 4 + 8);
}

TEST(PipelineTimeline, DrawsUnevenCosts) {
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

// Boxes of one rank don't overlap, and all of them are inside the picture.
TEST(PipelineTimeline, BoxesDontOverlap) {
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

TEST(PipelineTimeline, DrawsEmptySchedules) {
  const Schedule schedule = make_schedule("GPipe", 1, 1, 1);
  const std::string svg =
      to_svg(schedule, simulate(schedule, {.forward = {0}, .input = {0}, .weight = {0}}), "t");
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf")));
}

}  // namespace
}  // namespace titan::pipeline
