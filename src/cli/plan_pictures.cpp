#include "cli/plan_pictures.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/report/page.h"
#include "cli/text.h"
#include "core/units.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

using nlohmann::json;
using plan::Activity;
using plan::Category;
using plan::Span;

constexpr int kMostCounters = 2000;  // points of a rank's memory, in a timeline

// ---- memory over time

struct MemoryMoment {
  double seconds = std::numeric_limits<double>::lowest();  // since the first rank's step began
  plan::BytesByCategory bytes{};
};

// When the computation comes to an allocation: with the next kernel of its stream that the host launches after it. Memory is the allocator's, which
// gives it out in the order of the host's calls.
std::vector<MemoryMoment> memory_of(const train::JobPlan& plan, size_t rank) {
  const plan::Trace& trace = *plan.roles[rank].rank.trace;
  std::map<size_t, double> begin_of_entry;
  for (const Span& span : plan.step.spans)
    if (span.rank == static_cast<int>(rank) && span.stream == trace.computing_stream())
      begin_of_entry.emplace(span.entry, span.begin);
  std::vector<MemoryMoment> moments;
  MemoryMoment now;
  auto next = begin_of_entry.begin();
  // Entries after the step's last kernel are the rehearsal's end.
  for (size_t i = 0; i < trace.entries().size() && next != begin_of_entry.end(); ++i) {
    const plan::Entry& entry = trace.entries()[i];
    if (next->first <= i) {
      now.seconds = std::max(now.seconds, next->second - plan.step.begin);
      moments.push_back(now);
      ++next;
    }
    if (entry.kind != plan::Entry::Kind::Allocate && entry.kind != plan::Entry::Kind::Free) continue;
    const plan::Allocation& allocation = trace.allocations()[entry.index];
    now.bytes[static_cast<size_t>(allocation.category)] +=
        entry.kind == plan::Entry::Kind::Allocate ? allocation.bytes : -allocation.bytes;
  }
  now.seconds = plan.step.seconds;
  moments.push_back(now);
  return moments;
}

std::string lane_name(const train::PlannedRole& role, int64_t stream) {
  if (stream >= 0) return role.stream_name(stream);
  const plan::Trace& trace = *role.rank.trace;
  for (const plan::Collective& call : trace.collectives())
    if (call.communicator == -1 - stream) return "calls of " + trace.name(call.group);
  return str("group ", -1 - stream);
}

struct Lane {
  std::string name;
  std::vector<const Span*> spans;
};

// The computation first, then other streams, then groups.
std::vector<Lane> lanes_of(const train::JobPlan& plan, size_t rank) {
  std::map<std::pair<bool, int64_t>, Lane> lanes;
  for (const Span& span : plan.step.spans)
    if (span.rank == static_cast<int>(rank))
      lanes[{span.stream < 0, std::abs(span.stream)}].spans.push_back(&span);
  std::vector<Lane> ordered;
  for (auto& [place, lane] : lanes) {
    lane.name = lane_name(plan.roles[rank], lane.spans[0]->stream);
    ordered.push_back(std::move(lane));
  }
  return ordered;
}

// ---- the image

constexpr double kWidth = 1200, kLeft = 150, kRight = 20, kLane = 16, kThinLane = 5, kGap = 10, kTop = 64,
                 kMemory = 240;

struct Colour {
  const char* name;
  const char* fill;
};
// Distinguishable also by people who see no red or green.
constexpr std::array<Colour, 4> kWork = {Colour{"forward", "#4477aa"}, Colour{"backward", "#66ccee"},
                                         Colour{"optimizer", "#ee6677"}, Colour{"communication", "#ccbb44"}};
constexpr std::array<const char*, plan::kNumCategories> kMemoryFills = {
    "#332288", "#88ccee", "#44aa99", "#117733", "#ddcc77", "#bbbbbb", "#cc6677"};

size_t kind_of(const Span& span) {
  if (span.activity == Activity::ExposedCommunication) return 3;
  if (span.activity == Activity::Optimizer) return 2;
  return span.module.find("backward") != std::string::npos ? 1 : 0;
}

std::string box(double x, double y, double width, double height, const char* fill) {
  return str("<rect x=\"", number("%.2f", x), "\" y=\"", number("%.1f", y), "\" width=\"",
             number("%.2f", width), "\" height=\"", number("%.1f", height), "\" fill=\"", fill, "\"/>\n");
}

std::string grid_line(double x1, double y1, double x2, double y2) {
  return str("<line x1=\"", number("%.1f", x1), "\" y1=\"", number("%.1f", y1), "\" x2=\"",
             number("%.1f", x2), "\" y2=\"", number("%.1f", y2), "\" stroke=\"#dddddd\"/>\n");
}

std::string label(double x, double y, const std::string& text, const char* anchor = "start") {
  return str("<text x=\"", number("%.1f", x), "\" y=\"", number("%.1f", y), "\" text-anchor=\"", anchor,
             "\">", report::escaped(text), "</text>\n");
}

