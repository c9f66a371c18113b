#include "observe/stragglers.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "core/process.h"
#include "dist/flight_record.h"
#include "observe/metrics_format.h"
#include "observe/structured_log.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/dist/collectives.h"
#include "titan/train/run_observer.h"

namespace titan::train {

namespace {

// Standard deviation / median absolute deviation of a normal distribution.
constexpr double kSigmaOfMad = 1.4826;
constexpr double kLeastSigma = 0.02;  // times the median: clocks and kernels aren't more exact
constexpr double kSigmaOfOne = 0.2;   // times its value: one rank to compare with shows no spread

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

std::vector<double> others_of(const std::vector<RankPace>& ranks, size_t rank) {
  std::vector<double> own;
  for (size_t i = 0; i < ranks.size(); ++i)
    if (i != rank && ranks[i].stage == ranks[rank].stage && ranks[i].own_s > 0) own.push_back(ranks[i].own_s);
  return own;
}

// By stage. No other rank of a stage is further above the median of its others.
std::map<int, size_t> slowest_ranks(const std::vector<RankPace>& ranks) {
  std::map<int, size_t> slowest;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].own_s <= 0) continue;
    size_t& found = slowest.try_emplace(ranks[rank].stage, rank).first->second;
    if (ranks[rank].own_s > ranks[found].own_s) found = rank;
  }
  return slowest;
}

double sigma_of(const std::vector<double>& values, double median) {
  if (values.size() == 1) return kSigmaOfOne * median;
  std::vector<double> distances;
  for (double value : values) distances.push_back(std::abs(value - median));
  return std::max(kSigmaOfMad * median_of(std::move(distances)), kLeastSigma * median);
}

int64_t ns_of(double seconds) { return std::llround(1e9 * seconds); }

}  // namespace

void describe(config::Table<StragglerSettings>& table) {
  table.field("enable", &StragglerSettings::enable,
              "compare the ranks' own times (without waits for each other) at each logged step, and name the "
              "slowest if it is far off");
  table.field("sigma", &StragglerSettings::sigma,
              "far off: this many standard deviations above the median of the other ranks", config::above(0));
  table.field("ratio", &StragglerSettings::ratio, "and this many times the median", config::at_least(1));
  table.field("intervals", &StragglerSettings::intervals,
              "and for this many consecutive intervals of log_freq", config::at_least(1));
}

std::optional<Straggler> find_straggler(const std::vector<RankPace>& ranks, const StragglerSettings& settings,
                                        double least_share) {
  std::optional<Straggler> worst;
  for (const auto& [stage, rank] : slowest_ranks(ranks)) {
    const double own = ranks[rank].own_s;
    const std::vector<double> others = others_of(ranks, rank);
    if (others.empty()) continue;
    const double median = median_of(others);
    const double sigma = sigma_of(others, median);
    if (own <= median * settings.ratio || own <= median + settings.sigma * sigma) continue;
    if (own <= median + least_share * ranks[rank].step_s) continue;
    if (worst && own - median <= worst->pace.own_s - worst->median_s) continue;
    worst = Straggler{static_cast<int>(rank), ranks[rank], median, sigma > 0 ? (own - median) / sigma : 0};
  }
  return worst;
}

StragglerWatch::StragglerWatch(const dist::World& world, int stage, StragglerSettings settings,
                               StructuredLog* log)
    : world_(world), settings_(settings), log_(log) {
  for (const std::string& text :
       world.everyone()->all_gather_text(str(stage, " ", host_name()), {"stragglers::hosts"})) {
    stages_.push_back(std::stoi(text));
    hosts_.push_back(text.substr(text.find(' ') + 1));
  }
  if (world.device().is_cuda()) device_.emplace();
}

bool StragglerWatch::is_own(Phase phase) const {
  if (phase == Phase::Data) return true;
  return !device_ && (phase == Phase::ForwardBackward || phase == Phase::Optimizer);
}

void StragglerWatch::begin(Phase phase, int64_t /*step*/) {
  if (phase == Phase::Step) {
    ++steps_;
    step_start_ns_ = steady_now_ns();
    fetched_waited_ns_.reset();
  }
  if (phase > Phase::Optimizer) end_step();
  // Between data and forward the ranks sum their token counts, so all wait for the rank whose data is last.
  if (phase == Phase::ForwardBackward && fetched_waited_ns_) {
    const int64_t waited = world_.recorder().waited_ns() - *fetched_waited_ns_;
    device_ ? data_now_.wait_ns = waited : wait_ns_ += waited;
    fetched_waited_ns_.reset();
  }
  if (phase == Phase::ForwardBackward && device_) device_->start(world_.device());
  if (!is_own(phase)) return;
  phase_start_ns_ = steady_now_ns();
  phase_waited_ns_ = world_.recorder().waited_ns();
}

