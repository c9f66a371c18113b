// Saving, on the training thread: everything up to the copy, and waiting for the background thread.

#include <chrono>
#include <exception>
#include <string_view>
#include <utility>

#include <ATen/Parallel.h>

#include "checkpoint/format/rank_file.h"
#include "checkpoint/save/checkpointer_impl.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::checkpoint {

using detail::agree;
using detail::KeyedState;
using detail::NamedTensor;
using detail::Progress;
using detail::SaveJob;
using detail::SaveOutcome;
using detail::throw_if;
using detail::Verdict;

namespace {

using Clock = std::chrono::steady_clock;

// All ranks agree that a save can't be made, and none is lost.
struct AgreedFailure : Error {
  using Error::Error;
};

// Ends the reason for a skipped save that is no cause for concern.
constexpr std::string_view kBusy = " is still being written";

std::string of_step(int64_t step) { return titan::str("checkpoint of step ", step, ": "); }

// A run that saves to disk can't continue with ranks that are out of step. States in the hosts' memory are an
// extra: training itself notices a lost rank.
bool stops_run(const SaveOptions& options, const SaveOutcome& outcome) {
  return options.stop_on_failure || (outcome.lost && !options.peers);
}

// In these phases a rank waits for others, with a time limit of its own.
bool waits_for_ranks(SavePhase phase) {
  return phase == SavePhase::Gather || phase == SavePhase::Verdict || phase == SavePhase::CopyPiece;
}

void set_staged(Progress& progress) {
  std::lock_guard lock(progress.mutex);
  progress.staged = true;
  progress.changed.notify_all();
}

// Returns the number of failed saves.
int64_t count_ended(Progress& progress, const SaveOutcome& outcome) {
  std::lock_guard lock(progress.mutex);
  ++(outcome.failure.empty() ? progress.counts.complete : progress.counts.failed);
  return progress.counts.failed;
}

bool last_failed(Progress& progress) {
  std::lock_guard lock(progress.mutex);
  return !progress.outcome.failure.empty();
}

void set_ended(Progress& progress, SaveOutcome outcome) {
  std::lock_guard lock(progress.mutex);
  progress.outcome = std::move(outcome);
  progress.ended = true;
  progress.changed.notify_all();
}

void throw_agreed(const Verdict& verdict) {
  if (!verdict.text.empty() && !verdict.lost) throw AgreedFailure(verdict.text);
  throw_if(verdict);
}

void log_failed(const std::string& failure, int64_t number) {
  log::error(titan::str(failure, "; training goes on without it",
                        number > 1 ? titan::str(" (failure number ", number, ")") : ""));
}

void copy_or_note(SaveJob& job, int num_threads, const std::function<void(SavePhase)>& on_phase) {
  try {
    if (on_phase) on_phase(SavePhase::Stage);
    job.staging->copy_from_host(num_threads);
  } catch (const std::exception& error) {
    job.staging_failure = titan::str("the copy to host memory failed: ", error.what());
  }
}

}  // namespace

bool Checkpointer::Impl::save(int64_t step) {
  if (skips(step)) return false;
  const auto start_time = Clock::now();
  std::string problem = wait_for_last();
  const double waited = std::chrono::duration<double>(Clock::now() - start_time).count();
  if (waited > 0.1) log::info_rank0(titan::str(of_step(step), "waited ", waited, " s for the previous one"));
  std::vector<KeyedState> states;
  SaveJob job;
  job.step = step;
  job.num_threads = at::get_num_threads();
  // A problem left by an earlier save stops the run in any case. (In memory a save that can't begin is
  // skipped.)
  if (!options.stop_on_failure && !options.peers) {
    throw_if(agree(*control_, problem));
    problem.clear();
  }
  try {
    lay_out(step, problem, states, job);
  } catch (const AgreedFailure& error) {
    if (options.stop_on_failure) throw;
    note_failed(error.what());
    return false;
  }
  job.table = plan_->table();
  for (auto& [key, state] : states) {
    job.texts[key] = std::move(state.text);
    if (state.merge) job.merges[key] = std::move(state.merge);
  }
  start(std::move(job));
  if (options.async != AsyncMode::Disabled) return true;
  if (const std::string failed = wait_for_verdict(); !failed.empty()) throw Error(failed);
  return true;
}

// ---- skipping

