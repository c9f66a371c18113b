// Simulated schedules as tables for the terminal and as SVG drawings.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string_view>

#include "titan/core/error.h"
#include "titan/parallel/pipeline_schedule.h"

namespace titan::pipeline {

namespace {

using Kind = Action::Kind;

constexpr int kMostSlots = 400;
constexpr int kMark = 5;  // slots between two times in the header line
constexpr int kShades = 4;

struct Look {
  Kind kind;
  const char* name;
  const char* color;            // terminal color: black on blue, green, cyan or yellow
  const char* shades[kShades];  // for a rank's first stage, and darker for each further one
};
constexpr Look kLooks[] = {
    {Kind::Forward, "F forward", "\033[30;44m", {"#a0c4ee", "#639fe3", "#267ad9", "#1c589c"}},
    {Kind::Backward, "B backward", "\033[30;42m", {"#afdec3", "#7dca9d", "#4ab577", "#358255"}},
    {Kind::BackwardInput, "I input gradients", "\033[30;46m", {"#abe3e1", "#75d1ce", "#40bfbb", "#2e8a87"}},
    {Kind::BackwardWeight,
     "W weight gradients",
     "\033[30;43m",
     {"#f7d497", "#f1b855", "#ec9c13", "#aa710e"}}};

const Look& look_of(Kind kind) {
  return *std::find_if(std::begin(kLooks), std::end(kLooks),
                       [kind](const Look& look) { return look.kind == kind; });
}

// The shortest nonzero time of an action; 0 if no action takes time.
double shortest_time(const Simulation& simulation) {
  double shortest = 0;
  for (const auto& timeline : simulation.timeline)
    for (const Interval& interval : timeline)
      if (const double time = interval.end - interval.start; time > 0 && (shortest == 0 || time < shortest))
        shortest = time;
  return shortest;
}

std::string printed(const char* format, double value) {
  char text[32];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

struct Cell {
  const Action* action = nullptr;  ///< none: the rank waits
  bool first = false;
};

/// The timeline cut into slots of equal time.
class Slots {
 public:
  explicit Slots(const Simulation& simulation) {
    if (const double shortest = shortest_time(simulation); shortest > 0)
      slot_ = std::max(shortest, simulation.makespan / kMostSlots);
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
  // 1e-9 absorbs the rounding of a sum that falls on the middle of a slot.
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

std::string cell_text(const Cell& cell, size_t width, bool colors) {
  if (!cell.action) return padded(".", width) + " ";
  // An action has no gaps, except after its label.
  const std::string text = cell.first ? padded(to_string(*cell.action), width) : std::string(width, '-');
  if (!colors) return text + " ";
  return look_of(cell.action->kind).color + text + "\033[0m ";
}

std::string without_trailing_spaces(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

// Each line begins with a marked slot, if there is room for one.
int slots_per_line(int room, int width) {
  const int fit = std::max(1, room / width);
  return fit < kMark ? fit : fit - fit % kMark;
}

// ---- drawings

constexpr double kLeft = 64, kRight = 16, kTop = 64, kRow = 30, kGap = 4, kBottom = 32;
constexpr double kLeastWidth = 560, kMostWidth = 6000;
constexpr double kBox = 22;      // width of the shortest action, if it fits
constexpr double kLetter = 6.2;  // width of a letter in a box

std::string number(double value) {
  std::string result = printed("%.2f", value);
  result.erase(result.find_last_not_of('0') + 1);
  if (result.back() == '.') result.pop_back();
  return result == "-0" ? "0" : result;
}

std::string escaped(const std::string& text) {
  std::string result;
  for (char c : text) {
    if (c == '<')
      result += "&lt;";
    else if (c == '>')
      result += "&gt;";
    else if (c == '&')
      result += "&amp;";
    else if (c == '"')
      result += "&quot;";
    else
      result += c;
  }
  return result;
}

std::string text_at(double x, double y, const std::string& text, const char* style = "") {
  return str("<text x=\"", number(x), "\" y=\"", number(y), "\"", style, ">", escaped(text), "</text>\n");
}

std::string rectangle(double x, double y, double width, double height, const std::string& look) {
  return str("<rect x=\"", number(x), "\" y=\"", number(y), "\" width=\"", number(width), "\" height=\"",
             number(height), "\"", look, "/>");
}

std::string fill_of(Kind kind, int local_stage) {
  return str(" fill=\"", look_of(kind).shades[std::min(local_stage, kShades - 1)], "\"");
}

/// 1, 2 or 5 times a power of ten, for about ten marks.
double axis_step(double makespan) {
  const double rough = makespan / 10, power = std::pow(10, std::floor(std::log10(rough)));
  for (double factor : {1.0, 2.0, 5.0})
    if (factor * power >= rough * 0.999) return factor * power;
  return 10 * power;
}

class Drawing {
 public:
  Drawing(const Schedule& schedule, const Simulation& simulation)
      : schedule_(schedule), simulation_(simulation) {
    const double shortest = shortest_time(simulation);
    const double wanted = shortest > 0 ? simulation.makespan / shortest * kBox : 0;
    width_ = std::clamp(wanted, kLeastWidth, kMostWidth);
    scale_ = simulation.makespan > 0 ? width_ / simulation.makespan : 0;
    set_local_stages();
  }

  std::string write(const std::string& title) const {
    const double width = kLeft + width_ + kRight, height = kTop + schedule_.num_ranks() * kRow + kBottom;
    std::string svg = str("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ", number(width), " ",
                          number(height), "\" width=\"", number(width), "\" height=\"", number(height),
                          "\" font-family=\"sans-serif\" font-size=\"12\">\n");
    svg += rectangle(0, 0, width, height, " fill=\"#fff\"") + "\n";
    svg += text_at(kLeft, 20, title, " font-size=\"15\" font-weight=\"bold\"");
    svg += legend();
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) svg += row(rank);
    return svg + axis() + "</svg>\n";
  }

 private:
  void set_local_stages() {
    std::vector<int> owned(schedule_.ranks.size(), 0);
    for (int rank : schedule_.rank_of_stage) {
      local_stage_.push_back(owned[rank]++);
      most_local_ = std::max(most_local_, owned[rank]);
    }
  }

  bool uses(Kind kind) const {
    for (const auto& timeline : simulation_.timeline)
      for (const Interval& interval : timeline)
        if (interval.action.kind == kind) return true;
    return false;
  }

  std::string legend() const {
    std::string svg;
    double x = kLeft;
    for (const Look& look : kLooks) {
      if (!uses(look.kind)) continue;
      const int shades = std::min(most_local_, kShades);
      for (int shade = 0; shade < shades; ++shade)
        svg += rectangle(x + 13 * shade, 32, 12, 12, fill_of(look.kind, shade)) + "\n";
      x += 13 * shades + 5;
      svg += text_at(x, 42, look.name);
      x += 7 * static_cast<double>(std::string_view(look.name).size()) + 12;
    }
    if (most_local_ > 1) svg += text_at(x, 42, "darker: later stages of the rank", " fill=\"#666\"");
    return svg;
  }

  std::string row(int rank) const {
    const double y = kTop + rank * kRow;
    std::string svg = text_at(8, y + kRow / 2 + 2, str("rank ", rank));
    svg += rectangle(kLeft, y, width_, kRow - kGap, " fill=\"#f0f0f0\"") + "\n";
    for (const Interval& interval : simulation_.timeline[rank])
      if (interval.end > interval.start) svg += box(interval, y);
    return svg;
  }

  // A browser shows the title when the pointer is over the box.
  std::string box(const Interval& interval, double y) const {
    const double x = kLeft + interval.start * scale_, width = (interval.end - interval.start) * scale_;
    const int local = local_stage_[interval.action.stage];
    std::string svg = str(
        "<g><title>", interval.action, " ", number(interval.start), " to ", number(interval.end), "</title>",
        rectangle(x, y, width, kRow - kGap, fill_of(interval.action.kind, local) + " stroke=\"#fff\""));
    const std::string label = std::to_string(interval.action.micro_batch);
    if (static_cast<double>(label.size()) * kLetter <= width)
      svg += str("<text x=\"", number(x + width / 2), "\" y=\"", number(y + kRow / 2 + 2),
                 "\" text-anchor=\"middle\" font-size=\"11\"", local >= 2 ? " fill=\"#fff\"" : "", ">", label,
                 "</text>");
    return svg + "</g>\n";
  }

  std::string axis() const {
    const double y = kTop + schedule_.num_ranks() * kRow;
    std::string svg;
    if (simulation_.makespan <= 0) return svg;
    const double step = axis_step(simulation_.makespan);
    for (int i = 0; i * step <= simulation_.makespan * 1.0001; ++i) {
      const double x = kLeft + i * step * scale_;
      svg += rectangle(x, y, 1, 5, " fill=\"#888\"") + "\n";
      svg += text_at(x, y + 18, printed("%.6g", i * step), " text-anchor=\"middle\" fill=\"#666\"");
    }
    return svg;
  }

  const Schedule& schedule_;
  const Simulation& simulation_;
  double width_ = 0;              // width of the timeline
  double scale_ = 0;              // pixels per unit of time
  std::vector<int> local_stage_;  // per stage: its number within its rank
  int most_local_ = 1;
};

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
    // A time at every fifth slot.
    for (int i = begin; i < end; i += kMark)
      times =
          padded(padded(times, head + (i - begin) * (width + 1)) + printed("%.4g", i * slots.slot()) + " ",
                 head + (std::min(i + kMark, end) - begin) * (width + 1));
    text += (begin == 0 ? "" : "\n") + without_trailing_spaces(times);
    for (size_t rank = 0; rank < slots.rows().size(); ++rank) {
      std::string line = padded("rank " + std::to_string(rank), head);
      for (int i = begin; i < end; ++i) line += cell_text(slots.rows()[rank][i], width, style.colors);
      text += without_trailing_spaces(line);
    }
  }
  return text;
}

std::string to_svg(const Schedule& schedule, const Simulation& simulation, const std::string& title) {
  return Drawing(schedule, simulation).write(title);
}

}  // namespace titan::pipeline
