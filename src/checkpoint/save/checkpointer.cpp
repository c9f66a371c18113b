#include "titan/checkpoint/checkpointer.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <exception>
#include <numeric>
#include <string_view>
#include <utility>

#include <ATen/Parallel.h>

#include "checkpoint/format/rank_file.h"
#include "checkpoint/peer/peer_writer.h"
#include "checkpoint/save/checkpointer_impl.h"
#include "core/threads.h"
#include "core/units.h"
#include "dist/device_backend.h"
#include "dist/flight_record.h"
#include "titan/checkpoint/storage.h"
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

std::vector<int> all_ranks(const dist::World& world) {
  std::vector<int> ranks(static_cast<size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Numbers the checkpointers of a job: each has its own groups, so that the messages of their saves don't mix.
// Returns the same number on all ranks, however many checkpointers each of them made before.
int64_t next_number(const dist::World& world) {
  static std::atomic<int64_t> made = 0;
  const auto number = static_cast<int64_t>(
      world.everyone()->max(static_cast<double>(made), {.phase = "checkpoint::connect"}));
  made = number + 1;
  return number;
}

SaveOptions checked(SaveOptions options) {
  std::vector<std::string> problems;
  if (options.peers) {
    options.folder = options.peers->path();
    options.skip_when_busy = true;
  }
  if (options.folder.empty()) problems.push_back("checkpoint: no folder is given");
  if (options.keep_latest < 0)
    problems.push_back(titan::str("checkpoint: ", options.keep_latest,
                                  " checkpoints can't be kept; allowed: 0 (all) and above"));
  if (options.num_threads < 1)
    problems.push_back(
        titan::str("checkpoint: ", options.num_threads, " threads can't write; allowed: 1 and above"));
  if (options.timeout < std::chrono::seconds(1))
    problems.push_back(
        titan::str("checkpoint: a timeout of ", options.timeout.count(), " s; allowed: 1 and above"));
  if (!problems.empty()) throw ConfigError(problems);
  options.folder = normalized(options.folder);
  return options;
}

// Adds the duration of its scope to a sum.
class Timer {
 public:
  explicit Timer(double& sum) : sum_(sum) {}
  ~Timer() { sum_ += seconds_since(start_); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  double& sum_;
  Clock::time_point start_ = Clock::now();
};

// ---- saves

// All ranks agree that a save can't be made, and none is lost.
struct AgreedFailure : Error {
  using Error::Error;
};

// Ends the reason for skipping a save when that is no cause for concern.
constexpr std::string_view kBusy = " is still being written";

std::string of_step(int64_t step) { return titan::str("checkpoint of step ", step, ": "); }

// A run that saves to disk can't continue with ranks that are out of step. States in the hosts' memory are an
// extra: training itself notices a lost rank.
bool stops_run(const SaveOptions& options, const SaveOutcome& outcome) {
  return options.stop_on_failure || (outcome.lost && !options.peers);
}

// In these phases a rank waits for others, and the wait has its own time limit.
bool waits_for_ranks(SavePhase phase) {
  return phase == SavePhase::Gather || phase == SavePhase::Verdict || phase == SavePhase::CopyPiece;
}

void enter(const SaveOptions& options, SavePhase phase) {
  if (options.on_phase) options.on_phase(phase);
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
  log::error(titan::str(failure, "; training continues without it",
                        number > 1 ? titan::str(" (failure number ", number, ")") : ""));
}

void copy_or_note(SaveJob& job, const SaveOptions& options) {
  try {
    enter(options, SavePhase::Stage);
    job.staging->copy_from_host(options.num_threads);
  } catch (const std::exception& error) {
    job.staging_failure = titan::str("the copy to host memory failed: ", error.what());
  }
}

}  // namespace

const char* to_string(SavePhase phase) {
  static constexpr std::array names = {"Agree",      "Plan",     "Stage",    "MakeFolder",    "WriteFile",
                                       "WriteChunk", "SyncFile", "Gather",   "WriteManifest", "Commit",
                                       "Verdict",    "Prune",    "CopyPiece"};
  return names[static_cast<size_t>(phase)];
}

void detail::throw_if(const Verdict& verdict) {
  if (!verdict.text.empty()) throw Error(verdict.text);
}

// ---- the background thread

detail::Background::~Background() {
  if (!thread_.joinable()) return;
  busy() ? thread_.detach() : thread_.join();
}

void detail::Background::start(std::function<void()> job) {
  TITAN_INTERNAL_ASSERT(!busy(), "a second job while one is in progress");
  if (thread_.joinable()) thread_.join();
  SignalsBlocked blocked;
  std::lock_guard lock(state_->mutex);  // until then the thread can't end
  thread_ = std::thread([state = state_, job = std::move(job)]() mutable {
    const dist::BackgroundCalls background;
    if (dist::DeviceBackend* const devices = dist::device_backend()) devices->use_device_of_process();
    job();
    job = nullptr;  // releases what it holds before the job counts as done
    std::lock_guard lock(state->mutex);
    state->busy = false;
    state->changed.notify_all();
  });
  state_->busy = true;
  pthread_setname_np(thread_.native_handle(), "checkpoint");
}

bool detail::Background::busy() const {
  std::lock_guard lock(state_->mutex);
  return state_->busy;
}

bool detail::Background::wait(const std::function<bool()>& give_up) const {
  constexpr std::chrono::milliseconds between(100);
  std::unique_lock lock(state_->mutex);
  while (!state_->changed.wait_for(lock, between, [this] { return !state_->busy; }))
    if (give_up()) return false;
  return true;
}

// ---- the checkpointer

Checkpointer::Impl::Impl(const dist::World& given, const DeviceMesh& stages, SaveOptions save)
    : world(given), pipeline(stages), options(checked(std::move(save))) {
  TITAN_CHECK(world.backend() != "fake" || world.size() == 1,
              "checkpoint: a world of the fake backend has no other ranks to save with");
  const int64_t number = next_number(world);
  const auto group_for = [&](const std::string& name) {
    return world.group(all_ranks(world), name, titan::str(dist::kOwnTimeout, name, ".", number));
  };
  control_group_ = group_for("checkpoint.control");
  save_group_ = group_for("checkpoint");
  const bool copies = options.peers && options.peers->num_places() > 1;
  const auto copy_group = copies ? group_for("checkpoint.copies") : nullptr;
  for (const auto& group : {control_group_, save_group_, copy_group}) {
    if (!group) continue;
    group->set_timeout(options.timeout);
    // With NCCL, the group for host memory is made at its first collective, which all ranks have to join.
    static_cast<void>(group->sum(int64_t{1}, {.phase = "checkpoint::connect"}));
  }
  if (copies) copy_group->set_timeout(detail::kNoLimit);
  // A PeerFolder has opened its folder already.
  folder_ = options.read_only || options.peers
                ? detail::open_to_read(*control_group_)
                : detail::open_shared_folder(*control_group_, options.folder, options.timeout);
  const auto tree = [&](const std::shared_ptr<dist::Group>& group) {
    return detail::RankTree(world, group,
                            {.name = group->name(),
                             .run_id = folder_.run_id,
                             .hosts = folder_.hosts,
                             .timeout = options.timeout});
  };
  control_.emplace(tree(control_group_));
  if (options.peers)
    writer_ = std::make_shared<detail::PeerWriter>(options, folder_.run_id, tree(save_group_), copy_group);
  else
    writer_ = std::make_shared<detail::StepWriter>(options, folder_.run_id, tree(save_group_));
}

Checkpointer::Impl::~Impl() {
  try {
    const bool thrown = progress_->thrown;
    const std::string problem = wait_for_last();
    if (!problem.empty() && !thrown) log::error(problem);
  } catch (const std::exception& error) {
    log::error(error.what());
  }
}

Checkpointer::Checkpointer(const dist::World& world, const DeviceMesh& pipeline, SaveOptions options)
    : impl_(std::make_unique<Impl>(world, pipeline, std::move(options))) {}
Checkpointer::~Checkpointer() = default;
Checkpointer::Checkpointer(Checkpointer&&) noexcept = default;

void Checkpointer::add(const std::string& key, Stateful& object) {
  const bool valid = !key.empty() && std::all_of(key.begin(), key.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_';
  });
  TITAN_CHECK(valid, "checkpoint: key '", key, "'; allowed: letters, digits, underscores");
  TITAN_CHECK(!impl_->used, "checkpoint: '", key, "' is added after the first save or load");
  TITAN_CHECK(impl_->objects.emplace(key, &object).second, "checkpoint: two objects have the key '", key,
              "'");
}

SaveSize Checkpointer::plan() {
  impl_->used = true;
  std::vector<detail::KeyedState> states;
  std::vector<detail::NamedTensor> tensors;
  std::string problem;
  if (!impl_->plan_) {
    impl_->make_plan(0, problem, states, tensors);
    const bool in_place = impl_->options.async == AsyncMode::Disabled;
    detail::StagingNeed need = detail::staging_need(*impl_->plan_, tensors, in_place);
    if (need.page_locked) impl_->buffer_->reserve_early(std::move(need));
  }
  SaveSize size;
  for (const detail::PlannedPiece& piece : impl_->plan_->pieces()) {
    // The header has the name twice, numbers, and 17 characters for each checksum.
    const auto name_bytes = static_cast<int64_t>(piece.name.size());
    size.file_bytes += piece.num_bytes + 2 * name_bytes + 200 + 17 * (piece.num_bytes / kBlockBytes + 1);
    size.staged_bytes += piece.num_bytes;
  }
  return size;
}

bool Checkpointer::save(int64_t step) {
  TITAN_CHECK(step >= 0, "checkpoint: step ", step, "; allowed: 0 and above");
  TITAN_CHECK(!impl_->options.read_only, "checkpoint: ", impl_->options.folder.string(), " is read-only");
  const Timer timer(impl_->blocked_seconds);
  impl_->used = true;
  return impl_->save(step);
}

void Checkpointer::wait_for_staging() {
  const Timer timer(impl_->blocked_seconds);
  detail::Progress& progress = *impl_->progress_;
  std::unique_lock lock(progress.mutex);
  progress.changed.wait(lock, [&] { return progress.staged; });
  if (impl_->staging_) impl_->staging_->order_current_stream();
  impl_->staging_.reset();
}

void Checkpointer::check() {
  if (const std::string failure = impl_->failure(); !failure.empty()) throw Error(failure);
}

void Checkpointer::finish() {
  if (const std::string problem = impl_->wait_for_last(); !problem.empty()) throw Error(problem);
}

bool Checkpointer::failed() const { return impl_->stops(); }
bool Checkpointer::lost_ranks() const { return impl_->stops(/*only_lost=*/true); }

std::string Checkpointer::last_failure() const {
  std::lock_guard lock(impl_->progress_->mutex);
  return impl_->progress_->outcome.failure;
}

SaveCounts Checkpointer::counts() const {
  std::lock_guard lock(impl_->progress_->mutex);
  return impl_->progress_->counts;
}

Loaded Checkpointer::load(const std::filesystem::path& step_folder, const LoadOptions& options) {
  impl_->used = true;
  return impl_->load(step_folder, options);
}

double Checkpointer::take_blocked_seconds() { return std::exchange(impl_->blocked_seconds, 0); }

// ---- saving, on the training thread: everything up to the copy

bool Checkpointer::Impl::save(int64_t step) {
  if (skips(step)) return false;
  const auto start_time = Clock::now();
  std::string problem = wait_for_last();
  const double waited = seconds_since(start_time);
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
  if (background_.busy()) return titan::str("the save of step ", progress_->step, kBusy);
  if (options.peers && progress_->outcome.lost)
    return titan::str("the ranks lost their common order while saving step ", progress_->step);
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
  // States are saved to memory as often as possible, so skipping is normal there. A lasting reason is logged
  // once.
  if (!options.peers)
    log::warning_rank0(text);
  else if (is_busy || std::exchange(logged_reason_, reason) == reason)
    log::debug("peer " + text);
  else
    log::warning_rank0("peer " + text);
  return true;
}

// ---- planning and laying out

std::vector<KeyedState> Checkpointer::Impl::states(const std::set<std::string>* keys) const {
  std::vector<KeyedState> states;
  for (const auto& [key, object] : objects)
    if (!keys || keys->contains(key)) states.push_back({key, object->state()});
  return states;
}

// Even if `part` fails on this rank, the others wait for it in agree().
void Checkpointer::Impl::attempt(int64_t step, std::string& problem, const std::function<void()>& part) {
  if (problem.empty()) {
    problem = detail::problem_of(part);
    if (!problem.empty()) problem = of_step(step) + problem;
  }
  throw_agreed(agree(*control_, problem));
}

// Either all ranks make a plan or none does, so that the next save makes the same calls on each.
void Checkpointer::Impl::make_plan(int64_t step, std::string& problem, std::vector<KeyedState>& states,
                                   std::vector<NamedTensor>& tensors) {
  try {
    attempt(step, problem, [&] {
      enter(options, SavePhase::Agree);
      states = this->states();
      tensors = detail::tensors_of(states);
    });
    attempt(step, problem, [&] {
      enter(options, SavePhase::Plan);
      plan_.emplace(tensors, world, pipeline);
    });
    std::string own = plan_->digest();
    for (const auto& [key, state] : states) own += titan::str(" ", key, state.merge ? "+" : "");
    const auto answers = control_->gather(own);
    throw_agreed(control_->spread(unequal(*control_, answers, "has other objects, tensors or layouts than")));
  } catch (const Error&) {
    plan_.reset();
    throw;
  }
}

void Checkpointer::Impl::lay_out(int64_t step, std::string problem, std::vector<KeyedState>& states,
                                 SaveJob& job) {
  std::vector<NamedTensor> tensors;
  const bool is_first = !plan_;
  if (is_first) make_plan(step, problem, states, tensors);
  try {
    attempt(step, problem, [&] {
      if (!is_first) {
        enter(options, SavePhase::Agree);
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
  if (!later) {
    // The caller may change the tensors while a GPU is still copying them.
    job.staging->order_current_stream();
    copy_or_note(job, options);
    set_staged(*progress_);
  }
  // The thread may outlive this object, so it owns what it uses.
  const auto shared_job = std::make_shared<SaveJob>(std::move(job));
  background_.start([=, progress = progress_, writer = writer_, buffer = buffer_, options = options,
                     is_root = world.rank() == 0] {
    if (later) {
      copy_or_note(*shared_job, options);
      set_staged(*progress);
    }
    SaveOutcome outcome = writer->write(*shared_job);
    const bool complete = outcome.failure.empty();
    const int64_t num_failed = count_ended(*progress, outcome);
    if (!complete && is_root && !stops_run(options, outcome)) log_failed(outcome.failure, num_failed);
    // Only this thread changes the outcome while a save is in progress.
    if (complete && is_root && options.peers && !progress->outcome.failure.empty())
      log::info(titan::str("peer ", of_step(shared_job->step), "in-memory checkpoints work again"));
    set_ended(*progress, std::move(outcome));
    if (complete) writer->prune(shared_job->step);
  });
}

void Checkpointer::Impl::note_failed(const std::string& failure) {
  const int64_t number = count_ended(*progress_, {.failure = failure});
  if (world.rank() == 0) log_failed((options.peers ? "peer " : "") + failure, number);
  set_ended(*progress_, {.failure = failure});
}

// ---- waiting, and the last save's failure

bool Checkpointer::Impl::takes_too_long(Clock::time_point start) const {
  return Clock::now() - start > options.timeout && !waits_for_ranks(writer_->phase());
}

std::string Checkpointer::Impl::late_text() const {
  return titan::str(of_step(progress_->step), control_->name_of(world.rank()), " is still at ",
                    to_string(writer_->phase()), " after ", options.timeout.count(), " s");
}

std::string Checkpointer::Impl::wait_for_last() {
  const auto start = Clock::now();
  if (background_.wait([&] { return takes_too_long(start); })) return failure();
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
  progress_->thrown = true;
  return outcome.failure;
}

bool Checkpointer::Impl::stops(bool only_lost) const {
  std::lock_guard lock(progress_->mutex);
  const SaveOutcome& outcome = progress_->outcome;
  return !outcome.failure.empty() && stops_run(options, outcome) && (!only_lost || outcome.lost);
}

}  // namespace titan::checkpoint