class Image {
 public:
  explicit Image(const train::JobPlan& plan) : plan_(plan) {}

  std::string draw(const std::string& title) {
    std::string streams;
    double y = kTop;
    const bool is_pipeline = plan_.step.ranks.size() > 1;
    for (size_t rank = 0; rank < plan_.step.ranks.size(); ++rank) {
      streams += is_pipeline ? rank_of_pipeline(rank, y) : streams_of(rank, y);
    }
    // Later parts cover earlier ones.
    const std::string body = label(10, 22, title) + legend() + time_axis(y) + streams + memory(y + 50);
    const double height = y + 50 + kMemory + 50;
    return str("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", kWidth, "\" height=\"",
               std::lround(height),
               "\" font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" "
               "fill=\"white\"/>\n",
               body, "</svg>\n");
  }

 private:
  double x_of(double seconds) const {
    return kLeft + seconds / plan_.step.seconds * (kWidth - kLeft - kRight);
  }

  static std::string legend() {
    std::string text;
    double x = kLeft;
    for (const Colour& colour : kWork) {
      text += box(x, 36, 12, 12, colour.fill) + label(x + 16, 46, colour.name);
      x += 110;
    }
    return text;
  }

  // Spans that would be thinner than a third of a pixel are drawn as one with their neighbours of the same colour.
  std::string lane(std::vector<const Span*>& spans, double y, double height = kLane - 2) const {
    std::ranges::sort(spans, {}, &Span::begin);
    std::string text;
    for (size_t i = 0; i < spans.size();) {
      const size_t kind = kind_of(*spans[i]);
      double begin = x_of(spans[i]->begin - plan_.step.begin), end = x_of(spans[i]->end - plan_.step.begin);
      size_t next = i + 1;
      for (; next < spans.size() && kind_of(*spans[next]) == kind; ++next) {
        if (x_of(spans[next]->begin - plan_.step.begin) - end > 0.3) break;
        end = std::max(end, x_of(spans[next]->end - plan_.step.begin));
      }
      begin = std::max(begin, kLeft);
      end = std::min(end, kWidth - kRight);
      if (end > begin) text += box(begin, y, std::max(end - begin, 0.2), height, kWork[kind].fill);
      i = next;
    }
    return text;
  }

  std::string streams_of(size_t rank, double& y) const {
    std::string text;
    for (Lane& each : lanes_of(plan_, rank)) {
      text += label(kLeft - 6, y + 11, each.name, "end") + lane(each.spans, y);
      y += kLane;
    }
    y += kGap;
    return text;
  }

  // The computation, and in a thin lane below it all communication, because all streams of all ranks would be too many.
  std::string rank_of_pipeline(size_t rank, double& y) const {
    std::vector<const Span*> computation, communication;
    for (const Lane& each : lanes_of(plan_, rank))
      for (const Span* span : each.spans)
        if (span->activity == Activity::ExposedCommunication)
          communication.push_back(span);
        else if (span->stream == plan_.roles[rank].rank.trace->computing_stream())
          computation.push_back(span);
    std::string text = label(kLeft - 6, y + 11, plan_.roles[rank].rank.role.name, "end") +
                       lane(computation, y) + lane(communication, y + kLane - 2, kThinLane);
    y += kLane + kThinLane;
    return text;
  }

  std::string time_axis(double y) const {
    const bool in_ms = plan_.step.seconds < 1;
    const double unit = in_ms ? 1e-3 : 1;
    const report::Scale scale(0, plan_.step.seconds / unit, /*log=*/false, /*widen=*/false);
    std::string text;
    for (const double mark : scale.marks()) {
      const double x = x_of(mark * unit);
      text += grid_line(x, kTop - 4, x, y + 4) +
              label(x, y + 16, report::mark_text(mark, scale.marks()[1]) + (in_ms ? " ms" : " s"), "middle");
    }
    return text;
  }