void StragglerWatch::end(Phase phase, int64_t /*step*/, bool /*failed*/) {
  if (phase == Phase::Step) end_step();
  if (phase == Phase::Data) fetched_waited_ns_ = world_.recorder().waited_ns();
  if (!is_own(phase)) return;
  const int64_t waited = world_.recorder().waited_ns() - phase_waited_ns_;
  const int64_t own = steady_now_ns() - phase_start_ns_ - waited;
  if (device_) {
    data_now_.own_ns = own;
    return;
  }
  own_ns_ += own;
  wait_ns_ += waited;
}

// The host fetches data and counts tokens while the device still computes the step before, so only as much of
// that time counts as the device was idle.
void StragglerWatch::read_device() {
  for (const dist::StreamStep& step : device_->take()) {
    const DataTimes data = data_times_.front();
    data_times_.pop_front();
    const int64_t idle = ns_of(step.idle_s), own = std::min(data.own_ns, idle);
    own_ns_ += own + ns_of(step.span_s - step.waited_s);
    wait_ns_ += std::min(data.wait_ns, idle - own) + ns_of(step.waited_s);
    ++device_steps_;
  }
}

// The step's time ends with the optimizer, because only some steps do more.
void StragglerWatch::end_step() {
  if (const int64_t start = std::exchange(step_start_ns_, 0); start > 0) step_ns_ += steady_now_ns() - start;
  if (!device_) return;
  if (device_->stop()) data_times_.push_back(std::exchange(data_now_, {}));
  read_device();
}

void StragglerWatch::logged(const StepMetrics& metrics) {
  if (warmed_up_ && steps_ > 0) measure(metrics.step);
  warmed_up_ = true;
  steps_ = device_steps_ = own_ns_ = wait_ns_ = step_ns_ = 0;
}

void StragglerWatch::measure(int64_t step) {
  measured_step_ = step;
  // The device may not have finished a step in a short interval; then there are no times.
  const double scale = 1e-9 / static_cast<double>(device_ ? std::max<int64_t>(device_steps_, 1) : steps_);
  figures_ = {static_cast<double>(own_ns_) * scale, static_cast<double>(wait_ns_) * scale,
              1e-9 * static_cast<double>(step_ns_) / static_cast<double>(steps_)};
  if (!log_) return;
  log_->instant("own_s", figures_[0], "titan::train::StragglerWatch", step);
  log_->instant("wait_s", figures_[1], "titan::train::StragglerWatch", step);
}

void StragglerWatch::receive_figures(const std::vector<double>& of_ranks) {
  figures_.clear();
  paces_.clear();
  const double* values = of_ranks.data();
  for (const int stage : stages_) {
    paces_.push_back({.own_s = values[0], .wait_s = values[1], .stage = stage, .step_s = values[2]});
    values += of_ranks.size() / stages_.size();
  }
  const bool was_one = straggler_.has_value();
  update_straggler(find_straggler(paces_, settings_));
  // Repeated at every interval, and once when it is over, so that the end of a log shows the current state.
  if (log_ && world_.rank() == 0 && (was_one || straggler_))
    log_->instant("straggler", straggler_ ? straggler_->rank : -1, "titan::train::StragglerWatch",
                  measured_step_);
}

// A rank becomes the straggler after being the slowest for `intervals` intervals, and recovers after as many
// in which it wasn't, even if others take turns.
void StragglerWatch::update_straggler(const std::optional<Straggler>& found) {
  const int rank = found ? found->rank : -1, before = straggler_ ? straggler_->rank : -1;
  intervals_ = rank == candidate_ ? intervals_ + 1 : 1;
  absent_ = rank == before ? 0 : absent_ + 1;
  candidate_ = rank;
  if (found && intervals_ >= settings_.intervals) {
    straggler_ = found;
    if (rank != before) has_warned_ = false;
    if (!has_warned_) warn();
  } else if (before >= 0 && absent_ >= settings_.intervals) {
    straggler_.reset();
    if (std::exchange(has_warned_, false))
      log::info_rank0(str("step ", measured_step_, ": rank ", before, " no longer holds the others up"));
  }
}

bool WarningTimes::may_warn(int rank, Time now) {
  constexpr std::chrono::minutes kBetween(10);
  const auto [last, is_first] = last_.try_emplace(rank, now);
  if (!is_first && now - last->second < kBetween) return false;
  last->second = now;
  return true;
}

void StragglerWatch::warn() {
  has_warned_ = warning_times_.may_warn(straggler_->rank, std::chrono::steady_clock::now());
  if (has_warned_) log::warning_rank0(warning_text());
}

std::string StragglerWatch::warning_text() const {
  const Straggler& slow = *straggler_;
  return str("step ", measured_step_, ": rank ", slow.rank, " (", hosts_[static_cast<size_t>(slow.rank)],
             ") holds the others up: ", formatted("%.4f", slow.pace.own_s),
             " s per step of its own, without waits; the median of the others is ",
             formatted("%.4f", slow.median_s), " s (", formatted("%.1f", slow.pace.own_s / slow.median_s),
             " times, ", formatted("%.0f", slow.deviation), " sigma). It waited ",
             formatted("%.4f", slow.pace.wait_s), " s per step for its peers.");
}

}  // namespace titan::train
