#include "observe/stragglers.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/ops/empty.h>

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

double sigma_of(const std::vector<double>& values, double median) {
  if (values.size() == 1) return kSigmaOfOne * median;
  std::vector<double> distances;
  for (double value : values) distances.push_back(std::abs(value - median));
  return std::max(kSigmaOfMad * median_of(std::move(distances)), kLeastSigma * median);
}

constexpr int64_t kFigures = 4;  // numbers exchanged per rank

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
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const std::vector<double> others = others_of(ranks, rank);
    if (others.empty()) continue;
    const double median = median_of(others), own = ranks[rank].own_s;
    const double sigma = sigma_of(others, median);
    if (own <= 0 || own <= median * settings.ratio || own <= median + settings.sigma * sigma) continue;
    if (own <= median + least_share * ranks[rank].step_s) continue;
    if (worst && own - median <= worst->pace.own_s - worst->median_s) continue;
    worst = Straggler{static_cast<int>(rank), ranks[rank], median, sigma > 0 ? (own - median) / sigma : 0};
  }
  return worst;
}

StragglerWatch::StragglerWatch(const dist::World& world, int stage, StragglerSettings settings,
                               StructuredLog* log)
    : world_(world),
      stage_(stage),
      settings_(settings),
      log_(log),
      hosts_(world.everyone()->all_gather_text(host_name(), {"stragglers::hosts"})) {
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
  if (warmed_up_ && steps_ > 0) compare(metrics.step);
  warmed_up_ = true;
  steps_ = device_steps_ = own_ns_ = wait_ns_ = step_ns_ = 0;
}

void StragglerWatch::compare(int64_t step) {
  // The device may not have finished a step in a short interval; then there are no times.
  const double scale = 1e-9 / static_cast<double>(device_ ? std::max<int64_t>(device_steps_, 1) : steps_);
  const auto size = static_cast<size_t>(world_.size());
  at::Tensor mine = at::empty({kFigures}, at::kDouble);
  at::Tensor all = at::empty({kFigures * world_.size()}, at::kDouble);
  double* own = mine.mutable_data_ptr<double>();
  own[0] = static_cast<double>(own_ns_) * scale;
  own[1] = static_cast<double>(wait_ns_) * scale;
  own[2] = stage_;
  own[3] = 1e-9 * static_cast<double>(step_ns_) / static_cast<double>(steps_);
  world_.everyone()->all_gather(all, mine, {"stragglers::compare"}).wait();
  const double* values = all.const_data_ptr<double>();
  paces_.resize(size);
  for (size_t rank = 0; rank < size; ++rank, values += kFigures)
    paces_[rank] = {values[0], values[1], static_cast<int>(values[2]), values[3]};
  if (log_) {
    log_->instant("own_s", own[0], "titan::train::StragglerWatch", step);
    log_->instant("wait_s", own[1], "titan::train::StragglerWatch", step);
  }
  const bool was_one = straggler_.has_value();
  update_straggler(step, find_straggler(paces_, settings_));
  // Repeated at every interval, and once when it is over, so that the end of a log shows the current state.
  if (log_ && world_.rank() == 0 && (was_one || straggler_))
    log_->instant("straggler", straggler_ ? straggler_->rank : -1, "titan::train::StragglerWatch", step);
}

// A rank becomes the straggler after being the slowest for `intervals` intervals, and recovers after as many
// in which it wasn't, even if others take turns.
void StragglerWatch::update_straggler(int64_t step, const std::optional<Straggler>& found) {
  const int rank = found ? found->rank : -1, before = straggler_ ? straggler_->rank : -1;
  intervals_ = rank == candidate_ ? intervals_ + 1 : 1;
  absent_ = rank == before ? 0 : absent_ + 1;
  candidate_ = rank;
  if (found && intervals_ >= settings_.intervals) {
    straggler_ = found;
    if (rank != before) has_warned_ = false;
    if (!has_warned_) warn(step);
  } else if (before >= 0 && absent_ >= settings_.intervals) {
    straggler_.reset();
    if (std::exchange(has_warned_, false))
      log::info_rank0(str("step ", step, ": rank ", before, " no longer holds the others up"));
  }
}

bool WarningTimes::may_warn(int rank, Time now) {
  constexpr std::chrono::minutes kBetween(10);
  const auto [last, is_first] = last_.try_emplace(rank, now);
  if (!is_first && now - last->second < kBetween) return false;
  last->second = now;
  return true;
}

void StragglerWatch::warn(int64_t step) {
  has_warned_ = warning_times_.may_warn(straggler_->rank, std::chrono::steady_clock::now());
  if (has_warned_) log::warning_rank0(warning_text(step));
}

std::string StragglerWatch::warning_text(int64_t step) const {
  const Straggler& slow = *straggler_;
  return str("step ", step, ": rank ", slow.rank, " (", hosts_[static_cast<size_t>(slow.rank)],
             ") holds the others up: ", formatted("%.4f", slow.pace.own_s),
             " s per step of its own, without waits; the median of the others is ",
             formatted("%.4f", slow.median_s), " s (", formatted("%.1f", slow.pace.own_s / slow.median_s),
             " times, ", formatted("%.0f", slow.deviation), " sigma). It waited ",
             formatted("%.4f", slow.pace.wait_s), " s per step for its peers.");
}

}  // namespace titan::train