  std::string memory(double y) const {
    size_t rank = 0;
    for (size_t r = 0; r < plan_.step.ranks.size(); ++r)
      if (plan_.roles[r].rank.peak_allocated_bytes > plan_.roles[rank].rank.peak_allocated_bytes) rank = r;
    const std::vector<MemoryMoment> moments = memory_of(plan_, rank);
    const double usable = static_cast<double>(plan_.cluster.device.usable_bytes());
    double most = 0;
    for (const MemoryMoment& moment : moments)
      most = std::max(most, static_cast<double>(plan::total(moment.bytes)));
    const report::Scale scale(0, most / kGiB, /*log=*/false, /*widen=*/true);
    const auto y_of = [&](double bytes) { return y + kMemory * (1 - scale.place(bytes / kGiB)); };
    std::string text = label(10, y - 14, "GiB in tensors of " + plan_.roles[rank].rank.role.name);
    // The highest of each pixel's moments.
    std::map<int64_t, const MemoryMoment*> of_pixel;
    for (const MemoryMoment& moment : moments) {
      const MemoryMoment*& kept = of_pixel[std::llround(x_of(std::max(moment.seconds, 0.0)))];
      if (!kept || plan::total(kept->bytes) < plan::total(moment.bytes)) kept = &moment;
    }
    for (const double mark : scale.marks()) {
      const double at = y_of(mark * kGiB);
      text += grid_line(kLeft, at, kWidth - kRight, at) +
              label(kLeft - 6, at + 4, report::mark_text(mark, scale.marks()[1]), "end");
    }
    for (int category = plan::kNumCategories - 1; category >= 0; --category) {
      std::string points = str(kLeft, ",", y + kMemory);
      double height = -1;  // there is none yet
      for (const auto& [x, moment] : of_pixel) {
        double below = 0;
        for (int i = 0; i <= category; ++i)
          below += static_cast<double>(moment->bytes[static_cast<size_t>(i)]);
        // It stays as it was until then, also while the stream waits.
        const double next = y_of(below);
        points += str(" ", x, ",", number("%.1f", height < 0 ? next : height));
        height = next;
        points += str(" ", x, ",", number("%.1f", height));
      }
      points +=
          str(" ", kWidth - kRight, ",", number("%.1f", height), " ", kWidth - kRight, ",", y + kMemory);
      text += str("<polygon points=\"", points, "\" fill=\"", kMemoryFills[static_cast<size_t>(category)],
                  "\"/>\n");
      const double at = kLeft + 140.0 * category;
      text += box(at, y + kMemory + 14, 12, 12, kMemoryFills[static_cast<size_t>(category)]) +
              label(at + 16, y + kMemory + 24, name_of(static_cast<Category>(category)));
    }
    if (y_of(usable) > y)
      text += label(kWidth - kRight, y_of(usable) - 4, "usable", "end") +
              str("<line x1=\"", kLeft, "\" y1=\"", number("%.1f", y_of(usable)), "\" x2=\"", kWidth - kRight,
                  "\" y2=\"", number("%.1f", y_of(usable)), "\" stroke=\"black\" stroke-dasharray=\"4\"/>\n");
    return text;
  }

  const train::JobPlan& plan_;
};

}  // namespace

std::string timeline_json(const train::JobPlan& plan) {
  // Other ranks begin before the first one, and Perfetto leaves out what is before 0.
  double origin = plan.step.begin;
  for (const Span& span : plan.step.spans) origin = std::min(origin, span.begin);
  json events = json::array();
  // Whole nanoseconds, so that no slice ends after the next one begins: Perfetto drops one of two that overlap.
  const auto round_to_ns = [](double micro) { return std::round(micro * 1e3) / 1e3; };
  const auto micro = [&](double seconds) { return round_to_ns(seconds * 1e6); };
  for (size_t rank = 0; rank < plan.step.ranks.size(); ++rank) {
    const train::PlannedRole& role = plan.roles[rank];
    events.push_back({{"ph", "M"},
                      {"name", "process_name"},
                      {"pid", role.rank.role.rank},
                      {"args", {{"name", str("rank ", role.rank.role.rank, ": ", role.rank.role.name)}}}});
    // Perfetto reads no numbers of threads below 0.
    int64_t tid = 0;
    for (const Lane& lane : lanes_of(plan, rank)) {
      events.push_back({{"ph", "M"},
                        {"name", "thread_name"},
                        {"pid", role.rank.role.rank},
                        {"tid", tid},
                        {"args", {{"name", lane.name}}}});
      for (const Span* span : lane.spans) {
        const double begin = micro(span->begin - origin), end = micro(span->end - origin);
        events.push_back({{"ph", "X"},
                          {"name", span->name},
                          {"cat", name_of(span->activity)},
                          {"pid", role.rank.role.rank},
                          {"tid", tid},
                          {"ts", begin},
                          {"dur", round_to_ns(end - begin)},
                          {"args", {{"module", span->module}}}});
      }
      ++tid;
    }
    double next_counted = std::numeric_limits<double>::lowest();
    for (const MemoryMoment& moment : memory_of(plan, rank)) {
      if (moment.seconds < next_counted) continue;
      next_counted = moment.seconds + plan.step.seconds / kMostCounters;
      json values = json::object();
      for (int i = 0; i < plan::kNumCategories; ++i)
        values[name_of(static_cast<Category>(i))] = moment.bytes[static_cast<size_t>(i)];
      events.push_back({{"ph", "C"},
                        {"name", "memory"},
                        {"pid", role.rank.role.rank},
                        {"ts", micro(plan.step.begin + moment.seconds - origin)},
                        {"args", values}});
    }
  }
  return json{{"displayTimeUnit", "ms"}, {"traceEvents", events}}.dump() + "\n";
}

std::string step_svg(const train::JobPlan& plan, const std::string& title) { return Image(plan).draw(title); }

}  // namespace titan::cli