std::string Checkpointer::Impl::skip_reason() const {
  std::lock_guard lock(progress_->mutex);
  if (background_->busy()) return titan::str("that of step ", progress_->step, kBusy);
  if (options.peers && progress_->outcome.lost)
    return titan::str("the ranks fell out of step in that of step ", progress_->step);
  return writer_->busy_reason();
}

bool Checkpointer::Impl::skips(int64_t step) {
  if (!options.skip_when_busy) return false;
  const std::string reason = detail::any_text(*control_, skip_reason());
  if (reason.empty()) return false;
  const bool is_busy = reason.ends_with(kBusy);
  const std::string text = titan::str(of_step(step), "skipped, as ", reason);
  std::lock_guard lock(progress_->mutex);
  ++progress_->counts.skipped;
  // In memory skipping is normal, since states come as often as possible. A lasting reason is logged once.
  if (!options.peers)
    log::warning_rank0(text);
  else if (is_busy || std::exchange(told_reason_, reason) == reason)
    log::debug("peer " + text);
  else
    log::warning_rank0("peer " + text);
  return true;
}

// ---- planning and laying out

std::vector<KeyedState> Checkpointer::Impl::states(const std::set<std::string>& keys) const {
  std::vector<KeyedState> states;
  for (const auto& [key, object] : objects)
    if (keys.count(key)) states.push_back({key, object->state()});
  return states;
}

std::vector<KeyedState> Checkpointer::Impl::states() const {
  std::set<std::string> all;
  for (const auto& [key, object] : objects) all.insert(key);
  return states(all);
}

// Whatever fails here on one rank, the others wait for it in agree().
void Checkpointer::Impl::attempt(int64_t step, std::string& problem, const std::function<void()>& part) {
  if (problem.empty()) {
    problem = detail::problem_of(part);
    if (!problem.empty()) problem = of_step(step) + problem;
  }
  throw_agreed(agree(*control_, problem));
}

// All ranks make a first plan, or none does: the next save makes the same calls on each.
void Checkpointer::Impl::make_plan(int64_t step, std::string& problem, std::vector<KeyedState>& states,
                                   std::vector<NamedTensor>& tensors) {
  try {
    attempt(step, problem, [&] {
      enter(SavePhase::Agree);
      states = this->states();
      tensors = detail::tensors_of(states);
    });
    attempt(step, problem, [&] {
      enter(SavePhase::Plan);
      plan_.emplace(tensors, world, pipeline);
    });
    check_equal_plans(states);
  } catch (const Error&) {
    plan_.reset();
    throw;
  }
}

void Checkpointer::Impl::check_equal_plans(const std::vector<KeyedState>& states) {
  std::string plan = plan_->digest();
  for (const auto& [key, state] : states) plan += titan::str(" ", key, state.merge ? "+" : "");
  const auto answers = control_->gather(plan);
  throw_agreed(control_->spread(unequal(*control_, answers, "has other objects, tensors or layouts than")));
}

void Checkpointer::Impl::lay_out(int64_t step, std::string problem, std::vector<KeyedState>& states,
                                 SaveJob& job) {
  std::vector<NamedTensor> tensors;
  const bool is_first = !plan_;
  if (is_first) make_plan(step, problem, states, tensors);
  try {
    attempt(step, problem, [&] {
      if (!is_first) {
        enter(SavePhase::Agree);
        states = this->states();
        tensors = detail::tensors_of(states);
        plan_->check_same(tensors);
      }
      const bool in_place = options.async == AsyncMode::Disabled;
      job.staging = std::make_shared<detail::Staging>(*plan_, tensors, *buffer_, in_place);
    });
  } catch (const Error&) {
    if (is_first) plan_.reset();
    throw;
  }
}

SaveSize Checkpointer::Impl::plan() {
  std::vector<KeyedState> states;
  std::vector<NamedTensor> tensors;
  std::string problem;
  if (!plan_) make_plan(0, problem, states, tensors);
  SaveSize size;
  for (const detail::PlannedPiece& piece : plan_->pieces()) {
    // The header has the name twice, numbers, and 17 characters for each checksum.
    const auto name_bytes = static_cast<int64_t>(piece.name.size());
    size.file_bytes += piece.num_bytes + 2 * name_bytes + 200 + 17 * (piece.num_bytes / kBlockBytes + 1);
    size.staged_bytes += piece.num_bytes;
  }
  return size;
}

