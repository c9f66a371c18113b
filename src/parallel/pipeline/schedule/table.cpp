// Simulated schedules as text.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string_view>

#include "titan/parallel/pipeline_timeline.h"

namespace titan::pipeline {

namespace {

using Kind = Action::Kind;

constexpr int kMostSlots = 400;
constexpr int kMark = 5;  // slots between two times of the head line
constexpr std::string_view kPlain = "\033[0m";

// Black on blue, green, cyan and yellow.
std::string_view colour_of(Kind kind) {
  switch (kind) {
    case Kind::Forward:
      return "\033[30;44m";
    case Kind::Backward:
      return "\033[30;42m";
    case Kind::BackwardInput:
      return "\033[30;46m";
    default:
      return "\033[30;43m";
  }
}

struct Cell {
  const Action* action = nullptr;  ///< none: the rank waits
  bool first = false;
};

/// The timeline cut into slots of equal time.
class Slots {
 public:
  explicit Slots(const Simulation& simulation) : slot_(slot_time(simulation)) {
    count_ = slot_ > 0 ? static_cast<int>(std::ceil(simulation.makespan / slot_ - 1e-9)) : 0;
    for (const auto& timeline : simulation.timeline) {
      rows_.emplace_back(count_);
      for (const Interval& interval : timeline) place(interval);
    }
  }

  double slot() const { return slot_; }
  int count() const { return count_; }
  const std::vector<std::vector<Cell>>& rows() const { return rows_; }

 private:
  static double slot_time(const Simulation& simulation) {
    double shortest = std::numeric_limits<double>::infinity();
    for (const auto& timeline : simulation.timeline)
      for (const Interval& interval : timeline)
        if (interval.end > interval.start) shortest = std::min(shortest, interval.end - interval.start);
    return std::isinf(shortest) ? 0 : std::max(shortest, simulation.makespan / kMostSlots);
  }

  // The small amount: what rounding has left of a sum that would fall on a slot's middle.
  int index(double time) const { return static_cast<int>(std::floor(time / slot_ + 0.5 + 1e-9)); }

  void place(const Interval& interval) {
    const int begin = index(interval.start), end = std::min(index(interval.end), count_);
    for (int i = begin; i < end; ++i) rows_.back()[i] = {&interval.action, i == begin};
  }

  double slot_ = 0;
  int count_ = 0;
  std::vector<std::vector<Cell>> rows_;
};

size_t label_width(const Simulation& simulation) {
  size_t width = 1;
  for (const auto& timeline : simulation.timeline)
    for (const Interval& interval : timeline) width = std::max(width, to_string(interval.action).size());
  return width;
}

std::string padded(std::string text, size_t width, char with = ' ') {
  text.resize(std::max(width, text.size()), with);
  return text;
}

std::string time_text(double time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", time);
  return text;
}

std::string cell_text(const Cell& cell, size_t width, bool colours) {
  if (!cell.action) return padded(".", width) + " ";
  // Without a gap inside an action, with one behind its label.
  const std::string text = cell.first ? padded(to_string(*cell.action), width) : std::string(width, '-');
  if (!colours) return text + " ";
  return std::string(colour_of(cell.action->kind)) + text + std::string(kPlain) + " ";
}

std::string without_trailing_spaces(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

// Lines begin with a marked slot, if there is room for one.
int slots_per_line(int room, int width) {
  const int fit = std::max(1, room / width);
  return fit < kMark ? fit : fit - fit % kMark;
}

}  // namespace

std::string to_table(const Simulation& simulation, const TableStyle& style) {
  const Slots slots(simulation);
  const size_t width = label_width(simulation);
  const std::string last_head = "rank " + std::to_string(simulation.timeline.size() - 1);
  const size_t head = std::max(last_head.size(), std::string_view("time").size()) + 2;
  const int per_block = slots_per_line(style.width - static_cast<int>(head), static_cast<int>(width) + 1);
  std::string text;
  for (int begin = 0; begin < slots.count(); begin += per_block) {
    const int end = std::min(begin + per_block, slots.count());
    std::string times = padded("time", head);
    // Every fifth.
    for (int i = begin; i < end; i += kMark)
      times = padded(padded(times, head + (i - begin) * (width + 1)) + time_text(i * slots.slot()) + " ",
                     head + (std::min(i + kMark, end) - begin) * (width + 1));
    text += (begin == 0 ? "" : "\n") + without_trailing_spaces(times);
    for (size_t rank = 0; rank < slots.rows().size(); ++rank) {
      std::string line = padded("rank " + std::to_string(rank), head);
      for (int i = begin; i < end; ++i) line += cell_text(slots.rows()[rank][i], width, style.colours);
      text += without_trailing_spaces(line);
    }
  }
  return text;
}

}  // namespace titan::pipeline