// ---- the background part

void Checkpointer::Impl::start(SaveJob job) {
  const bool later = options.async == AsyncMode::Staged;
  // Otherwise nothing is waited for later, and the tensors needn't be kept alive.
  staging_ = later ? job.staging : nullptr;
  {
    std::lock_guard lock(progress_->mutex);
    progress_->step = job.step;
    progress_->staged = false;
    progress_->ended = false;
  }
  writer_->begin();
  try {
    job.staging->launch_from_device();
  } catch (const std::exception& error) {
    job.staging_failure = titan::str("the copy from the device failed: ", error.what());
  }
  const int num_threads = options.num_threads;
  if (!later) {
    // The caller may change what a GPU is still copying.
    job.staging->order_current_stream();
    copy_or_note(job, num_threads, options.on_phase);
    set_staged(*progress_);
  }
  // The thread may outlive this object, so it owns what it uses.
  const auto shared_job = std::make_shared<SaveJob>(std::move(job));
  background_->start([=, progress = progress_, writer = writer_, buffer = buffer_, options = options,
                      is_root = world.rank() == 0] {
    if (later) {
      copy_or_note(*shared_job, num_threads, options.on_phase);
      set_staged(*progress);
    }
    SaveOutcome outcome = writer->write(*shared_job);
    const int64_t num_failed = count_ended(*progress, outcome);
    if (!outcome.failure.empty() && is_root && !stops_run(options, outcome))
      log_failed(outcome.failure, num_failed);
    const bool complete = outcome.failure.empty();
    if (complete && is_root && options.peers && last_failed(*progress))
      log::info(titan::str("peer ", of_step(shared_job->step), "states are kept in memory again"));
    set_ended(*progress, std::move(outcome));
    if (complete) writer->prune(shared_job->step);
  });
}

void Checkpointer::Impl::note_failed(const std::string& failure) {
  const int64_t number = count_ended(*progress_, {.failure = failure});
  if (world.rank() == 0) log_failed((options.peers ? "peer " : "") + failure, number);
  set_ended(*progress_, {.failure = failure});
}

// ---- waiting and asking

void Checkpointer::Impl::wait_for_staging() {
  std::unique_lock lock(progress_->mutex);
  progress_->changed.wait(lock, [this] { return progress_->staged; });
  if (staging_) staging_->order_current_stream();
  staging_.reset();
}

bool Checkpointer::Impl::takes_too_long(Clock::time_point start) const {
  return Clock::now() - start > options.timeout && !waits_for_ranks(writer_->phase());
}

std::string Checkpointer::Impl::late_text() const {
  return titan::str(of_step(progress_->step), control_->name_of(world.rank()), " is still at ",
                    to_string(writer_->phase()), " after ", options.timeout.count(), " s");
}

std::string Checkpointer::Impl::wait_for_last() {
  const auto start = Clock::now();
  if (background_->wait([&] { return takes_too_long(start); })) return failure();
  std::lock_guard lock(progress_->mutex);
  return late_text();
}

std::string Checkpointer::Impl::wait_for_verdict() {
  constexpr std::chrono::milliseconds between(100);
  const auto start = Clock::now();
  std::unique_lock lock(progress_->mutex);
  while (!progress_->changed.wait_for(lock, between, [this] { return progress_->ended; }))
    if (takes_too_long(start)) return late_text();
  lock.unlock();
  return failure();
}

std::string Checkpointer::Impl::failure() {
  std::lock_guard lock(progress_->mutex);
  const SaveOutcome& outcome = progress_->outcome;
  if (outcome.failure.empty() || !stops_run(options, outcome)) return "";
  progress_->told = true;
  return outcome.failure;
}

bool Checkpointer::Impl::stops(bool only_lost) const {
  std::lock_guard lock(progress_->mutex);
  const SaveOutcome& outcome = progress_->outcome;
  return !outcome.failure.empty() && stops_run(options, outcome) && (!only_lost || outcome.lost);
}

std::string Checkpointer::Impl::last_failure() const {
  std::lock_guard lock(progress_->mutex);
  return progress_->outcome.failure;
}

SaveCounts Checkpointer::Impl::counts() const {
  std::lock_guard lock(progress_->mutex);
  return progress_->counts;
}

}  // namespace titan::checkpoint
